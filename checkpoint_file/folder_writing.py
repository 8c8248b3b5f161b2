"""Writing a folder of torch.distributed.checkpoint: every rank writes its own part into a file of its own.

A folder holds `__R_0.distcp` of each rank R (one after another what `torch.save` would make of each box of a tensor),
`.metadata` (which box lies where, by torch's classes) and `fairtrain.pt` (names, containers, plain values, checksums).
Must not know: the names and the folder of a run. docs/checkpoint.md numbers what must hold.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from typing import Any, Iterator

import torch
from torch import Tensor

import distributed_utils
from checkpoint_file.archive import crc32, crc32_combine, write_all
from checkpoint_file.boxes import (
    Box,
    boxes_of_range,
    memory_order,
    row_major_stride,
    stride_in_order,
)
from checkpoint_file.dcp_metadata import METADATA, StoredChunk, StoredTensor, pack_metadata
from checkpoint_file.errors import CheckpointWriteError, agree_on_error
from checkpoint_file.nests import (
    ShardedTensor,
    empty_storage,
    flat_pieces,
    is_dense,
    leaves,
    map_leaves,
    tensor_in,
)
from checkpoint_file.planning import check_values
from checkpoint_file.writing import row_major_bytes

OWN_RECORD = "fairtrain.pt"
FOLDER_VERSION = 1
BLOCK_BYTES = 1 << 20  # under one checksum, so that a rank reads little more than its own part; every dtype divides it


# ---- what is written


@dataclass
class PlannedTensor:
    """One tensor of the state: its names in the folder, its whole, and the parts of it that this rank writes.

    pieces: (begin, end, source) with the elements [begin, end) of the whole in the order of memory, which are those of
        `source` from element `begin - source_begin` on, row by row.
    """

    names: list[str]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: list[tuple[int, int, int, Tensor]] = field(default_factory=list)  # begin, end, source_begin, source


@dataclass
class FolderPlan:
    """`numbered` is the state with the number of its name, a tensor, for each tensor; paths: the keys to each name."""

    numbered: Any
    paths: dict[str, tuple]
    tensors: list[PlannedTensor]


def plan_folder(state: dict[str, Any], path: str, rank: int, world_size: int) -> FolderPlan:
    """What this rank writes. The same tensor under two names, or the same memory, is written once.

    Raises: UnsavableValueError.
    """
    kinds = (ShardedTensor, Tensor)
    check_values(state, path)
    paths = name_tensors(state, kinds)
    numbers = iter(torch.arange(len(paths)))
    numbered = map_leaves(state, kinds, lambda _: next(numbers))
    planned: dict[Any, PlannedTensor] = {}
    replicated: list[tuple[PlannedTensor, Tensor]] = []
    for name, leaf in zip(paths, leaves(state, kinds)):
        key = identity(leaf)
        if key in planned:
            planned[key].names.append(name)
            continue
        planned[key] = tensor = describe(name, leaf)
        if isinstance(leaf, ShardedTensor):
            tensor.pieces = [(begin, begin + t.numel(), begin, t) for begin, t in leaf.pieces if t.numel()]
        elif leaf.numel():
            replicated.append((tensor, leaf.detach()))
    share_out(replicated, rank, world_size)
    return FolderPlan(numbered, paths, list(planned.values()))


def name_tensors(state: Any, kinds: tuple[type, ...]) -> dict[str, tuple]:
    """The keys to each tensor by its name: the keys joined by dots, as torch.distributed.checkpoint names it."""
    paths: dict[str, tuple] = {}

    def walk(nest: Any, keys: tuple) -> None:
        if isinstance(nest, kinds):
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


def describe(name: str, leaf: Tensor | ShardedTensor) -> PlannedTensor:
    stride = leaf.stride if isinstance(leaf, ShardedTensor) else leaf.stride()
    if not is_dense(leaf.shape, stride):
        stride = row_major_stride(leaf.shape)
    return PlannedTensor([name], leaf.dtype, tuple(leaf.shape), tuple(stride))


def share_out(tensors: list[tuple[PlannedTensor, Tensor]], rank: int, world_size: int) -> None:
    """Put the replicated tensors in a row and give each rank an equal share of its bytes."""
    total = sum(t.numel() * t.element_size() for _, t in tensors)
    low, high = total * rank // world_size, total * (rank + 1) // world_size
    position = 0
    for planned, t in tensors:
        size, numel = t.element_size(), t.numel()
        # An element belongs to the rank in whose share its first byte lies.
        begin = min(max(-(-(low - position) // size), 0), numel)
        end = min(max(-(-(high - position) // size), 0), numel)
        if begin < end:
            dense = is_dense(t.shape, t.stride())
            planned.pieces.append((begin, end, 0, t.as_strided((numel,), (1,)) if dense else t))
        position += numel * size


# ---- one rank's file


@dataclass
class WrittenFile:
    """What other ranks must know of a rank's file. chunks: (tensor, offsets, sizes, offset, length, where the elements
    begin, number of the first checksum); checksums: of each block of each chunk, in order."""

    name: str = ""
    nbytes: int = 0
    crc: int = 0
    chunks: list[tuple] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)


def write_part(path: str, name: str, tensors: list[PlannedTensor]) -> WrittenFile:
    """Write this rank's pieces, flushed to the disk; nothing larger than BLOCK_BYTES is copied in memory."""
    written, frames = WrittenFile(name), {}
    fd = os.open(os.path.join(path, name), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for number, tensor in enumerate(tensors):
            for begin, end, source_begin, source in tensor.pieces:
                for box, first in boxes_in_memory(tensor, begin, end):
                    elements = Elements(source, first - source_begin, box.numel)
                    frame = frame_of(tensor, box, frames)
                    write_chunk(fd, written, (number, *box), frame, elements)
        os.fsync(fd)
    finally:
        os.close(fd)
    return written


def boxes_in_memory(tensor: PlannedTensor, begin: int, end: int) -> Iterator[tuple[Box, int]]:
    """The boxes of the range, and the number of the first element of each in the order of memory."""
    order = memory_order(tensor.stride)
    place = [order.index(d) for d in range(len(order))]
    for box in boxes_of_range([tensor.shape[d] for d in order], begin, end):
        yield Box(tuple(box.offsets[i] for i in place), tuple(box.sizes[i] for i in place)), begin
        begin += box.numel


@dataclass
class Elements:
    """`numel` elements of `source` from element `begin` on, row by row."""

    source: Tensor
    begin: int
    numel: int

    def blocks(self) -> Iterator[Iterator[memoryview]]:
        """Their bytes, BLOCK_BYTES at a time, each block in several pieces where they do not lie in a row."""
        step = BLOCK_BYTES // self.source.element_size()
        for begin in range(self.begin, self.begin + self.numel, step):
            end = min(begin + step, self.begin + self.numel)
            yield (memoryview(row_major_bytes(t).numpy()) for t in flat_pieces(self.source, begin, end))


def write_chunk(fd: int, written: WrittenFile, what: tuple, frame: Frame, elements: Elements) -> None:
    """Write at the end of the file what `torch.save` makes of one box, with its checksums. what: tensor, offsets, sizes."""
    start, position, total = written.nbytes, written.nbytes + frame.gap_begin, 0
    first_checksum = len(written.checksums)
    for block in elements.blocks():
        checksum, begun = 0, position
        for data in block:
            checksum = crc32(data, checksum)
            write_all(fd, data, position)
            position += len(data)
        written.checksums.append(checksum)
        total = crc32_combine(total, checksum, position - begun)
    assert position - start == frame.gap_end, (position, start, frame.gap_end)
    head, tail = frame.closed(total)
    write_all(fd, head, start)
    write_all(fd, tail, position)
    length, begin = frame.gap_end + len(tail), start + frame.gap_begin
    written.chunks.append((*what, start, length, begin, first_checksum))
    for crc, nbytes in ((crc32(head), len(head)), (total, position - start - len(head)), (crc32(tail), len(tail))):
        written.crc = crc32_combine(written.crc, crc, nbytes)
    written.nbytes = position + len(tail)


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

    Args:    state: as for a file. A `ShardedTensor` is written by its owners, of all other tensors each rank writes
             an equal share; plain values are those of rank 0.
    Returns: the bytes of all files, on every rank.
    Raises:  on all ranks UnsavableValueError, before a byte is written, or CheckpointWriteError.
    """
    path = os.fspath(path)
    rank, world_size = distributed_utils.get_rank(group), distributed_utils.get_world_size(group)
    plan = agreed(lambda: plan_folder(state, path, rank, world_size), path, group)
    agreed(lambda: os.makedirs(path, exist_ok=True) if rank == 0 else None, path, group)
    own = agreed(lambda: write_part(path, f"__{rank}_0.distcp", plan.tensors), path, group)
    files = [WrittenFile(*fields) for fields in distributed_utils.all_gather_list(tuple(vars(own).values()), group)]
    nbytes = agreed(lambda: finish_folder(path, plan, files) if rank == 0 else 0, path, group)
    return max(distributed_utils.all_gather_list(nbytes, group))


def agreed(do: Any, path: str, group: Any) -> Any:
    """What `do` returns; what it raised on one rank is raised on all."""
    result, error = None, None
    try:
        result = do()
    except OSError as problem:
        error = CheckpointWriteError(path, str(problem.strerror or problem))
        error.__cause__ = problem
    except Exception as problem:  # the other ranks wait for the agreement
        error = problem
    agree_on_error(error, group)
    return result


def finish_folder(path: str, plan: FolderPlan, files: list[WrittenFile]) -> int:
    """On one rank, when all parts are on the disk: check that they are here, and say what they are."""
    for rank, written in enumerate(files):
        place = os.path.join(path, written.name)
        if not os.path.exists(place) or os.path.getsize(place) != written.nbytes:
            problem = (
                f"rank 0 does not see what rank {rank} wrote into it: the ranks do not share this folder. Choose one that "
                "they share with checkpoint.save_dir=FOLDER, or write one file: distributed_training.use_sharded_state=false"
            )
            raise CheckpointWriteError(path, problem)
    stored = stored_tensors(plan.tensors, files)
    names = {name: stored[number] for number, tensor in enumerate(plan.tensors) for name in tensor.names}
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
    stride_of = {name: tensor.stride for tensor in plan.tensors for name in tensor.names}
    parts, checksums = [], []
    for number, written in enumerate(files):
        for *_, offset, length, begin, first in written.chunks:
            parts.append((number, offset, length, begin, len(checksums) + first))
        checksums += written.checksums
    content = {
        "folder_version": FOLDER_VERSION,
        "state": plan.numbered,
        "tensors": [(name, stride_of[name]) for name in plan.paths],
        "files": [(written.name, written.nbytes, written.crc) for written in files],
        "metadata_crc": crc32(metadata),
        "block_bytes": BLOCK_BYTES,
        "chunks": torch.tensor(parts, dtype=torch.int64).reshape(-1, 5),  # file, offset, length, begin, checksum
        "checksums": torch.tensor(checksums, dtype=torch.int64),
    }
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
