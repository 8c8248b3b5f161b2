"""What a folder of torch.distributed.checkpoint holds, of ours or of another program, and the bytes of its files.

A chunk is the unit of the folder: one box of one tensor, in a row in one file, with a checksum for each block of it.
Nothing in a folder is executed. Must not know: ranks, and where the bytes of tensors go.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import struct
import zipfile
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from checkpoint_file import archive
from checkpoint_file.archive import Place, crc32
from checkpoint_file.boxes import Box, memory_order, row_major_stride, stride_in_order
from checkpoint_file.dcp_metadata import METADATA, FolderContents, StoredChunk, StoredTensor, parse_metadata
from checkpoint_file.errors import CheckpointDamagedError, CheckpointError, NotACheckpointError, cannot_read
from checkpoint_file.folder_writing import FOLDER_VERSION, OWN_RECORD
from checkpoint_file.nests import is_dense, leaves, map_leaves
from checkpoint_file.reading import open_local_checkpoint
from checkpoint_file.skeleton import TensorRef, parse_skeleton
from checkpoint_file.verifying import verify_file

logger = logging.getLogger(__name__)


# ---- what is in a folder


@dataclass(frozen=True, eq=False)
class Chunk:
    """The elements of one box of a tensor, in the order of memory of `stride`: `nbytes` bytes of `file` from `begin` on.

    checksums: CRC-32 of each `block_bytes` of them.
    """

    dtype: torch.dtype
    box: Box
    stride: tuple[int, ...]
    file: str
    begin: int
    block_bytes: int
    checksums: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    def fields(self) -> tuple:
        return self.dtype, tuple(self.box), self.stride, self.file, self.begin, self.block_bytes


class ChunkedRef(TensorRef):
    """A tensor of the folder, by its description: `dtype`, `shape`, `nbytes`. The rest is opaque."""

    __slots__ = ("_chunks",)

    def __init__(self, dtype: torch.dtype, shape: tuple, stride: tuple, name: str, chunks: list[Chunk]) -> None:
        # Tensors of the same bytes were the same memory when they were saved.
        record = f"{chunks[0].file}:{chunks[0].begin}" if chunks else name
        super().__init__(dtype, shape, record, 0, stride)
        self._chunks = chunks


@dataclass
class Folder:
    skeleton: Any
    signature: tuple


def read_folder(path: str) -> Folder:
    """What the folder holds, with a ChunkedRef for each tensor. Reads no bytes of tensors."""
    # Tens of thousands of small objects come to stay: searching all of torch for garbage meanwhile took 10 x as long.
    collects = gc.isenabled()
    gc.disable()
    try:
        return read_contents(path)
    finally:
        if collects:
            gc.enable()


def read_contents(path: str) -> Folder:
    data = read_whole(path, METADATA)
    contents = parse_metadata(data, path)
    if not os.path.exists(os.path.join(path, OWN_RECORD)):
        return Folder(foreign_skeleton(path, contents), (len(data), crc32(data)))
    record = read_own_record(path)
    check_files(path, record, data)
    chunks = own_chunks(path, record)
    refs = []
    for name, stride in record["tensors"]:
        stored = contents.tensors.get(name)
        if stored is None or len(stride) != len(stored.shape):
            raise CheckpointDamagedError(path, f"{METADATA} and {OWN_RECORD} differ in {name}", METADATA)
        order = memory_order(stride)
        made = [chunks(stored.dtype, part, stride_in_order(part.box.sizes, order)) for part in stored.chunks]
        refs.append(ChunkedRef(stored.dtype, stored.shape, tuple(stride), name, made))
    skeleton = map_leaves(record["state"], (Tensor,), lambda number: refs[int(number)])
    return Folder(skeleton, (len(data), crc32(data), repr(record["files"]), record["chunks"].shape[0]))


def read_whole(path: str, name: str) -> bytes:
    try:
        with open(os.path.join(path, name), "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        if name == METADATA and os.path.isdir(path):
            if any(entry.endswith(".distcp") for entry in os.listdir(path)):
                raise CheckpointDamagedError(
                    path, f"has parts but no {METADATA}: its save did not come to its end"
                ) from error
            raise NotACheckpointError(path, f"is a folder, but no checkpoint: it has no {METADATA}") from error
        raise cannot_read(path, error) from error
    except OSError as error:
        raise cannot_read(path, error) from error


def read_own_record(path: str) -> dict[str, Any]:
    try:
        with open_local_checkpoint(os.path.join(path, OWN_RECORD), own_format=False) as reader:
            record = reader.materialize(reader.skeleton)
    except CheckpointError as error:
        raise type(error)(path, f"{OWN_RECORD}: {error.problem}", OWN_RECORD) from error
    version = record.get("folder_version") if isinstance(record, dict) else None
    if version != FOLDER_VERSION:
        raise NotACheckpointError(
            path, f"has folder version {version!r}; this fairtrain reads version {FOLDER_VERSION}"
        )
    return record


def check_files(path: str, record: dict[str, Any], metadata: bytes) -> None:
    if crc32(metadata) != record["metadata_crc"]:
        raise CheckpointDamagedError(path, f"{METADATA} does not have the checksum it was written with", METADATA)
    for name, nbytes, _ in record["files"]:
        try:
            found = os.path.getsize(os.path.join(path, name))
        except FileNotFoundError as error:
            raise CheckpointDamagedError(path, f"its part {name} is missing", name) from error
        except OSError as error:
            raise cannot_read(path, error) from error
        if found != nbytes:
            raise CheckpointDamagedError(path, f"its part {name} has {found:,} bytes instead of {nbytes:,}", name)


def own_chunks(path: str, record: dict[str, Any]) -> Callable[[torch.dtype, StoredChunk, tuple[int, ...]], Chunk]:
    """A function that gives the Chunk for what `.metadata` says of it."""
    files = [name for name, *_ in record["files"]]
    block_bytes, checksums = record["block_bytes"], record["checksums"].tolist()
    places = {(files[file], offset): place for file, offset, *place in record["chunks"].tolist()}

    def chunk(dtype: torch.dtype, stored: StoredChunk, stride: tuple[int, ...]) -> Chunk:
        length, begin, first = places.get((stored.file, stored.offset), (None, 0, 0))
        count = -(-stored.box.numel * dtype.itemsize // block_bytes)
        if length != stored.length or first + count > len(checksums):
            raise CheckpointDamagedError(path, f"{METADATA} and {OWN_RECORD} differ in {stored.file}", METADATA)
        crcs = tuple(checksums[first : first + count])
        return Chunk(dtype, stored.box, stride, stored.file, begin, block_bytes, crcs)

    return chunk


# ---- folders of other programs, whose chunks are files of torch.save with the checksums of a zip


def foreign_skeleton(path: str, contents: FolderContents) -> Any:
    """The nest as far as it is tensors and plain values; what is neither is left out, with a warning."""
    found: dict[str, Any] = {}
    with Files(path) as files:
        for name, stored in contents.tensors.items():
            chunks = [foreign_chunk(files, name, stored, part) for part in stored.chunks]
            stride = row_major_stride(stored.shape)
            if len(chunks) == 1:
                stride = chunks[0].stride
            found[name] = ChunkedRef(stored.dtype, stored.shape, stride, name, chunks)
        for name, stored in contents.values.items():
            try:
                found[name] = foreign_value(files, stored)
            except NotACheckpointError as error:
                logger.warning("%s: %s is left out: %s", path, name, error.problem)
    if contents.paths is None:
        return found
    return nest_of({contents.paths[name]: value for name, value in found.items()})


def foreign_chunk(files: Files, name: str, stored: StoredTensor, part: StoredChunk) -> Chunk:
    ref, places = read_zip(files, part)
    if not isinstance(ref, TensorRef) or (ref.dtype, ref.shape) != (stored.dtype, part.box.sizes):
        raise CheckpointDamagedError(files.path, f"{part.file} holds another tensor than {METADATA} says for {name}")
    place = places[ref._record]
    if place.nbytes != ref.nbytes or not is_dense(ref.shape, ref._stride):
        raise NotACheckpointError(
            files.path, f"{part.file} holds a view of a larger tensor for {name}, which is not read"
        )
    return Chunk(stored.dtype, part.box, ref._stride, part.file, place.offset, max(place.nbytes, 1), (place.crc,))


def foreign_value(files: Files, part: StoredChunk) -> Any:
    value, places = read_zip(files, part)

    def ref_to(ref: TensorRef) -> TensorRef:
        place = places[ref._record]
        if place.nbytes != ref.nbytes or not is_dense(ref.shape, ref._stride):
            raise NotACheckpointError(files.path, "it holds a view of a larger tensor")
        box = Box((0,) * len(ref.shape), tuple(ref.shape))
        chunk = Chunk(ref.dtype, box, ref._stride, part.file, place.offset, max(place.nbytes, 1), (place.crc,))
        return ChunkedRef(ref.dtype, ref.shape, ref._stride, "", [chunk] if ref.nbytes else [])

    return map_leaves(value, (TensorRef,), ref_to)


def read_zip(files: Files, part: StoredChunk) -> tuple[Any, dict[str, Place]]:
    """What `torch.save` put into the part, and where each record's bytes lie in the part's file."""
    places = {}
    try:
        with zipfile.ZipFile(io.BytesIO() if part.length == 0 else Part(files, part)) as archive_:
            for entry in archive_.infolist():
                begin = part.offset + entry.header_offset
                header = files.read(part.file, begin, 30).numpy().tobytes()
                name_length, extra_length = struct.unpack("<HH", header[26:30])
                if header[:4] != b"PK\x03\x04" or entry.compress_type or entry.compress_size != entry.file_size:
                    raise zipfile.BadZipFile(f"{entry.filename} is not where the directory says, or is compressed")
                begin += 30 + name_length + extra_length
                if begin + entry.file_size > part.offset + part.length:
                    raise zipfile.BadZipFile(f"{entry.filename} reaches beyond its part")
                places[entry.filename.partition("/")[2]] = Place(entry.filename, begin, entry.file_size, entry.CRC)
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError, IndexError) as error:
        problem = f"{part.file} has no file of torch.save at byte {part.offset:,} ({error})"
        raise CheckpointDamagedError(files.path, problem, part.file) from error
    if "data.pkl" not in places:
        raise NotACheckpointError(files.path, f"{part.file} has a zip without data.pkl at byte {part.offset:,}")
    for name in ("data.pkl", "byteorder"):
        data = files.checked(part.file, places[name]) if name in places else b"little"
        if name == "data.pkl":
            pickled = data
        elif data != b"little":
            raise NotACheckpointError(files.path, "is of a big-endian machine, whose byte order is not read here")
    return parse_skeleton(pickled, places, files.path), places


def nest_of(values: dict[tuple, Any]) -> Any:
    """The nest in which each value lies under its keys; containers whose keys are 0, 1, 2, … become lists."""
    nest: dict = {}
    for keys, value in values.items():
        inner = nest
        for key in keys[:-1]:
            inner = inner.setdefault(key, Branch())
            if not isinstance(inner, Branch):
                break
        else:
            inner[keys[-1]] = value
    return as_lists(nest)


class Branch(dict):
    """A container that is being put together, which no value is."""


def as_lists(nest: Any) -> Any:
    if not isinstance(nest, Branch) and type(nest) is not dict:
        return nest
    items = {key: as_lists(value) if isinstance(value, Branch) else value for key, value in nest.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[number] for number in range(len(items))]
    return items


# ---- the files of a folder


class Files:
    """The files of a folder, one of them open at a time."""

    def __init__(self, path: str) -> None:
        self.path, self._name, self._fd = path, "", -1
        self._buffer = bytearray()

    def open(self, name: str) -> int:
        if name != self._name:
            self.close()
            try:
                self._fd = os.open(os.path.join(self.path, name), os.O_RDONLY)
            except FileNotFoundError as error:
                raise CheckpointDamagedError(self.path, f"its part {name} is missing", name) from error
            self._name = name
        return self._fd

    def read(self, name: str, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes]. Valid until the next call."""
        fd = self.open(name)
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        buffer, filled = memoryview(self._buffer)[:nbytes], 0
        while filled < nbytes:
            count = os.preadv(fd, [buffer[filled:]], offset + filled)
            if count == 0:
                raise CheckpointDamagedError(self.path, f"its part {name} ends too early", name)
            filled += count
        return (
            torch.frombuffer(self._buffer, dtype=torch.uint8)[:nbytes] if nbytes else torch.empty(0, dtype=torch.uint8)
        )

    def checked(self, name: str, place: Place) -> bytes:
        data = self.read(name, place.offset, place.nbytes).numpy().tobytes()
        if crc32(data) != place.crc:
            raise damaged(self.path, name)
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._name = -1, ""

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def damaged(path: str, file: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        path, f"its part {file} does not have the checksum it was written with: bytes of it have changed", file
    )


