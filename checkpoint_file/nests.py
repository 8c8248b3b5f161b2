"""Nests of plain containers with tensors in them, and tensors as ranges of elements. Knows no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """A tensor of the state that is spread over the ranks. A file holds it whole, a rank holds its pieces.

    dtype, shape, stride: of the whole tensor, which fills its memory without holes; its elements are numbered in the
        order of that memory (row by row where it is contiguous).
    pieces: (begin, values) with the elements [begin, begin + values.numel()) of the whole, one-dimensional and
        contiguous, on any device. Ascending, possibly none. Over all ranks every element is in exactly one piece.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    pieces: tuple[tuple[int, Tensor], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize


def map_leaves(nest: Any, leaf_types: tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """The nest with new containers, and `change(leaf)` for each leaf of one of `leaf_types`."""
    if isinstance(nest, leaf_types):
        return change(nest)
    if isinstance(nest, dict):
        return type(nest)((key, map_leaves(value, leaf_types, change)) for key, value in nest.items())
    if type(nest) in (list, tuple):
        return type(nest)(map_leaves(value, leaf_types, change) for value in nest)
    return nest


def leaves(nest: Any, leaf_types: tuple[type, ...]) -> list[Any]:
    found: list[Any] = []
    map_leaves(nest, leaf_types, found.append)
    return found


def is_dense(shape: tuple, strides: tuple) -> bool:
    """Whether the elements fill one range of memory without holes or overlap, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(strides, shape) if sz > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def flat_pieces(t: Tensor, begin: int, end: int) -> Iterator[Tensor]:
    """Views of `t` that, flattened and put one after another, are its elements [begin, end) in row-major order."""
    if begin >= end:
        return
    if t.is_contiguous():
        yield t.reshape(-1)[begin:end]
        return
    row = t.numel() // t.shape[0]
    first, last = -(-begin // row), end // row  # whole rows are [first, last)
    if first > last:  # both ends lie in one row
        yield from flat_pieces(t[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from flat_pieces(t[first - 1], begin - (first - 1) * row, row)
    if first < last:
        yield t[first:last]
    if end > last * row:
        yield from flat_pieces(t[last], 0, end - last * row)


def empty_storage(nbytes: int) -> torch.UntypedStorage:
    # Unlike torch.empty, a storage is not filled under torch.use_deterministic_algorithms: untouched, it costs nothing.
    return torch.UntypedStorage(nbytes, device="cpu")


def tensor_in(storage: torch.UntypedStorage, dtype: torch.dtype, nbytes_before: int, shape: Any, stride: Any) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, nbytes_before // dtype.itemsize, shape, stride)


def type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
