"""A state whose tensors are computed piece by piece while its file is written, so that none is ever whole in memory.

Owns: stand-ins for such tensors, and what a writer asks for in their place. Must not know: what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import checkpoint_utils
from checkpoint_file import CheckpointError
from checkpoint_file.nests import empty_storage, tensor_in

Elements = Callable[[int, int], Iterator[Tensor]]  # (begin, end) to flat pieces, of any dtype


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor by its dtype, its shape and `elements(begin, end)`, which gives its elements in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: Elements

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def bytes(self, begin: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """The bytes of the elements [begin, end) in pieces, each valid until the next."""
        for piece in self.elements(begin, self.numel if end is None else end):
            yield memoryview(piece.to(self.dtype).contiguous().view(torch.uint8).numpy())


class StandIns:
    """Tensors that occupy no memory, each for a Computed one; the same one for the same."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Computed, Tensor]] = {}
        self._by_memory: dict[int, Computed] = {}
        self.error: CheckpointError | None = None  # of what the values are read from

    def of(self, computed: Computed) -> Tensor:
        if id(computed) not in self._made:
            stride = torch.empty(computed.shape, device="meta").stride()
            tensor = tensor_in(empty_storage(computed.nbytes), computed.dtype, 0, computed.shape, stride)
            self._made[id(computed)] = computed, tensor
            self._by_memory[tensor.data_ptr()] = computed
        return self._made[id(computed)][1]

    def supply(self, parts: list[tuple[int, Tensor]], begin: int, end: int) -> Iterator[memoryview]:
        """The bytes [begin, end) of the record that a stand-in has become (CheckpointWriter.write)."""
        ((start, part),) = parts
        assert start == 0
        computed = self._by_memory.get(part.data_ptr())
        if computed is None:  # a tensor that is in memory
            yield memoryview(part.contiguous().view(torch.uint8).numpy())[begin:end]
            return
        size = computed.dtype.itemsize
        assert begin % size == end % size == 0, (begin, end, size)
        try:
            yield from computed.bytes(begin // size, end // size)
        except CheckpointError as error:
            self.error = error
            raise


def with_stand_ins(nest: Any, stand_ins: StandIns) -> Any:
    """The nest with a stand-in for each Computed tensor."""
    if isinstance(nest, Computed):
        return stand_ins.of(nest)
    if isinstance(nest, dict):
        return type(nest)((key, with_stand_ins(value, stand_ins)) for key, value in nest.items())
    if type(nest) in (list, tuple):
        return type(nest)(with_stand_ins(value, stand_ins) for value in nest)
    return nest


def write_streamed(state: dict[str, Any], path: str) -> int:
    """Write a state with Computed tensors in it as a checkpoint file: whole and durable, or not at all. Its bytes.

    Raises: CheckpointError: what the values are read from is damaged, or the file cannot be written.
    """
    stand_ins = StandIns()
    with checkpoint_utils.Publication(with_stand_ins(state, stand_ins), path) as publication:
        publication.write(stand_ins.supply)
        if stand_ins.error is not None:  # it names the file that was read, `finish` would name the one that is written
            raise stand_ins.error
        return publication.finish()
