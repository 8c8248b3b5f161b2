"""Writing a folder of torch.distributed.checkpoint: every rank writes its own part into a file of its own.

A folder holds `__R_0.distcp` of each rank R (one after another what `torch.save` would make of each box of a tensor),
`.metadata` (which box lies where, by torch's classes) and `fairtrain.pt` (names, containers, plain values, checksums).
Must not know: the names and the folder of a run. docs/checkpoint.md numbers what must hold.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import distributed_utils
from checkpoint_file.archive import crc32, crc32_combine, write_all
from checkpoint_file.boxes import Box, boxes_of_range, memory_order, row_major_stride, stride_in_order
from checkpoint_file.dcp_metadata import METADATA, StoredChunk, StoredTensor, pack_metadata
from checkpoint_file.errors import CheckpointWriteError, decided_by_rank_0
from checkpoint_file.nests import ShardedTensor, empty_storage, is_dense, map_leaves, tensor_in
from checkpoint_file.planning import FilePlan, PlannedRecord, check_values, described_layout, key_path
from checkpoint_file.shares import compare_plans, share_out
from checkpoint_file.writing import ShareWriter, write_error

OWN_RECORD = "fairtrain.pt"
FOLDER_VERSION = 1
ONE_BLOCK = 1 << 62  # bytes under one checksum: those of a box
ALIGNMENT = 64  # of boxes, and so of their elements, in a file: reading what lies askew takes a third longer


# ---- what is written


@dataclass
class PlannedTensor(PlannedRecord):
    """One tensor of the state, which becomes one box or several: its names in the folder, and its whole.

    Its bytes are those of its elements in the order of memory of `stride`.
    """

    names: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


@dataclass
class FolderPlan(FilePlan):
    """skeleton: the state with the number of its name, a tensor, for each tensor. paths: the keys to each name."""

    records: list[PlannedTensor]
    paths: dict[str, tuple] = field(default_factory=dict)


def plan_folder(state: dict[str, Any], path: str) -> FolderPlan:
    """What all ranks write. The same tensor under two names, or the same memory, is written once.

    Raises: UnsavableValueError.
    """
    found = check_values(state, path)
    paths = name_tensors(state)
    numbers = iter(torch.arange(len(paths)))
    numbered = map_leaves(state, (ShardedTensor, Tensor), lambda _: next(numbers))
    planned: dict[Any, PlannedTensor] = {}
    lines = []
    for name, (keys, leaf) in zip(paths, found):
        record = planned.setdefault(identity(leaf), described(f"tensor {len(planned)}", leaf))
        record.names.append(name)
        record.owner = record.owner or key_path(keys)
        stand_in = tensor_in(empty_storage(record.nbytes), record.dtype, 0, record.shape, record.stride)
        lines.append(f"{key_path(keys)}: {described_layout(stand_in, record.name, record.sharded)}")
    return FolderPlan(numbered, list(planned.values()), lines, paths)


def name_tensors(state: Any) -> dict[str, tuple]:
    """The keys to each tensor by its name: the keys joined by dots, as torch.distributed.checkpoint names it."""
    paths: dict[str, tuple] = {}

    def walk(nest: Any, keys: tuple) -> None:
        if isinstance(nest, (ShardedTensor, Tensor)):
            name = ".".join(map(str, keys))
            while name in paths:  # {"a.b": …, "a": {"b": …}}
                name += "~"
            paths[name] = keys
        elif isinstance(nest, dict):
            for key, value in nest.items():
                walk(value, (*keys, str(key)))
        elif isinstance(nest, (list, tuple)):
            for number, value in enumerate(nest):
                walk(value, (*keys, number))

    walk(state, ())
    return paths


def identity(leaf: Tensor | ShardedTensor) -> Any:
    if isinstance(leaf, ShardedTensor) or leaf.numel() == 0:
        return id(leaf)
    marks = leaf.is_conj(), leaf.is_neg()
    return str(leaf.device), leaf.data_ptr(), leaf.dtype, tuple(leaf.shape), leaf.stride(), marks


def described(name: str, leaf: Tensor | ShardedTensor) -> PlannedTensor:
    stride = leaf.stride if isinstance(leaf, ShardedTensor) else leaf.stride()
    dense = is_dense(leaf.shape, stride)
    if not dense:
        stride = row_major_stride(leaf.shape)
    size, shape = leaf.dtype.itemsize, tuple(leaf.shape)
    record = PlannedTensor(
        name, leaf.shape.numel() * size, itemsize=size, dtype=leaf.dtype, shape=shape, stride=tuple(stride)
    )
    if isinstance(leaf, ShardedTensor):
        record.sharded = True
        record.parts = [(begin * size, values.detach()) for begin, values in leaf.pieces if values.numel()]
    elif leaf.numel():
        leaf = leaf.detach()
        record.parts = [(0, leaf.as_strided((leaf.numel(),), (1,)) if dense else leaf)]
    return record


# ---- one rank's file


@dataclass(frozen=True)
class PlannedChunk:
    """One box of a tensor, and where what `torch.save` makes of it begins in this rank's file."""

    tensor: int
    box: Box
    start: int
    frame: Frame


