"""Ranges of elements of a tensor as boxes of it, since a folder of torch.distributed.checkpoint knows boxes alone.

A box is given by `offsets` and `sizes`, one number for each dimension. Knows no file and no rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from checkpoint_file.nests import ShardedTensor


class Box(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """The box of what lies in both, None where nothing does."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(sum, zip(*self)), map(sum, zip(*other)))
        sizes = tuple(end - begin for begin, end in zip(begins, ends))
        return Box(begins, sizes) if all(size > 0 for size in sizes) else None


def memory_order(stride: Sequence[int]) -> list[int]:
    """The dimensions of a dense tensor, from the slowest in memory to the fastest."""
    return sorted(range(len(stride)), key=lambda d: -stride[d])


def stride_in_order(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of these sizes whose dimensions lie in memory in this order."""
    strides, step = [0] * len(sizes), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(sizes[d], 1)
    return tuple(strides)


def range_of_box(box: Box, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """The shortest range of elements, in the order of memory of a dense whole, that holds all of the box."""
    begin = sum(offset * step for offset, step in zip(box.offsets, stride))
    return begin, begin + sum((size - 1) * step for size, step in zip(box.sizes, stride)) + 1


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The elements [begin, end) of a row-major tensor as at most 2 * len(shape) - 1 boxes, in their order."""
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows are [first, last)
    if first > last:  # both ends lie in one row
        yield from in_row(last, shape, begin - last * row, end - last * row)
        return
    yield from in_row(first - 1, shape, begin - (first - 1) * row, row if begin < first * row else 0)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from in_row(last, shape, 0, end - last * row)


def in_row(row: int, shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], begin, end):
        yield Box((row, *box.offsets), (1, *box.sizes))


@dataclass
class BoxView:
    """The part of a tensor that lies in `box`, as a view of the memory that holds it; `begin`: its first element's
    number in the order of memory of the whole."""

    box: Box
    view: Tensor
    begin: int = 0

    def narrowed(self, box: Box) -> Tensor:
        view = self.view
        for d, (offset, origin, size) in enumerate(zip(box.offsets, self.box.offsets, box.sizes)):
            if size != view.shape[d]:
                view = view.narrow(d, offset - origin, size)
        return view


def views_of_range(
    values: Tensor, begin: int, shape: Sequence[int], stride: Sequence[int], origin: Sequence[int] | None = None
) -> Iterator[BoxView]:
    """`values`, one-dimensional, are elements [begin, begin + numel) of a dense whole, which lies at `origin`."""
    order = memory_order(stride)
    place = [order.index(d) for d in range(len(order))]
    position = begin
    for box in boxes_of_range([shape[d] for d in order], begin, begin + values.numel()):
        view = values[position - begin : position - begin + box.numel].view(box.sizes).permute(place)
        offsets = [box.offsets[i] for i in place]
        if origin is not None:
            offsets = [offset + start for offset, start in zip(offsets, origin)]
        yield BoxView(Box(tuple(offsets), tuple(view.shape)), view, position)
        position += box.numel


def views_of_target(target: Tensor | ShardedTensor) -> list[BoxView]:
    """What of a whole tensor is to be filled here: all of a plain one, the pieces of a sharded one."""
    if isinstance(target, ShardedTensor):
        return [
            view
            for begin, values in target.pieces
            for view in views_of_range(values.detach(), begin, target.shape, target.stride)
        ]
    if target.numel() == 0:
        return []
    return [BoxView(Box((0,) * target.dim(), tuple(target.shape)), target.detach())]


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()
