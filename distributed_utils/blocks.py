"""Tensors as specs and blocks of bytes: what overlaps in memory travels once and overlaps again on arrival."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distributed_utils.errors import CannotSendError

# dtype name, shape, strides, block index (None: no elements, ON_META: no memory), first element within the block
Spec = tuple[str, tuple[int, ...], tuple[int, ...], int | None, int]


ON_META = -1


@dataclass
class _View:
    """A tensor to send: `core` has its expanded dimensions cut to one, `begin` to `end` its bytes in its storage."""

    position: int
    tensor: Tensor
    core: Tensor
    begin: int
    end: int

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.begin, self.core.dtype, self.core.shape, self.core.stride()


def lay_out(tensors: list[Tensor]) -> tuple[list[Spec], list[tuple[int, Callable[[], Tensor]]]]:
    specs: list[Spec | None] = [None] * len(tensors)
    blocks: list[tuple[int, Callable[[], Tensor]]] = []
    storages: dict[tuple[Any, ...], list[_View]] = {}
    for position, given in enumerate(tensors):
        tensor = given.detach().resolve_conj().resolve_neg()
        if tensor.numel() == 0 or tensor.is_meta:
            block = ON_META if tensor.is_meta else None
            specs[position] = (_name(tensor.dtype), tuple(tensor.shape), tensor.stride(), block, 0)
            continue
        view = _view_of(position, tensor)
        storages.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(view)
    for views in storages.values():
        for region in _overlapping(views):
            _lay_out_region(region, specs, blocks)
    return specs, blocks


def check_sendable(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or hasattr(tensor, "device_mesh"):
        kind = f"{type(tensor).__name__} on {tensor.device}, {tensor.layout}, {tensor.dtype}"
        raise CannotSendError(f"a tensor of this kind cannot be sent between ranks: {kind}")


def _view_of(position: int, tensor: Tensor) -> _View:
    core = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            core = core.narrow(dim, 0, 1)  # an expanded dimension is one line in memory: it travels once
    begin = core.storage_offset() * core.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(core.shape, core.stride())) + 1
    return _View(position, tensor, core, begin, begin + reach * core.element_size())


def _overlapping(views: list[_View]) -> list[list[_View]]:
    """Group views that share memory."""
    groups: list[list[_View]] = []
    end = -1
    for view in sorted(views, key=lambda view: view.begin):
        if view.begin < end:
            groups[-1].append(view)
        else:
            groups.append([view])
        end = max(end, view.end)
    return [part for group in groups for part in _apart_if_interleaved(group)]


def _apart_if_interleaved(group: list[_View]) -> list[list[_View]]:
    """Take apart what overlaps in extent only, such as two columns of a large matrix: else the matrix would travel."""
    alike: dict[tuple[Any, ...], list[_View]] = {}
    for view in group:
        alike.setdefault(view.identity, []).append(view)
    distinct = [views[0] for views in alike.values()]
    used = sum(view.core.numel() * view.core.element_size() for view in distinct)
    extent = max(view.end for view in group) - group[0].begin
    if len(distinct) == 1 or extent <= 2 * used or len({view.core.element_size() for view in distinct}) > 1:
        return [group]
    elements = torch.cat([_element_offsets(view.core) for view in distinct])
    return list(alike.values()) if elements.unique().numel() == elements.numel() else [group]


def _element_offsets(tensor: Tensor) -> Tensor:
    """Where the elements of `tensor` stand in its storage, int64 [numel]."""
    offsets = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride()):
        offsets = (offsets[:, None] + torch.arange(size) * stride).reshape(-1)
    return offsets


def _lay_out_region(
    region: list[_View], specs: list[Spec | None], blocks: list[tuple[int, Callable[[], Tensor]]]
) -> None:
    """Add one block that serves all views of `region`, and their specs."""
    first, block = region[0].core, len(blocks)
    dense = region[0].end - region[0].begin == first.numel() * first.element_size()
    if all(view.identity == region[0].identity for view in region) and not dense:
        # The gaps between its elements are not ours to send.
        blocks.append((first.numel() * first.element_size(), lambda: bytes_view(first.contiguous())))
        strides = _contiguous_strides(first.shape)
        for view in region:
            specs[view.position] = _spec(view, strides, block, 0)
        return
    begin = region[0].begin & ~15 if len(region) > 1 else region[0].begin  # a multiple of every element size
    end = max(view.end for view in region)
    blocks.append((end - begin, lambda: _storage_bytes(first, begin, end)))
    for view in region:
        specs[view.position] = _spec(view, view.core.stride(), block, (view.begin - begin) // view.core.element_size())


def _spec(view: _View, strides: tuple[int, ...], block: int, offset: int) -> Spec:
    shape = view.tensor.shape
    strides = tuple(0 if size != cut else stride for size, cut, stride in zip(shape, view.core.shape, strides))
    return _name(view.tensor.dtype), tuple(shape), strides, block, offset


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_view(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8, shared with it."""
    begin = tensor.storage_offset() * tensor.element_size()
    return _storage_bytes(tensor, begin, begin + tensor.numel() * tensor.element_size())


def _storage_bytes(tensor: Tensor, begin: int, end: int) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))


def tensor_of(spec: Spec, blocks: list[Tensor], device: torch.device) -> Tensor:
    name, shape, strides, block, offset = spec
    dtype = dtype_named(name)
    if block in (None, ON_META):
        home = device if block is None else torch.device("meta")
        return torch.empty_strided(shape, strides, dtype=dtype, device=home)
    return torch.empty(0, dtype=dtype, device=device).set_(blocks[block].untyped_storage(), offset, shape, strides)


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"this torch has no dtype {name}")
    return dtype
