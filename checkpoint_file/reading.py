"""Reading: names and containers first (`skeleton`), the bytes only when somebody says where they go (`copy`), in
bounded pieces, each checked on its way. Every rank reads, or rank 0 reads and sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

import distributed_utils
from checkpoint_file import archive
from checkpoint_file.archive import NO_CHECKSUM, Place
from checkpoint_file.checksums import Checksums, checked_parts, share_out
from checkpoint_file.errors import CheckpointError, agree_on_error, cannot_read
from checkpoint_file.filling import (
    Interval,
    Plan,
    Use,
    cut,
    memory_for,
    memory_order,
    merged,
    own_pieces,
    stored_pairs,
)
from checkpoint_file.nests import ShardedTensor, empty_storage, flat_pieces, leaves, map_leaves, tensor_in
from checkpoint_file.sending import Message, Stream
from checkpoint_file.skeleton import TensorRef

THREAD_BYTES = 256 << 10  # less is read sooner than it is handed to a thread


class CheckpointReader:
    """One open checkpoint: `skeleton` says what is in it, `copy` and `materialize` fetch bytes.

    `skeleton` is the state with a TensorRef for each tensor, the same on all ranks. Made by `open_checkpoint`, whose
    ranks call `copy`, `materialize` in the same order; where rank 0 reads for all, with the same refs as well.
    """

    def __init__(self, path: str, skeleton: Any, source: Any, places: dict[str, Place]) -> None:
        self.path, self.skeleton = path, skeleton
        self._source, self._places = source, places
        self._group: Any = None
        self._alone, self._rank_0_reads = True, False

    def join(self, group: Any, rank_0_reads: bool) -> CheckpointReader:
        """Make reading collective among the ranks of `group`."""
        self._group, self._alone, self._rank_0_reads = group, False, rank_0_reads
        return self

    def copy(self, pairs: list[tuple[TensorRef, Tensor | ShardedTensor]]) -> None:
        """Fill each target from the file, converting dtype and device as `Tensor.copy_` does.

        A Tensor is filled whole, of a ShardedTensor the pieces of this rank. A rank reads, or receives, the bytes that
        its targets need and no others; but of a record of which anything is used every byte is checked by some rank.
        Pieces whose order of memory is not that of the file are taken from the mapped tensor, or where the file is
        not mapped, through one copy of that tensor in memory.
        Raises: CheckpointDamagedError, on all ranks; some tensors are overwritten by then.
        """
        with torch.no_grad():
            pairs = list(stored_pairs(pairs))
            told = self._gathered(lambda: own_pieces(pairs).tobytes())
            pieces = [np.frombuffer(one, dtype=np.int64).reshape(-1, 3) for one in told]
            rank = 0 if self._alone else distributed_utils.get_rank(self._group)
            checksums: list[Checksums] = []
            checked = self._gathered(lambda: self._fill(Plan(pairs, self._places, pieces, rank), checksums))
            checksums[0].merge(checked)

    def materialize(self, nest: Any) -> Any:
        """The nest with CPU tensors in the place of its TensorRefs; what shares memory in the file shares it here."""
        storages: dict[str, torch.UntypedStorage] = {}
        pairs = []
        for ref in leaves(nest, (TensorRef,)):
            if ref._record in storages:
                continue
            nbytes = ref.nbytes if ref._chunks else self._places[ref._record].nbytes
            whole = ref if ref._chunks else TensorRef(torch.uint8, (nbytes,), ref._record, 0, (1,))
            storages[ref._record] = storage = empty_storage(nbytes)
            pairs.append((whole, tensor_in(storage, whole.dtype, 0, whole.shape, whole._stride)))
        self.copy(pairs)

        def build(ref: TensorRef) -> Tensor:
            return tensor_in(storages[ref._record], ref.dtype, ref._offset, ref.shape, ref._stride)

        return map_leaves(nest, (TensorRef,), build)

    def _gathered(self, do: Callable[[], bytes]) -> list[bytes]:
        """What `do` gives on each rank; raises on all ranks if it failed on one."""
        error: Exception | None = None
        given: bytes | None = None
        try:
            given = do()
        except OSError as problem:
            error = problem if isinstance(problem, CheckpointError) else cannot_read(self.path, problem)
        except Exception as problem:  # whatever it is, the other ranks wait for the agreement below
            error = problem
        if self._alone:
            if error is not None:
                raise error
            return [given]
        told = distributed_utils.all_gather_list(given, self._group)
        if None in told:
            agree_on_error(error, self._group)
        return told

    def _fill(self, plan: Plan, made: list[Checksums]) -> bytes:
        """Bring this rank's share of the bytes to their places; returns what it has checked of them."""
        checksums = Checksums(self.path, self._places, plan.names)
        made.append(checksums)
        if not self._rank_0_reads:
            self._read(plan, checksums)
        elif plan.rank == 0:
            self._send(plan, checksums)
        else:
            Stream(self._group).receive(plan)
        plan.finish()
        return checksums.parts()

    def _read(self, plan: Plan, checksums: Checksums) -> None:
        """Every rank reads: what all need and its own."""
        ranks = range(len(plan.sharded))
        slices = self._shared_out(plan.names, [[plan.whole, plan.sharded[rank]] for rank in ranks], ranks)
        uses = {name: plan.whole_uses.get(name, []) + plan.own_uses.get(name, []) for name in plan.names}
        self._bring_all(
            plan, [plan.whole, plan.sharded[plan.rank], slices[plan.rank]], uses, slices[plan.rank], checksums
        )

    def _send(self, plan: Plan, checksums: Checksums) -> None:
        """Rank 0 reads: what all need, what each other rank needs, its own, and what nobody needs."""
        needs = [[sharded] for sharded in plan.sharded]
        slices = self._shared_out(plan.names, [*needs, [plan.whole]], [0])  # the last is EVERYBODY's

        def load(message: Message, data: Tensor) -> None:
            self._load(plan, message, data, slices[message.receiver], checksums)

        Stream(self._group).send(plan, load)
        self._bring_all(plan, [plan.sharded[0], slices[0]], plan.own_uses, slices[0], checksums)

    def _shared_out(
        self, names: list[str], needs: list[list[dict[str, list[Interval]]]], for_gaps: Sequence[int]
    ) -> list[dict[str, list[Interval]]]:
        """For each reader, which bytes of which records it checks."""
        loads = [0] * len(needs)
        dealt: list[dict[str, list[Interval]]] = [{} for _ in needs]
        for name in names:
            if self._places[name].crc == NO_CHECKSUM:
                continue
            read = [merged([one for part in parts for one in part.get(name, [])]) for parts in needs]
            for own, slices in zip(dealt, share_out(self._places[name].nbytes, read, loads, for_gaps)):
                own[name] = slices
        return dealt

    def _bring_all(
        self,
        plan: Plan,
        wanted: list[dict[str, list[Interval]]],
        uses: dict[str, list[Use]],
        slices: dict[str, list[Interval]],
        checksums: Checksums,
    ) -> None:
        """Read the wanted bytes in the order of the file, each once, check this rank's slices and fill its uses.

        Large ranges that go straight into their place are read and checked by as many threads as the rank may use.
        """
        num_threads = torch.get_num_threads()
        under_way: list[tuple[str, Future]] = []
        with ThreadPoolExecutor(num_threads) as threads:
            for name in plan.names:
                intervals, own = merged([one for part in wanted for one in part.get(name, [])]), slices.get(name, [])
                for begin, end in cut(intervals, archive.CHUNK_BYTES):
                    place = memory_for(uses.get(name, []), begin, end)
                    if place is None:
                        checksums.add(name, self._spread(name, begin, end, uses.get(name, []), own))
                    elif num_threads == 1 or end - begin < THREAD_BYTES:
                        checksums.add(name, self._bring(name, begin, place, own))
                    else:
                        under_way.append((name, threads.submit(self._bring, name, begin, place, own)))
            for name, read in under_way:
                checksums.add(name, read.result())
        for one in plan.scattered[plan.rank]:
            step = max(1, archive.CHUNK_BYTES // plan.pairs[one.pair][0].dtype.itemsize)
            view = self._stored_view(plan, one.pair)
            for begin in range(one.begin, one.end, step):
                for piece in flat_pieces(view, begin, min(begin + step, one.end)):
                    plan.fill_scattered(one.pair, begin, piece.reshape(-1))
                    begin += piece.numel()

    def _bring(self, name: str, begin: int, place: Tensor, slices: list[Interval]) -> list[tuple[int, int, int]]:
        """Read bytes straight into the one place that wants them; returns what was checked of them."""
        memory = memoryview(place.numpy())
        self._source.read_into(name, begin, memory)
        return checked_parts(slices, begin, memory)

    def _spread(
        self, name: str, begin: int, end: int, uses: list[Use], slices: list[Interval]
    ) -> list[tuple[int, int, int]]:
        """Read bytes and give each use its share of them, converted or not; returns what was checked of them."""
        data = self._source.read(name, begin, end)
        for use in uses:
            use.fill(data, begin)
        return checked_parts(slices, begin, memoryview(data.numpy()))

    def _load(
        self, plan: Plan, message: Message, data: Tensor, slices: dict[str, list[Interval]], checksums: Checksums
    ) -> None:
        """Read what a message holds into `data`, uint8 on the CPU."""
        memory = memoryview(data.numpy())
        for source, begin, end, position, nbytes in message.segments:
            if isinstance(source, int):
                elements = data[position : position + nbytes].view(plan.pairs[source][0].dtype)
                for piece in flat_pieces(self._stored_view(plan, source), begin, end):
                    elements[: piece.numel()].view(piece.shape).copy_(piece)
                    elements = elements[piece.numel() :]
                continue
            for low, high in cut([(begin, end)], archive.CHUNK_BYTES):
                part = memory[position + low - begin : position + high - begin]
                self._source.read_into(source, low, part)
                checksums.add(source, checked_parts(slices.get(source, []), low, part))

    def _stored_view(self, plan: Plan, pair: int) -> Tensor:
        """The stored tensor of a pair, its elements row by row in the order of the target's memory."""
        ref, target = plan.pairs[pair]
        return self._source.stored(ref).permute(memory_order(target.stride))

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
