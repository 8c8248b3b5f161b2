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


def range_of_box(box: Box, stride: Sequence[int]) -> tuple[int, int]:
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
    """The part of a tensor that lies in `box`, as a view of the memory that holds it."""

    box: Box
    view: Tensor

    def narrowed(self, box: Box) -> Tensor:
        view = self.view
        for d, (offset, origin, size) in enumerate(zip(box.offsets, self.box.offsets, box.sizes)):
            if size != view.shape[d]:
                view = view.narrow(d, offset - origin, size)
        return view


def views_of_range(values: Tensor, begin: int, shape: Sequence[int], stride: Sequence[int]) -> Iterator[BoxView]:
    """`values`, one-dimensional, are elements [begin, begin + numel) of a dense whole."""
    order = memory_order(stride)
    place = [order.index(d) for d in range(len(order))]
    position = begin
    for box in boxes_of_range([shape[d] for d in order], begin, begin + values.numel()):
        view = values[position - begin : position - begin + box.numel].view(box.sizes).permute(place)
        yield BoxView(Box(tuple(box.offsets[i] for i in place), tuple(view.shape)), view)
        position += box.numel


def part_in_box(target: Tensor | ShardedTensor, box: Box) -> Tensor | ShardedTensor:
    """What of a whole lies in `box`, as a whole of the box's shape.

    Pieces of a ShardedTensor may become views of as many dimensions as the box has; row by row they are its elements
    in the order of the target's memory.
    """
    if isinstance(target, Tensor):
        return BoxView(Box((0,) * target.dim(), tuple(target.shape)), target.detach()).narrowed(box)
    stride = stride_in_order(box.sizes, memory_order(target.stride))
    begin, end = range_of_box(box, target.stride)
    if end - begin == box.numel:  # the box is a range of the whole
        pieces = ranges_in(target, begin, end)
    else:
        pieces = views_in(target, box, stride)
    return ShardedTensor(target.dtype, torch.Size(box.sizes), stride, tuple(pieces))


def ranges_in(target: ShardedTensor, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
    for first, values in target.pieces:
        low, high = max(begin, first), min(end, first + values.numel())
        if low < high:
            yield low - begin, values.detach()[low - first : high - first]


def views_in(target: ShardedTensor, box: Box, stride: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """A range of the whole, cut by a box, is again a range of the box's elements: their order is the same."""
    order = memory_order(target.stride)
    for first, values in target.pieces:
        for given in views_of_range(values.detach(), first, target.shape, target.stride):
            if common := given.box.common(box):
                inside = Box(tuple(a - b for a, b in zip(common.offsets, box.offsets)), common.sizes)
                yield range_of_box(inside, stride)[0], given.narrowed(common).permute(order)


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()
