"""Reading: names and containers first (`skeleton`), the bytes only when somebody says where they go (`copy`), in
bounded pieces, each checked on its way. Every rank reads, or rank 0 reads and sends.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import distributed_utils
from checkpoint_file import archive
from checkpoint_file.archive import NO_CHECKSUM, Place, crc32
from checkpoint_file.errors import CheckpointDamagedError, CheckpointError, agree_on_error, cannot_read
from checkpoint_file.nests import empty_storage, flat_pieces, is_dense, leaves, map_leaves, tensor_in
from checkpoint_file.skeleton import TensorRef, require_own_format
from checkpoint_file.sources import open_source

BUCKET_BYTES = 16 << 20  # bytes that rank 0 sends at a time
ALIGNMENT = 64  # of records in the file and of pieces in a bucket: every dtype can be viewed there


@dataclass
class Use:
    """One tensor to fill from a record: bytes [begin, end) are, in file order, the elements of `view`."""

    ref: TensorRef
    target: Tensor
    view: Tensor
    begin: int
    end: int

    def fill(self, data: Tensor, data_begin: int) -> None:
        """Take this tensor's share of `data`, uint8, which are the record's bytes from `data_begin` on."""
        low, high = max(self.begin, data_begin), min(self.end, data_begin + data.numel())
        if low >= high:
            return
        size = self.ref.dtype.itemsize
        share = data[low - data_begin : high - data_begin]
        if share.storage_offset() % size or share.data_ptr() % size:  # a foreign zip may put its records anywhere
            share = share.clone()
        elements = share.view(self.ref.dtype)
        for piece in flat_pieces(self.view, (low - self.begin) // size, (high - self.begin) // size):
            piece.copy_(elements[: piece.numel()].view(piece.shape))
            elements = elements[piece.numel() :]

    def finish(self) -> None:
        if self.view.untyped_storage()._cdata != self.target.untyped_storage()._cdata:
            self.target.copy_(self.view.as_strided(self.ref.shape, self.ref._stride))


def plan_use(ref: TensorRef, target: Tensor) -> Use:
    assert ref.shape == target.shape, (ref, target.shape)
    begin, end = ref.span()
    target = target.detach()
    if is_dense(ref.shape, ref._stride):
        order = sorted(range(len(ref.shape)), key=lambda d: -ref._stride[d])
        return Use(ref, target, target.permute(order), begin, end)
    # Expanded or with holes: its span is gathered first. No file of ours has holes, and expanded ones are small.
    gathered = torch.empty((end - begin) // ref.dtype.itemsize, dtype=ref.dtype)
    return Use(ref, target, gathered, begin, end)


def plan_reading(pairs: list[tuple[TensorRef, Tensor]], places: dict[str, Place]) -> list[tuple[str, list[Use]]]:
    """The records that the pairs need, in the order of the file, each with all that is to be filled from it."""
    uses: dict[str, list[Use]] = {}
    for ref, target in pairs:
        if ref.nbytes:
            uses.setdefault(ref._record, []).append(plan_use(ref, target))
    return sorted(uses.items(), key=lambda item: places[item[0]].offset)


Segment = tuple[str, int, int, int]  # record, its bytes [begin, end), and where they stand in the bucket


def fill_buckets(names: list[str], places: dict[str, Place]) -> Iterator[list[Segment]]:
    """Deal the bytes of the records to buckets of at most BUCKET_BYTES; the first ALIGNMENT bytes stay free."""
    bucket: list[Segment] = []
    position = ALIGNMENT
    for name in names:
        for begin in range(0, places[name].nbytes, archive.CHUNK_BYTES):
            end = min(begin + archive.CHUNK_BYTES, places[name].nbytes)
            if position + end - begin > BUCKET_BYTES:
                yield bucket
                bucket, position = [], ALIGNMENT
            bucket.append((name, begin, end, position))
            position += -(-(end - begin) // ALIGNMENT) * ALIGNMENT
    if bucket:
        yield bucket


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

    def copy(self, pairs: list[tuple[TensorRef, Tensor]]) -> None:
        """Fill each tensor from the file, converting dtype and device as `Tensor.copy_` does.

        Every record is read once, whole and in pieces, and its CRC-32 compared at its end.
        Raises: CheckpointDamagedError, on all ranks; some tensors are overwritten by then.
        """
        plan: list[tuple[str, list[Use]]] = []
        with torch.no_grad():
            self._agreed(lambda: plan.extend(plan_reading(pairs, self._places)), needed=self._rank_0_reads)
            self._agreed(lambda: self._receive(plan) if self._rank_0_reads else self._read(plan))

    def materialize(self, nest: Any) -> Any:
        """The nest with CPU tensors in the place of its TensorRefs; what shares memory in the file shares it here."""
        refs = leaves(nest, (TensorRef,))
        storages = {ref._record: empty_storage(self._places[ref._record].nbytes) for ref in refs}
        pairs = []
        for name, storage in storages.items():
            ref = TensorRef(torch.uint8, (storage.nbytes(),), name, 0, (1,))
            pairs.append((ref, torch.empty(0, dtype=torch.uint8).set_(storage)))
        self.copy(pairs)

        def build(ref: TensorRef) -> Tensor:
            return tensor_in(storages[ref._record], ref.dtype, ref._offset, ref.shape, ref._stride)

        return map_leaves(nest, (TensorRef,), build)

    def _agreed(self, do: Callable[[], Any], needed: bool = True) -> None:
        """Do it, and raise on all ranks if it failed on one."""
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

    def _read(self, plan: list[tuple[str, list[Use]]]) -> None:
        for name, uses in plan:
            checksum = 0
            for begin in range(0, self._places[name].nbytes, archive.CHUNK_BYTES):
                data = self._source.read(name, begin, min(begin + archive.CHUNK_BYTES, self._places[name].nbytes))
                checksum = crc32(data.numpy(), checksum)
                for use in uses:
                    use.fill(data, begin)
            self._check(name, checksum)
            for use in uses:
                use.finish()

    def _check(self, name: str, checksum: int) -> None:
        if self._places[name].crc not in (checksum, NO_CHECKSUM):
            problem = f"record {name} does not have the checksum it was written with: bytes of it have changed"
            raise CheckpointDamagedError(self.path, problem, name)

    def _receive(self, plan: list[tuple[str, list[Use]]]) -> None:
        """Rank 0 reads and sends bucket after bucket; its first byte says whether the reading has failed."""
        uses_of, error = dict(plan), None
        root = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        is_root = dist.get_rank() == root
        bucket = torch.zeros(
            BUCKET_BYTES, dtype=torch.uint8, device=distributed_utils.communication_device(self._group)
        )
        staging = bucket if bucket.device.type == "cpu" or not is_root else torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
        checksums: dict[str, int] = {}
        for segments in fill_buckets([name for name, _ in plan], self._places):
            used = segments[-1][3] + segments[-1][2] - segments[-1][1]
            if is_root:
                try:
                    self._load_bucket(staging, segments, checksums)
                except Exception as problem:  # the others must hear of it before it is raised
                    error = problem
                    staging[0] = 1
                if staging is not bucket:
                    bucket[:used].copy_(staging[:used])
            dist.broadcast(bucket[:used], src=root, group=self._group)
            if bucket[0]:
                break
            try:
                for name, begin, end, position in segments if error is None else ():
                    for use in uses_of[name]:
                        use.fill(bucket[position : position + end - begin], begin)
            except Exception as problem:  # rank 0 goes on sending: this rank goes on receiving
                error = problem
        if error is not None:
            raise error
        for _, uses in plan:
            for use in uses:
                use.finish()

    def _load_bucket(self, staging: Tensor, segments: list[Segment], checksums: dict[str, int]) -> None:
        for name, begin, end, position in segments:
            data = self._source.read(name, begin, end)
            checksums[name] = crc32(data.numpy(), checksums.get(name, 0))
            staging[position : position + end - begin].copy_(data)
            if end == self._places[name].nbytes:
                self._check(name, checksums.pop(name))

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def open_local_checkpoint(
    path: str | os.PathLike, own_format: bool = True, mapped: bool | None = None
) -> CheckpointReader:
    """As `open_checkpoint`, for this process alone: nothing in it is collective."""
    path = os.fspath(path)
    source = open_source(path, mapped)
    try:
        skeleton = source.skeleton()
        if own_format:
            require_own_format(skeleton, path)
    except BaseException:
        source.close()
        raise
    return CheckpointReader(path, skeleton, source, source.places)


def open_checkpoint(
    path: str | os.PathLike,
    group: Any = None,
    on_all_ranks: bool = True,
    own_format: bool = True,
    mapped: bool | None = None,
) -> CheckpointReader:
    """Open a checkpoint together. Collective, and so is everything that is done with the reader.

    Args:    on_all_ranks: every rank opens and reads the file; otherwise rank 0 of the group reads, the others receive.
             own_format: refuse, saying what was found, whatever fairtrain has not written.
             mapped: None maps the file unless it lies on a network file system, where it is read by offset.
    Raises:  on all ranks what was found on one: CheckpointNotFoundError, NotACheckpointError, CheckpointDamagedError
             (as far as structure and names go; the bytes of tensors are checked as they are read), CheckpointError.
    """
    path = os.fspath(path)
    if distributed_utils.get_world_size(group) == 1:
        return open_local_checkpoint(path, own_format, mapped)
    is_root = distributed_utils.get_rank(group) == 0
    reader, error = None, None
    try:
        if on_all_ranks or is_root:
            reader = open_local_checkpoint(path, own_format, mapped)
    except Exception as problem:  # agreed by all ranks below
        error = problem
    try:
        agree_on_error(error, group)
        described = None
        if is_root:
            described = reader._source.signature() if on_all_ranks else describe_reader(reader)
        root = dist.get_global_rank(group, 0) if group is not None else 0
        described = distributed_utils.broadcast_object(described, root, group)
        if on_all_ranks and reader._source.signature() != described:
            error = CheckpointError(path, "this rank sees another file under this path than rank 0 does")
        if on_all_ranks:
            agree_on_error(error, group)
        elif reader is None:
            reader = described_reader(path, *described)
    except BaseException:
        if reader is not None:
            reader.close()
        raise
    return reader.join(group, rank_0_reads=not on_all_ranks)


def describe_reader(reader: CheckpointReader) -> tuple[Any, list[tuple], list[tuple]]:
    """What another rank needs to follow this reader, in plain values: in the skeleton a torch.Size numbers a ref."""
    refs: list[tuple] = []

    def number(ref: TensorRef) -> torch.Size:
        refs.append(ref.__reduce__()[1])
        return torch.Size((len(refs) - 1,))

    plain = map_leaves(reader.skeleton, (TensorRef,), number)
    return plain, refs, [(place.name, place.offset, place.nbytes, place.crc) for place in reader._places.values()]


def described_reader(path: str, plain: Any, refs: list[tuple], places: list[tuple]) -> CheckpointReader:
    skeleton = map_leaves(plain, (torch.Size,), lambda number: TensorRef(*refs[number[0]]))
    return CheckpointReader(path, skeleton, None, {place[0]: Place(*place) for place in places})
