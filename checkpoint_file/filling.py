"""What one load fills: which bytes of which records go into which memory, of this rank and of the others.

Bytes that stand in the file in the order of the target's memory are a Use; a piece of a tensor whose order of memory
is another one in the file is a Scattered. Nothing here reads or sends.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from checkpoint_file.archive import Place
from checkpoint_file.boxes import Box, memory_order, part_in_box
from checkpoint_file.nests import ShardedTensor, flat_pieces, is_dense
from checkpoint_file.skeleton import TensorRef

Interval = tuple[int, int]
Target = Tensor | ShardedTensor


class Use:
    """Memory to fill from a record: the record's bytes [begin, end) are the elements of `view`, row by row.

    dtype: of the elements in the file. gathered_for: (ref, target) where `view` is a stand-in for a target that cannot
    be filled in the order of the file; `finish` moves the values on.
    """

    def __init__(
        self, dtype: torch.dtype, view: Tensor, begin: int, gathered_for: tuple[TensorRef, Tensor] | None = None
    ) -> None:
        self.dtype, self.view, self.begin, self._gathered_for = dtype, view, begin, gathered_for
        self.end = begin + view.numel() * dtype.itemsize
        self._memory = plain_memory(view) if view.dtype == dtype else None

    def memory(self, begin: int, end: int) -> Tensor | None:
        """Where the record's bytes [begin, end) can be put as they are, uint8; None if they are converted or spread."""
        if self._memory is None or begin < self.begin or end > self.end:
            return None
        return self._memory[begin - self.begin : end - self.begin]

    def fill(self, data: Tensor, data_begin: int) -> None:
        """Take this use's share of `data`, uint8, which are the record's bytes from `data_begin` on."""
        low, high = max(self.begin, data_begin), min(self.end, data_begin + data.numel())
        if low >= high:
            return
        size = self.dtype.itemsize
        share = data[low - data_begin : high - data_begin]
        if share.storage_offset() % size or share.data_ptr() % size:  # a foreign zip may put its records anywhere
            share = share.clone()
        copy_flat(share.view(self.dtype), self.view, (low - self.begin) // size)

    def finish(self) -> None:
        if self._gathered_for is not None:
            ref, target = self._gathered_for
            target.copy_(self.view.as_strided(ref.shape, ref._stride))


def plain_memory(view: Tensor) -> Tensor | None:
    if view.device.type != "cpu" or not view.is_contiguous() or view.is_conj() or view.is_neg():
        return None
    return view.as_strided((view.numel(),), (1,)).view(torch.uint8)


def memory_for(uses: list[Use], begin: int, end: int) -> Tensor | None:
    """The one place of the record's bytes [begin, end); None if none or several want them, or not as they are."""
    touched = [use for use in uses if use.begin < end and begin < use.end]
    return touched[0].memory(begin, end) if len(touched) == 1 else None


def copy_flat(elements: Tensor, view: Tensor, begin: int) -> None:
    """Put `elements` into the elements of `view` from number `begin` on, counted row by row."""
    for piece in flat_pieces(view, begin, begin + elements.numel()):
        piece.copy_(elements[: piece.numel()].view(piece.shape))
        elements = elements[piece.numel() :]


@dataclass
class Scattered:
    """Elements [begin, end) of a sharded tensor whose order of memory is another one in the file.

    They are taken one by one from the tensor as it lies there. pair: the position of the tensor among the pairs.
    """

    pair: int
    begin: int
    end: int


def is_in_file_order(ref: TensorRef, target: ShardedTensor) -> bool:
    """Whether pieces of `target` are ranges of the record's bytes."""
    pairs = [(mine, own) for mine, own, size in zip(ref._stride, target.stride, ref.shape) if size > 1]
    return is_dense(ref.shape, ref._stride) and all(mine == own for mine, own in pairs)


def use_of_whole(ref: TensorRef, target: Tensor) -> Use:
    begin, end = ref.span()
    target = target.detach()
    if is_dense(ref.shape, ref._stride):
        return Use(ref.dtype, target.permute(memory_order(ref._stride)), begin)
    # Expanded or with holes: its span is gathered first. No file of ours has holes, and expanded ones are small.
    return Use(ref.dtype, torch.empty((end - begin) // ref.dtype.itemsize, dtype=ref.dtype), begin, (ref, target))


def stored_pairs(pairs: list[tuple[TensorRef, Target]]) -> Iterator[tuple[TensorRef, Target]]:
    """The pairs, with one for each record of a tensor that lies in several, the same on all ranks."""
    for ref, target in pairs:
        assert tuple(ref.shape) == tuple(target.shape), (ref, target.shape)
        if not ref._chunks:
            yield ref, target
        for offsets, chunk in ref._chunks:
            yield chunk, part_in_box(target, Box(offsets, tuple(chunk.shape)))


def own_pieces(pairs: list[tuple[TensorRef, Target]]) -> np.ndarray:
    """int64 [n, 3]: (pair, first element, end) of each piece of a sharded target that this rank wants."""
    rows = []
    for number, (ref, target) in enumerate(pairs):
        for begin, values in target.pieces if isinstance(target, ShardedTensor) else ():
            assert 0 <= begin <= begin + values.numel() <= ref.shape.numel(), (ref, begin, values.numel())
            if values.numel():
                rows.append((number, begin, begin + values.numel()))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


class Plan:
    """What the ranks need for one load. Everything but the uses is the same on all ranks.

    names: the records, in the order of the file. whole[record]: bytes that every rank needs. sharded[rank][record]:
    bytes that go to one rank. scattered[rank]: elements that go to one rank, taken one by one.
    whole_uses, own_uses: by record, where this rank puts the first two.
    """

    def __init__(
        self, pairs: list[tuple[TensorRef, Target]], places: dict[str, Place], pieces: list[np.ndarray], rank: int
    ) -> None:
        self.pairs = pairs
        self.whole: dict[str, list[Interval]] = defaultdict(list)
        self.whole_uses: dict[str, list[Use]] = defaultdict(list)
        self.own_uses: dict[str, list[Use]] = defaultdict(list)
        self.sharded: list[dict[str, list[Interval]]] = [defaultdict(list) for _ in pieces]
        self.scattered: list[list[Scattered]] = [[] for _ in pieces]
        for ref, target in pairs:
            if ref.nbytes and isinstance(target, Tensor):
                self.whole[ref._record].append(ref.span())
                self.whole_uses[ref._record].append(use_of_whole(ref, target))
        in_order = [isinstance(target, ShardedTensor) and is_in_file_order(ref, target) for ref, target in pairs]
        self._add_pieces(pieces, in_order)
        self._add_own_uses(in_order)
        self.whole = {name: merged(intervals) for name, intervals in self.whole.items()}
        self.sharded = [{name: merged(one) for name, one in rank.items()} for rank in self.sharded]
        used = {ref._record for ref, _ in pairs if ref.nbytes}
        self.names = [name for name in places if name in used]
        self.rank = rank

    def _add_pieces(self, pieces: list[np.ndarray], in_order: list[bool]) -> None:
        for rank, rows in enumerate(pieces):
            for pair, begin, end in rows.tolist():
                ref = self.pairs[pair][0]
                if in_order[pair]:
                    size = ref.dtype.itemsize
                    self.sharded[rank][ref._record].append((ref._offset + begin * size, ref._offset + end * size))
                else:
                    self.scattered[rank].append(Scattered(pair, begin, end))

    def _add_own_uses(self, in_order: list[bool]) -> None:
        for (ref, target), is_range in zip(self.pairs, in_order):
            if is_range:
                for begin, values in target.pieces:
                    if values.numel():
                        use = Use(ref.dtype, values.detach(), ref._offset + begin * ref.dtype.itemsize)
                        self.own_uses[ref._record].append(use)

    def fill_scattered(self, pair: int, begin: int, elements: Tensor) -> None:
        """Put `elements`, of the file's dtype, into this rank's pieces of a sharded target, from `begin` on."""
        for first, values in self.pairs[pair][1].pieces:
            low, high = max(begin, first), min(begin + elements.numel(), first + values.numel())
            if low < high:
                copy_flat(elements[low - begin : high - begin], values.detach(), low - first)

    def finish(self) -> None:
        for uses in self.whole_uses.values():
            for use in uses:
                use.finish()


def merged(intervals: list[Interval]) -> list[Interval]:
    """The same bytes as ascending intervals that neither touch nor overlap."""
    if len(intervals) < 2:
        return [one for one in intervals if one[0] < one[1]]
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def cut(intervals: list[Interval], step: int) -> Iterator[Interval]:
    """The intervals, cut at the multiples of `step`: no element is cut in two, as a record begins with a whole one."""
    for begin, end in intervals:
        while begin < end:
            stop = min(end, begin - begin % step + step)
            yield begin, stop
            begin = stop
