"""Reading: names and containers first (`skeleton`), the bytes only when somebody says where they go (`copy`), in
bounded pieces, each checked on its way. Every rank reads, or rank 0 reads and sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

import distributed_utils
from checkpoint_file import archive
from checkpoint_file.archive import NO_CHECKSUM, Place, crc32
from checkpoint_file.checksums import Checksums, marked, share_out
from checkpoint_file.errors import CheckpointError, agree_on_error, cannot_read, decided_by_rank_0
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
from checkpoint_file.skeleton import TensorRef, owners

JOB_CHUNKS = 8  # that a thread reads and checks before it looks for more


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
            pieces = self._pieces_of_all(pairs)
            rank = 0 if self._alone else distributed_utils.get_rank(self._group)
            checksums: list[Checksums] = []
            checked, error = self._tried(lambda: self._fill(Plan(pairs, self._places, pieces, rank), checksums))
            if not self._alone:
                decided_by_rank_0(error, checked, lambda told: checksums[0].merge(told), self._group)
            elif error is not None:
                raise error
            else:
                checksums[0].merge([checked])

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

    def _pieces_of_all(self, pairs: list[tuple[TensorRef, Tensor | ShardedTensor]]) -> list[np.ndarray]:
        """What each rank wants of the sharded targets."""
        mine, error = self._tried(lambda: own_pieces(pairs).tobytes())
        if self._alone and error is not None:
            raise error
        told = [mine] if self._alone else distributed_utils.all_gather_list(mine, self._group)
        if None in told:
            agree_on_error(error, self._group)
        return [np.frombuffer(one, dtype=np.int64).reshape(-1, 3) for one in told]

    def _tried(self, do: Callable[[], bytes]) -> tuple[bytes | None, Exception | None]:
        """What `do` gives, or what it raises: the other ranks wait for the agreement."""
        try:
            return do(), None
        except OSError as problem:
            return None, problem if isinstance(problem, CheckpointError) else cannot_read(self.path, problem)
        except Exception as problem:
            return None, problem

    def _fill(self, plan: Plan, made: list[Checksums]) -> bytes:
        """Bring this rank's share of the bytes to their places; returns what it has checked of them."""
        checksums = Checksums(self.path, self._places, plan.names, lambda record: owners(self.skeleton, record))
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
        needs = [united(plan.names, plan.whole, plan.sharded[rank]) for rank in ranks]
        slices = self._shared_out(plan.names, needs, ranks)
        uses = {name: plan.whole_uses.get(name, []) + plan.own_uses.get(name, []) for name in plan.names}
        wanted = united(plan.names, needs[plan.rank], slices[plan.rank])
        self._bring_all(plan, wanted, uses, slices[plan.rank], checksums)

    def _send(self, plan: Plan, checksums: Checksums) -> None:
        """Rank 0 reads: what all need, what each other rank needs, its own, and what nobody needs."""
        slices = self._shared_out(plan.names, [*plan.sharded, plan.whole], [0])  # the last is EVERYBODY's

        def load(message: Message, data: Tensor) -> None:
            self._load(plan, message, data, slices[message.receiver], checksums)

        Stream(self._group).send(plan, load)
        self._bring_all(plan, united(plan.names, plan.sharded[0], slices[0]), plan.own_uses, slices[0], checksums)

    def _shared_out(
        self, names: list[str], needs: list[dict[str, list[Interval]]], for_gaps: Sequence[int]
    ) -> list[dict[str, list[Interval]]]:
        """For each reader, which bytes of which records it checks."""
        loads = [0] * len(needs)
        dealt: list[dict[str, list[Interval]]] = [{} for _ in needs]
        for name in names:
            if self._places[name].crc == NO_CHECKSUM:
                continue
            read = [need.get(name, []) for need in needs]
            for own, slices in zip(dealt, share_out(self._places[name].nbytes, read, loads, for_gaps)):
                own[name] = slices
        return dealt

    def _bring_all(
        self,
        plan: Plan,
        wanted: dict[str, list[Interval]],
        uses: dict[str, list[Use]],
        slices: dict[str, list[Interval]],
        checksums: Checksums,
    ) -> None:
        """Read the wanted bytes in the order of the file, each once, check this rank's slices and fill its uses.

        Ranges that go straight into their place are read and checked by as many threads as the rank may use.
        """
        straight: list[tuple[str, int, Tensor]] = []
        for name in plan.names:
            own = uses.get(name, [])
            for begin, end in cut(wanted.get(name, []), JOB_CHUNKS * archive.CHUNK_BYTES):
                place = memory_for(own, begin, end)
                if place is None:
                    checksums.add(name, self._spread(name, begin, end, own, slices.get(name, [])))
                else:
                    straight.append((name, begin, place))
        for name, parts in in_threads(lambda job: (job[0], self._bring(*job, slices.get(job[0], []))), straight):
            checksums.add(name, parts)
        for one in plan.scattered[plan.rank]:
            step = max(1, archive.CHUNK_BYTES // plan.pairs[one.pair][0].dtype.itemsize)
            view = self._stored_view(plan, one.pair)
            for begin in range(one.begin, one.end, step):
                for piece in flat_pieces(view, begin, min(begin + step, one.end)):
                    plan.fill_scattered(one.pair, begin, piece.reshape(-1))
                    begin += piece.numel()

    def _bring(self, name: str, begin: int, place: Tensor, slices: list[Interval]) -> list[tuple[int, int, int]]:
        """Read bytes straight into the one place that wants them; returns what was checked of them."""
        return self._read_checked(name, begin, memoryview(place.numpy()), slices)

    def _read_checked(
        self, name: str, begin: int, memory: memoryview, slices: list[Interval]
    ) -> list[tuple[int, int, int]]:
        """Read bytes of a record, a chunk at a time: it is checked while it is in the processor's cache."""
        checked = []
        for low, high, is_mine in marked(slices, begin, begin + len(memory)):
            checksum = 0
            for first, end in cut([(low, high)], archive.CHUNK_BYTES) if is_mine else [(low, high)]:
                chunk = memory[first - begin : end - begin]
                self._source.read_into(name, first, chunk)
                if is_mine:
                    checksum = crc32(chunk, checksum)
            if is_mine:
                checked.append((low, high, checksum))
        return checked

    def _spread(
        self, name: str, begin: int, end: int, uses: list[Use], slices: list[Interval]
    ) -> list[tuple[int, int, int]]:
        """Read bytes and give each use its share of them, converted or not; returns what was checked of them."""
        data = self._source.read(name, begin, end)
        for use in uses:
            use.fill(data, begin)
        memory = memoryview(data.numpy())
        parts = ((low, high) for low, high, is_mine in marked(slices, begin, end) if is_mine)
        return [(low, high, crc32(memory[low - begin : high - begin])) for low, high in parts]

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
            part = memory[position : position + nbytes]
            checksums.add(source, self._read_checked(source, begin, part, slices.get(source, [])))

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


def united(
    names: list[str], one: dict[str, list[Interval]], other: dict[str, list[Interval]]
) -> dict[str, list[Interval]]:
    """The bytes of records that are in one or the other; both are as `merged` gives them."""
    pairs = ((name, one.get(name, []), other.get(name, [])) for name in names)
    return {name: merged([*a, *b]) if a and b and a != b else a or b for name, a, b in pairs}


Job, Result = TypeVar("Job"), TypeVar("Result")


def in_threads(do: Callable[[Job], Result], jobs: list[Job]) -> list[Result]:
    """What `do` gives for each job, in any order; this thread and others take them, as many as torch may use."""
    num_others = min(torch.get_num_threads(), len(jobs)) - 1
    if num_others < 1:
        return [do(job) for job in jobs]
    left = iter(jobs)  # that of a list: one `next` at a time

    def work() -> list[Result]:
        try:
            return [do(job) for job in left]
        except BaseException:
            for _ in left:  # the others need not go on
                pass
            raise

    with ThreadPoolExecutor(num_others) as pool:
        others = [pool.submit(work) for _ in range(num_others)]
        return work() + [result for other in others for result in other.result()]