class Part(io.RawIOBase):
    """A part of a file of the folder, for zipfile."""

    def __init__(self, files: Files, part: StoredChunk) -> None:
        self._files, self._part, self._position = files, part, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._part.length}[whence]
        if origin + offset < 0:
            raise ValueError("before the beginning")  # as any file does
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, nbytes: int = -1) -> bytes:
        left = max(self._part.length - self._position, 0)
        nbytes = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        data = self._files.read(self._part.file, self._part.offset + self._position, nbytes).numpy().tobytes()
        self._position += nbytes
        return data


def pieces_to_read(chunk: Chunk, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges of bytes to read one after another, so that each checksum that covers [begin, end) can be compared."""
    step = max(archive.CHUNK_BYTES // 16 * 16, 16)
    for block in range(begin // chunk.block_bytes, -(-end // chunk.block_bytes)):
        last = min((block + 1) * chunk.block_bytes, chunk.nbytes)
        for first in range(block * chunk.block_bytes, last, step):
            yield first, min(first + step, last)


class ChunkReading:
    """Reads pieces of chunks in order and compares checksums where a block ends."""

    def __init__(self, files: Files) -> None:
        self.files, self._checksum = files, 0

    def read(self, chunk: Chunk, begin: int, end: int) -> Tensor:
        data = self.files.read(chunk.file, chunk.begin + begin, end - begin)
        self._checksum = crc32(data.numpy(), self._checksum if begin % chunk.block_bytes else 0)
        if end == chunk.nbytes or end % chunk.block_bytes == 0:
            if self._checksum != chunk.checksums[begin // chunk.block_bytes]:
                raise damaged(self.files.path, chunk.file)
        return data


# ---- verifying


def verify_folder(path: str | os.PathLike) -> list[str]:
    """Read every byte of the folder and return what is wrong with it, a sentence each ([]: nothing)."""
    path = os.fspath(path)
    try:
        folder = read_folder(path)
        if os.path.exists(os.path.join(path, OWN_RECORD)):
            record = read_own_record(path)
            problems = verify_file(os.path.join(path, OWN_RECORD))
            return problems + [problem for file in record["files"] for problem in file_problems(path, *file)]
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for ref in leaves(folder.skeleton, (TensorRef,)):
        for chunk in ref._chunks:
            problems += chunk_problems(path, chunk)
    return problems


def file_problems(path: str, name: str, nbytes: int, crc: int) -> list[str]:
    checksum = 0
    try:
        with Files(path) as files:
            for begin in range(0, nbytes, archive.CHUNK_BYTES):
                data = files.read(name, begin, min(archive.CHUNK_BYTES, nbytes - begin))
                checksum = crc32(data.numpy(), checksum)
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [str(cannot_read(path, error))]
    return [] if checksum == crc else [str(damaged(path, name))]


def chunk_problems(path: str, chunk: Chunk) -> list[str]:
    try:
        with Files(path) as files:
            reading = ChunkReading(files)
            for begin, end in pieces_to_read(chunk, 0, chunk.nbytes):
                reading.read(chunk, begin, end)
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [str(cannot_read(path, error))]
    return []
