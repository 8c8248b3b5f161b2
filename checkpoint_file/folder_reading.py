"""Reading a folder of torch.distributed.checkpoint with the interface of a file's reader: names and containers first,
then the bytes that each rank needs, straight into tensors that exist. Every rank reads, or rank 0 reads and sends to
each rank what it needs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import distributed_utils
from checkpoint_file.boxes import Box, BoxView, range_of_box, views_of_range, views_of_target
from checkpoint_file.errors import CheckpointError, NotACheckpointError, agree_on_error, cannot_read
from checkpoint_file.folder_contents import Chunk, ChunkedRef, ChunkReading, Files, pieces_to_read, read_folder
from checkpoint_file.nests import ShardedTensor, empty_storage, leaves, map_leaves, tensor_in
from checkpoint_file.skeleton import TensorRef, require_own_format

BUCKET_BYTES = 16 << 20  # bytes that rank 0 sends at a time
ALIGNMENT = 64  # of segments in a bucket: every dtype can be viewed there


# ---- which bytes go where


@dataclass
class Need:
    """What is filled from one chunk here: views of boxes, all of whose bytes lie in [begin, end) of the chunk's."""

    chunk: Chunk
    views: list[BoxView]
    begin: int = 0
    end: int = 0

    def fill(self, data: Tensor, begin: int) -> None:
        """Take what is needed of `data`, uint8: the chunk's bytes from `begin` on, whole elements."""
        chunk = self.chunk
        size = chunk.dtype.itemsize
        low, high = max(begin, self.begin), min(begin + data.numel(), self.end)
        if low >= high:
            return
        elements = data[low - begin : high - begin].view(chunk.dtype)
        for given in views_of_range(elements, low // size, chunk.box.sizes, chunk.stride, chunk.box.offsets):
            for wanted in self.views:
                if box := given.box.common(wanted.box):
                    wanted.narrowed(box).copy_(given.narrowed(box))


def plan_needs(pairs: list[tuple[ChunkedRef, Tensor | ShardedTensor]]) -> list[Need]:
    """What this rank needs, in the order of the files; of tensors that share their bytes in the folder one need."""
    needs: dict[tuple[str, int], Need] = {}
    for ref, target in pairs:
        assert tuple(ref.shape) == tuple(target.shape), (ref, target.shape)
        views = views_of_target(target)
        for chunk in ref._chunks:
            need = needs.setdefault((chunk.file, chunk.begin), Need(chunk, []))
            for wanted in views:
                if box := wanted.box.common(chunk.box):
                    add_view(need, BoxView(box, wanted.narrowed(box)))
    return [needs[place] for place in sorted(needs)]


def add_view(need: Need, wanted: BoxView) -> None:
    chunk = need.chunk
    inside = Box(tuple(a - b for a, b in zip(wanted.box.offsets, chunk.box.offsets)), wanted.box.sizes)
    begin, end = (position * chunk.dtype.itemsize for position in range_of_box(inside, chunk.box.sizes, chunk.stride))
    need.begin, need.end = (min(need.begin, begin), max(need.end, end)) if need.views else (begin, end)
    need.views.append(wanted)


# ---- what rank 0 sends to whom


@dataclass
class Segment:
    """Bytes [begin, end) of a need's chunk, and where they lie in the bucket."""

    number: int
    begin: int
    end: int
    position: int

    @property
    def place(self) -> slice:
        return slice(self.position, self.position + self.end - self.begin)


@dataclass
class Round:
    """What rank 0 reads and sends at a time. pieces: (number of the need, begin, end). groups: who receives what."""

    pieces: list[tuple[int, int, int]]
    groups: dict[tuple[int, ...], list[Segment]]

    def lay_out(self) -> Round:
        """Give each group one range of the bucket."""
        position = 0
        for segments in self.groups.values():
            for segment in segments:
                segment.position = position
                position += aligned(segment.end - segment.begin)
        return self


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def rounds(needs: list[Need], ranges: list[list[tuple[int, int]]]) -> Iterator[Round]:
    """All that rank 0 reads; `ranges` says for each rank and need which bytes of the chunk the rank fills in."""
    made, filled = Round([], {}), 0
    for number, need in enumerate(needs):
        spans = [of_rank[number] for of_rank in ranges]
        wanted = [span for span in spans if span[0] < span[1]]
        if not wanted:
            continue
        for begin, end in pieces_to_read(need.chunk, min(wanted)[0], max(end for _, end in wanted)):
            shares = list(shares_of(spans, begin, end))
            nbytes = sum(aligned(high - low) for _, low, high in shares)
            if made.pieces and filled + nbytes > BUCKET_BYTES:
                yield made.lay_out()
                made, filled = Round([], {}), 0
            made.pieces.append((number, begin, end))
            for receivers, low, high in shares:
                made.groups.setdefault(receivers, []).append(Segment(number, low, high, 0))
            filled += nbytes
    if made.pieces:
        yield made.lay_out()


def shares_of(spans: list[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """The bytes [begin, end) by who needs them, rank 0, which has them, left out."""
    bounds = sorted({begin, end, *(min(max(bound, begin), end) for span in spans for bound in span)})
    for low, high in zip(bounds, bounds[1:]):
        receivers = tuple(r for r, span in enumerate(spans) if r and span[0] <= low and high <= span[1])
        if receivers:
            yield receivers, low, high


# ---- the reader


class FolderReader:
    """One open folder, with the interface of CheckpointReader: `skeleton`, `copy`, `materialize`, `close`."""

    def __init__(self, path: str, skeleton: Any, reads: bool = True) -> None:
        self.path, self.skeleton = path, skeleton
        self._files = Files(path) if reads else None
        self._group: Any = None
        self._alone, self._rank_0_reads = True, False

    def join(self, group: Any, rank_0_reads: bool) -> FolderReader:
        """Make reading collective among the ranks of `group`."""
        self._group, self._alone, self._rank_0_reads = group, False, rank_0_reads
        return self

    def copy(self, pairs: list[tuple[ChunkedRef, Tensor | ShardedTensor]]) -> None:
        """Fill each tensor, or each piece of a sharded one, converting dtype and device as `Tensor.copy_` does.

        Where rank 0 reads for all, the ranks give pairs with the same refs; a rank receives what its pieces need.
        Raises: CheckpointDamagedError, on all ranks; some tensors are overwritten by then.
        """
        needs: list[Need] = []
        with torch.no_grad():
            self._agreed(lambda: needs.extend(plan_needs(pairs)), needed=self._rank_0_reads)
            self._agreed(lambda: self._receive(needs) if self._rank_0_reads else self._read(needs))

    def materialize(self, nest: Any) -> Any:
        """The nest with CPU tensors in the place of its refs; what was the same memory is the same memory here."""
        made: dict[str, Tensor] = {}
        pairs = []
        for ref in leaves(nest, (TensorRef,)):
            if ref._record not in made:
                made[ref._record] = tensor_in(empty_storage(ref.nbytes), ref.dtype, 0, ref.shape, ref._stride)
                pairs.append((ref, made[ref._record]))
        self.copy(pairs)
        return map_leaves(nest, (TensorRef,), lambda ref: made[ref._record].view(ref.shape))

    def _agreed(self, do: Callable[[], Any], needed: bool = True) -> None:
        error: Exception | None = None
        try:
            do()
        except OSError as problem:
            error = problem if isinstance(problem, CheckpointError) else cannot_read(self.path, problem)
        except Exception as problem:  # whatever it is, the other ranks wait for the agreement below
            error = problem
        if self._alone:
            if error is not None:
                raise error
        elif needed or error is not None:
            agree_on_error(error, self._group)

    def _read(self, needs: list[Need]) -> None:
        reading = ChunkReading(self._files)
        for need in needs:
            for begin, end in pieces_to_read(need.chunk, need.begin, need.end):
                need.fill(reading.read(need.chunk, begin, end), begin)

    def _receive(self, needs: list[Need]) -> None:
        """Rank 0 reads and sends, round after round; before each it tells all whether its reading has failed."""
        ranges = distributed_utils.all_gather_list([(need.begin, need.end) for need in needs], self._group)
        rank = distributed_utils.get_rank(self._group)
        device = distributed_utils.communication_device(self._group)
        bucket = torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=device)
        staging = bucket if device.type == "cpu" or rank else torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
        reading, error = ChunkReading(self._files), None
        for round_ in rounds(needs, ranges):
            try:
                if rank == 0:
                    load_round(round_, needs, reading, staging)
            except Exception as problem:  # the others must hear of it before it is raised
                error = problem
            if self._rank_0_failed(error):
                break
            mine = [
                group for receivers, group in round_.groups.items() if self._transfer(receivers, group, bucket, staging)
            ]
            try:
                for segment in (segment for group in mine if error is None for segment in group):
                    needs[segment.number].fill(bucket[segment.place], segment.begin)
            except Exception as problem:  # rank 0 goes on sending: this rank goes on receiving
                error = problem
        if error is not None:
            raise error

    def _rank_0_failed(self, error: Exception | None) -> bool:
        flag = torch.tensor(
            [error is not None], dtype=torch.uint8, device=distributed_utils.communication_device(self._group)
        )
        dist.broadcast(flag, src=distributed_utils.get_global_rank(self._group, 0), group=self._group)
        return bool(flag)

    def _transfer(self, receivers: tuple[int, ...], group: list[Segment], bucket: Tensor, staging: Tensor) -> bool:
        """Send from rank 0 to the receivers what the group needs. Returns whether this rank has received it."""
        rank = distributed_utils.get_rank(self._group)
        part = slice(group[0].position, group[-1].place.stop)
        if rank == 0 and staging is not bucket:
            bucket[part].copy_(staging[part])
        if len(receivers) == distributed_utils.get_world_size(self._group) - 1:
            dist.broadcast(bucket[part], src=distributed_utils.get_global_rank(self._group, 0), group=self._group)
        elif rank == 0:
            for receiver in receivers:
                dist.send(bucket[part], distributed_utils.get_global_rank(self._group, receiver), group=self._group)
        elif rank in receivers:
            dist.recv(bucket[part], distributed_utils.get_global_rank(self._group, 0), group=self._group)
        return rank in receivers

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def load_round(round_: Round, needs: list[Need], reading: ChunkReading, staging: Tensor) -> None:
    """On rank 0: read the pieces, fill its own tensors from them, and put what others need into the bucket."""
    segments: dict[int, list[Segment]] = {}
    for group in round_.groups.values():
        for segment in group:
            segments.setdefault(segment.number, []).append(segment)
    for number, begin, end in round_.pieces:
        data = reading.read(needs[number].chunk, begin, end)
        needs[number].fill(data, begin)
        for segment in segments.get(number, ()):
            if begin <= segment.begin and segment.end <= end:
                staging[segment.place].copy_(data[segment.begin - begin : segment.end - begin])


# ---- opening


def open_local_folder(path: str | os.PathLike, own_format: bool = True) -> FolderReader:
    """As `open_checkpoint_folder`, for this process alone: nothing in it is collective."""
    return opened(os.fspath(path), own_format)[0]


def opened(path: str, own_format: bool) -> tuple[FolderReader, tuple]:
    folder = read_folder(path)
    if own_format:
        try:
            require_own_format(folder.skeleton, path)
        except NotACheckpointError as error:
            hint = f". To take the parameters of a folder of torch.distributed.checkpoint: finetune_from_model={path}"
            raise NotACheckpointError(path, error.problem + hint) from None
    return FolderReader(path, folder.skeleton), folder.signature


def open_checkpoint_folder(
    path: str | os.PathLike, group: Any = None, on_all_ranks: bool = True, own_format: bool = True
) -> FolderReader:
    """Open a folder together. Collective, and so is everything that is done with the reader.

    Args:    as of `open_checkpoint`. A folder of another program (own_format=False) gives the nest that was saved,
             but for values that are neither tensors nor plain data.
    Raises:  on all ranks what was found on one, as `open_checkpoint` does.
    """
    path = os.fspath(path)
    if distributed_utils.get_world_size(group) == 1:
        return open_local_folder(path, own_format)
    rank = distributed_utils.get_rank(group)
    reader, signature, error = None, None, None
    try:
        if on_all_ranks or rank == 0:
            reader, signature = opened(path, own_format)
    except OSError as problem:
        error = problem if isinstance(problem, CheckpointError) else cannot_read(path, problem)
    except Exception as problem:  # agreed by all ranks below
        error = problem
    agree_on_error(error, group)
    root = distributed_utils.get_global_rank(group, 0)
    told = (signature if on_all_ranks else describe_folder(reader.skeleton)) if rank == 0 else None
    told = distributed_utils.broadcast_object(told, root, group)
    if on_all_ranks:
        another = signature != told
        agree_on_error(
            CheckpointError(path, "this rank sees another folder under this path than rank 0 does")
            if another
            else None,
            group,
        )
    elif rank:
        reader = FolderReader(path, described_skeleton(*told), reads=False)
    return reader.join(group, rank_0_reads=not on_all_ranks)


def describe_folder(skeleton: Any) -> tuple[Any, list[tuple]]:
    """What another rank needs to follow, in plain values: in the skeleton a torch.Size numbers a ref."""
    refs: list[tuple] = []

    def number(ref: ChunkedRef) -> torch.Size:
        chunks = [(*chunk.fields(), chunk.checksums) for chunk in ref._chunks]
        refs.append((ref.dtype, tuple(ref.shape), ref._stride, ref._record, chunks))
        return torch.Size((len(refs) - 1,))

    plain = map_leaves(skeleton, (TensorRef,), number)
    return plain, refs


def described_skeleton(plain: Any, refs: list[tuple]) -> Any:
    def ref(number: torch.Size) -> ChunkedRef:
        dtype, shape, stride, name, chunks = refs[number[0]]
        made = [Chunk(dtype_, Box(*box), *rest) for dtype_, box, *rest in chunks]
        return ChunkedRef(dtype, shape, stride, name, made)

    return map_leaves(plain, (torch.Size,), ref)