def boxes_in_memory(tensor: PlannedTensor, begin: int, end: int) -> Iterator[Box]:
    """The boxes of a range of elements, one after another in the order of memory."""
    order = memory_order(tensor.stride)
    place = [order.index(d) for d in range(len(order))]
    for box in boxes_of_range([tensor.shape[d] for d in order], begin, end):
        yield Box(tuple(box.offsets[i] for i in place), tuple(box.sizes[i] for i in place))


def plan_chunks(tensors: list[PlannedTensor], share: np.ndarray) -> tuple[np.ndarray, list[PlannedChunk]]:
    """The rows of a rank's share, one for each box, and the boxes: they lie in the file in this order."""
    rows, chunks, start = [], [], 0
    frames: dict[Any, Frame] = {}
    for index, begin, end in share.tolist():
        tensor = tensors[index]
        for box in boxes_in_memory(tensor, begin // tensor.itemsize, end // tensor.itemsize):
            start = -(-start // ALIGNMENT) * ALIGNMENT
            chunks.append(PlannedChunk(index, box, start, frame_of(tensor, box, frames)))
            rows.append((index, begin, begin + box.numel * tensor.itemsize))
            begin, start = rows[-1][2], start + chunks[-1].frame.position
    return np.array(rows, dtype=np.int64).reshape(-1, 3), chunks


class Frame:
    """A file for `torch.save` that keeps what is written and forgets what is skipped: the one gap in it."""

    def __init__(self) -> None:
        self.position, self.gap_begin, self.gap_end = 0, 0, 0
        self.head, self.tail = bytearray(), bytearray()

    def write(self, data: Any) -> int:
        part = self.tail if self.gap_end else self.head
        part += data
        self.position += len(data)
        return len(data)

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        target = offset + (self.position if whence == os.SEEK_CUR else 0)
        if target != self.position:
            assert not self.gap_end and target > self.position and whence != os.SEEK_END, (offset, whence)
            self.gap_begin, self.gap_end = self.position, target
            self.position = target
        return self.position

    def closed(self, checksum: int) -> tuple[bytes, bytes]:
        """What goes before and behind the gap, the zip's checksum of the gap in both its places."""
        tail, packed = bytearray(self.tail), checksum.to_bytes(4, "little")
        entry = tail.index(b"/data/0", 16)  # in the central directory: the header before the gap is in the head
        entry = tail.rindex(b"PK\x01\x02", 0, entry)
        tail[4:8] = packed
        tail[entry + 16 : entry + 20] = packed
        return bytes(self.head), bytes(tail)


def frame_of(tensor: PlannedTensor, box: Box, known: dict[Any, Frame]) -> Frame:
    """What `torch.save` writes around the bytes of this box; boxes of one shape have it in common."""
    key = tensor.dtype, box.sizes, stride_in_order(box.sizes, memory_order(tensor.stride))
    if key not in known:
        known[key] = save_without_bytes(*key)
    return known[key]


def save_without_bytes(dtype: torch.dtype, sizes: tuple[int, ...], stride: tuple[int, ...]) -> Frame:
    nbytes = Box((), sizes).numel * dtype.itemsize
    stand_in = tensor_in(empty_storage(nbytes), dtype, 0, sizes, stride)
    frame = Frame()
    with torch.serialization.skip_data():
        torch.save(stand_in, frame)
    assert frame.gap_end - frame.gap_begin == nbytes, (frame.gap_begin, frame.gap_end, nbytes)
    return frame


# ---- all ranks together


def write_checkpoint_folder(state: dict[str, Any], path: str | os.PathLike, group: Any = None) -> int:
    """Write `state` into the folder `path`, which must not hold anything yet, flushed to the disk. Collective.

    Args:    state: as for a file. A `ShardedTensor` is written by its owners, what all ranks hold is shared out so that
             bytes per rank are level; plain values are those of rank 0.
    Returns: the bytes of all files, on every rank.
    Raises:  on all ranks UnsavableValueError, before a byte is written, or CheckpointWriteError.
    """
    with open_folder_writer(state, path, group) as writer:
        writer.write()
        return writer.finish()


def open_folder_writer(state: dict[str, Any], path: str | os.PathLike, group: Any = None) -> FolderWriter:
    """Collective: plan the folder, make it, open this rank's part. Raises: as `write_checkpoint_folder`."""
    path = os.fspath(path)
    plan, error = None, None
    try:
        plan = plan_folder(state, path)
    except Exception as problem:  # agreed by all ranks right below
        error = problem

    def make() -> None:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as problem:
            raise write_error(path, problem, plan.nbytes) from problem

    pieces_of, _ = compare_plans(plan, error, path, group, then=make)
    order = np.arange(len(plan.records))
    return FolderWriter(path, plan, share_out(plan, order, pieces_of), group).meet()


def part_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


class FolderWriter(ShareWriter):
    """One folder on its way to the disk. Made by `open_folder_writer`; the rank's own step is `write`."""

    def __init__(self, path: str, plan: FolderPlan, shares: list[np.ndarray], group: Any) -> None:
        rows, self._chunks = plan_chunks(plan.records, shares[distributed_utils.get_rank(group)])
        offsets = np.array([chunk.start + chunk.frame.gap_begin for chunk in self._chunks], dtype=np.int64)
        super().__init__(path, [record.parts for record in plan.records], rows, offsets, group)
        for record in plan.records:
            record.parts = []  # `copy_share` lets go of them
        self._plan = plan
        self._crc = self._nbytes = 0  # of this rank's file
        try:
            self._fd = os.open(os.path.join(path, part_name(self._rank)), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            self.error = error

    def meet(self) -> FolderWriter:
        """Collective: all ranks have opened their part, and rank 0 sees them all."""
        try:
            decided_by_rank_0(self._described(self.error), None, self._look, self._group)
        except BaseException:
            self.close()
            raise
        return self

    def _look(self, told: list[None]) -> None:
        for rank in range(len(told)):
            if not os.path.exists(os.path.join(self.path, part_name(rank))):
                problem = (
                    f"rank 0 does not see what rank {rank} writes into it: the ranks do not share this folder. Choose one "
                    "that they share with checkpoint.save_dir=FOLDER, or write one file: "
                    "distributed_training.use_sharded_state=false"
                )
                raise CheckpointWriteError(self.path, problem)

    def _write_rest(self) -> None:
        """Write what lies around the bytes of each box; the end of one and the beginning of the next go together."""
        between, position = b"", 0
        for chunk, checksum in zip(self._chunks, self._checksums.tolist()):
            head, tail = chunk.frame.closed(checksum)
            gap = chunk.frame.gap_end - chunk.frame.gap_begin
            between += bytes(chunk.start - position - len(between)) + head
            write_all(self._fd, between, position)
            self._crc = crc32_combine(crc32(between, self._crc), checksum, gap)
            position, between = position + len(between) + gap, tail
        write_all(self._fd, between, position)
        self._crc, self._nbytes = crc32(between, self._crc), position + len(between)
        if self._rank == 0:  # a second when it is first done, for which training would wait in `finish`
            importlib.import_module("torch.distributed.checkpoint.filesystem")

    def finish(self) -> int:
        """Collective: make the folder whole. Returns the bytes of its files. Raises: what failed on any rank."""
        own = WrittenFile(part_name(self._rank), self._nbytes, self._crc)
        own.chunks = [
            (chunk.tensor, *chunk.box, chunk.start, chunk.frame.position, chunk.start + chunk.frame.gap_begin, checksum)
            for chunk, checksum in zip(self._chunks, self._checksums.tolist())
        ]
        fields = tuple(vars(own).values())
        return decided_by_rank_0(self._described(self.error), fields, self._seal, self._group)

    def _seal(self, told: list[tuple]) -> int:
        """Rank 0: say what the parts are, which all are on the disk."""
        try:
            return finish_folder(self.path, self._plan, [WrittenFile(*fields) for fields in told])
        except OSError as error:
            raise self._described(error) from error


@dataclass
class WrittenFile:
    """What other ranks must know of a rank's file. chunks: (tensor, offsets, sizes, offset, length, where the elements
    begin, their checksum)."""

    name: str
    nbytes: int
    crc: int
    chunks: list[tuple] = field(default_factory=list)


def finish_folder(path: str, plan: FolderPlan, files: list[WrittenFile]) -> int:
    """On one rank, when all parts are on the disk: say what they are."""
    stored = stored_tensors(plan.records, files)
    names = {name: stored[number] for number, tensor in enumerate(plan.records) for name in tensor.names}
    data = pack_metadata({name: names[name] for name in plan.paths}, plan.paths)
    record = own_record(plan, files, data)
    for name, content in ((OWN_RECORD, record), (METADATA, data)):
        with open(os.path.join(path, name), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return sum(written.nbytes for written in files) + len(record) + len(data)


def stored_tensors(tensors: list[PlannedTensor], files: list[WrittenFile]) -> list[StoredTensor]:
    stored = [StoredTensor(tensor.dtype, tensor.shape) for tensor in tensors]
    for written in files:
        for number, offsets, sizes, offset, length, *_ in written.chunks:
            stored[number].chunks.append(StoredChunk(Box(offsets, sizes), written.name, offset, length))
    return stored


def own_record(plan: FolderPlan, files: list[WrittenFile], metadata: bytes) -> bytes:
    """The bytes of fairtrain.pt: all that is not in `.metadata`."""
    stride_of = {name: tensor.stride for tensor in plan.records for name in tensor.names}
    parts, checksums = [], []
    for number, written in enumerate(files):
        for *_, offset, length, begin, checksum in written.chunks:
            parts.append((number, offset, length, begin, len(checksums)))
            checksums.append(checksum)
    content = {
        "folder_version": FOLDER_VERSION,
        "state": plan.skeleton,
        "tensors": [(name, stride_of[name]) for name in plan.paths],
        "files": [(written.name, written.nbytes, written.crc) for written in files],
        "metadata_crc": crc32(metadata),
        "block_bytes": ONE_BLOCK,
        "chunks": torch.tensor(parts, dtype=torch.int64).reshape(-1, 5),  # file, offset, length, begin, checksum
        "checksums": torch.tensor(checksums, dtype=torch.int64),
    }
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
