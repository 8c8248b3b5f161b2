"""What a folder of torch.distributed.checkpoint holds, of ours or of another program, and the bytes of its records.

A record is one box of one tensor, in a row in one file, with a checksum. Nothing in a folder is executed. Must not
know: ranks, and where the bytes of tensors go.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import struct
import zipfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from checkpoint_file import archive
from checkpoint_file.archive import Place, crc32, crc32_combine
from checkpoint_file.boxes import Box, memory_order, row_major_stride, stride_in_order
from checkpoint_file.dcp_metadata import METADATA, FolderContents, StoredChunk, StoredTensor, parse_metadata
from checkpoint_file.errors import CheckpointDamagedError, CheckpointError, NotACheckpointError, cannot_read
from checkpoint_file.folder_files import Files, Part, damaged
from checkpoint_file.folder_writing import FOLDER_VERSION, OWN_RECORD
from checkpoint_file.limits import MAX_PICKLE_BYTES, MAX_SMALL_BYTES, open_regular, shown
from checkpoint_file.nests import is_dense, leaves, map_leaves, type_name
from checkpoint_file.reading import CheckpointReader
from checkpoint_file.skeleton import TensorRef, parse_skeleton
from checkpoint_file.sources import FileSource, RecordSource
from checkpoint_file.verifying import record_problems, verify_file

logger = logging.getLogger(__name__)


# ---- what is in a folder


@dataclass
class Records:
    """The records that were found so far. files: the name of the file that each lies in."""

    path: str
    places: dict[str, Place] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def add(
        self, tensor: str, dtype: torch.dtype, box: Box, stride: tuple, file: str, begin: int, crc: int
    ) -> TensorRef:
        """The elements of one box of `tensor`, in the order of memory of `stride`, from byte `begin` of `file` on."""
        name = f"{tensor} (byte {begin:,} of {file})"
        ref = TensorRef(dtype, box.sizes, name, 0, stride)
        self.places[name], self.files[name] = Place(name, begin, ref.nbytes, crc), file
        return ref

    def tensor(self, stored: StoredTensor, stride: tuple, chunks: list[TensorRef]) -> TensorRef:
        """The whole of the boxes of a tensor."""
        if not chunks:
            self.places[""], self.files[""] = Place("", 0, 0, 0), ""
            return TensorRef(stored.dtype, stored.shape, "", 0, stride)
        if len(chunks) == 1:
            return TensorRef(stored.dtype, stored.shape, chunks[0]._record, 0, stride)
        offsets = [part.box.offsets for part in stored.chunks]
        return TensorRef(stored.dtype, stored.shape, f"{chunks[0]._record} …", 0, stride, tuple(zip(offsets, chunks)))

    def in_order(self) -> dict[str, Place]:
        """The places, file by file, as the records lie there."""
        return dict(sorted(self.places.items(), key=lambda item: (self.files[item[0]], item[1].offset)))


@dataclass
class Folder:
    skeleton: Any
    records: Records
    signature: tuple


class FolderSource(RecordSource):
    """The bytes of a folder: what FileSource is for a file."""

    def __init__(self, path: str, read_method: str = "auto") -> None:
        super().__init__(read_method)
        self.path = path
        folder = read_folder(path)
        self._skeleton, self._signature = folder.skeleton, folder.signature
        self.places, self._file_of = folder.records.in_order(), folder.records.files
        self._files = Files(path)

    def opened(self, name: str) -> contextlib.AbstractContextManager[int]:
        return self._files.opened(self._file_of[name])

    def mapped(self, name: str) -> Tensor:
        return self._files.mapped(self._file_of[name])

    def records_in(self, file: str) -> list[Place]:
        return [place for name, place in self.places.items() if self._file_of[name] == file]

    def skeleton(self, own_format: bool = True) -> Any:
        return self._skeleton

    def signature(self) -> tuple:
        return self._signature

    def close(self) -> None:
        super().close()
        self._files.close()


def read_folder(path: str) -> Folder:
    """What the folder holds, with a TensorRef for each tensor. Reads no bytes of tensors. Raises: CheckpointError."""
    # Tens of thousands of small objects come to stay: searching all of torch for garbage meanwhile took 10 x as long.
    collects = gc.isenabled()
    gc.disable()
    try:
        return read_contents(path)
    except OSError as error:
        raise error if isinstance(error, CheckpointError) else cannot_read(path, error)
    finally:
        if collects:
            gc.enable()


def read_contents(path: str) -> Folder:
    data = read_whole(path, METADATA)
    records = Records(path)
    if not os.path.exists(os.path.join(path, OWN_RECORD)):
        skeleton = foreign_skeleton(records, parse_metadata(data, path))
        check_apart(records)
        return Folder(skeleton, records, (len(data), crc32(data)))
    record = read_own_record(path)
    check_files(path, record, data)
    try:
        skeleton = own_skeleton(records, parse_metadata(data, path), record)
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        problem = f"{METADATA} and {OWN_RECORD} do not fit each other ({type(error).__name__}: {error})"
        raise NotACheckpointError(path, problem) from error
    check_apart(records)
    return Folder(skeleton, records, (len(data), crc32(data), repr(record["files"]), record["chunks"].shape[0]))


def check_apart(records: Records) -> None:
    """The records have no more bytes than the files: a folder that says otherwise would grow when it is read."""
    claimed = sum(place.nbytes for place in records.places.values())
    found = sum(os.path.getsize(os.path.join(records.path, name)) for name in set(records.files.values()) if name)
    if claimed > found:
        problem = f"its tensors have {claimed:,} bytes, its parts {found:,}: some lie in the same bytes"
        raise CheckpointDamagedError(records.path, problem)


def read_whole(path: str, name: str) -> bytes:
    try:
        with os.fdopen(open_regular(os.path.join(path, name)), "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_PICKLE_BYTES:
                raise NotACheckpointError(path, f"its {name} has more than {MAX_PICKLE_BYTES:,} bytes")
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
        source = FileSource(os.path.join(path, OWN_RECORD))
        with CheckpointReader(source.path, source.skeleton(), source, source.places) as reader:
            if any(ref.nbytes > source.places[ref._record].nbytes for ref in leaves(reader.skeleton, (TensorRef,))):
                raise NotACheckpointError(path, "it holds a tensor that is larger than its bytes")
            record = reader.materialize(reader.skeleton)
    except CheckpointError as error:
        problem = error.problem
        if isinstance(error, CheckpointDamagedError):
            problem = f"is damaged ({problem.removeprefix('truncated or damaged: ')})"
        raise type(error)(path, f"its {OWN_RECORD} {problem}", OWN_RECORD) from error
    version = record.get("folder_version") if isinstance(record, dict) else None
    if version != FOLDER_VERSION:
        raise NotACheckpointError(
            path, f"has folder version {shown(version)}; this fairtrain reads version {FOLDER_VERSION}"
        )
    if problem := record_problem(record):
        raise NotACheckpointError(path, f"{OWN_RECORD}: {problem}")
    return record


def record_problem(record: dict[str, Any]) -> str | None:
    """What keeps the record from being one that was written for a folder."""
    kinds = {"files": list, "tensors": list, "block_bytes": int, "checksums": Tensor, "chunks": Tensor, "metadata_crc": int}
    for key, kind in kinds.items():
        if not isinstance(record.get(key), kind):
            return f"its {key} is a {type_name(record.get(key))}"
    chunks, checksums = record["chunks"], record["checksums"]
    if (chunks.dtype, chunks.dim(), checksums.dtype, checksums.dim()) != (torch.int64, 2, torch.int64, 1):
        return "its tables have other shapes"
    if chunks.shape[1] != 5 or record["block_bytes"] < 1 or "state" not in record:
        return "its tables have other shapes"
    for entry in record["files"]:
        if not (isinstance(entry, (list, tuple)) and [type(one) for one in entry] == [str, int, int]):
            return f"it has the file {shown(entry)}"
        if os.path.basename(entry[0]) != entry[0] or not entry[0].endswith(".distcp"):
            return f"{shown(entry[0])} is no name of a part in the folder"
    if len(chunks) and not 0 <= int(chunks[:, 0].min()) <= int(chunks[:, 0].max()) < len(record["files"]):
        return "its chunks lie in files that it does not have"
    if len(chunks) and not 0 <= int(chunks.min()) <= int(chunks.max()) < 2**62:
        return "its chunks have impossible places"
    for entry in record["tensors"]:
        if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[0], str)):
            return f"it has the tensor {shown(entry)}"
        if not isinstance(entry[1], (list, tuple)) or not all(type(one) is int and 0 <= one < 2**62 for one in entry[1]):
            return f"it has a tensor of strides {shown(entry[1])}"
    return None


def check_files(path: str, record: dict[str, Any], metadata: bytes) -> None:
    if crc32(metadata) != record["metadata_crc"]:
        raise damaged(path, METADATA)
    for name, nbytes, _ in record["files"]:
        try:
            found = os.path.getsize(os.path.join(path, name))
        except FileNotFoundError as error:
            raise CheckpointDamagedError(path, f"its part {name} is missing", name) from error
        except OSError as error:
            raise cannot_read(path, error) from error
        if found != nbytes:
            raise CheckpointDamagedError(path, f"its part {name} has {found:,} bytes instead of {nbytes:,}", name)


def own_skeleton(records: Records, contents: FolderContents, record: dict[str, Any]) -> Any:
    """The nest of `fairtrain.pt` with a ref for each number in it."""
    path, refs = records.path, []
    files = [name for name, *_ in record["files"]]
    block_bytes, checksums = record["block_bytes"], record["checksums"].tolist()
    places = {(files[file], offset): place for file, offset, *place in record["chunks"].tolist()}
    known: dict[tuple[str, int], TensorRef] = {}  # tensors of the same bytes were the same memory

    def chunk(name: str, dtype: torch.dtype, part: StoredChunk, order: list[int]) -> TensorRef:
        length, begin, first = places.get((part.file, part.offset), (None, 0, 0))
        nbytes = part.box.numel * dtype.itemsize
        crcs = checksums[first : first + -(-nbytes // block_bytes)]
        if length != part.length or len(crcs) * block_bytes < nbytes:
            raise CheckpointDamagedError(path, f"its {METADATA} and its {OWN_RECORD} do not agree on {part.file}", METADATA)
        stride = stride_in_order(part.box.sizes, order)
        return records.add(name, dtype, part.box, stride, part.file, begin, combined(crcs, block_bytes, nbytes))

    for name, stride in record["tensors"]:
        stored = contents.tensors.get(name)
        if stored is None or len(stride) != len(stored.shape):
            raise CheckpointDamagedError(path, f"its {METADATA} and its {OWN_RECORD} do not agree on {name}", METADATA)
        key = (stored.chunks[0].file, stored.chunks[0].offset) if stored.chunks else (name, -1)
        if key not in known:
            order = memory_order(stride)
            chunks = [chunk(name, stored.dtype, part, order) for part in stored.chunks]
            known[key] = records.tensor(stored, tuple(stride), chunks)
        refs.append(known[key])
    return map_leaves(record["state"], (Tensor,), lambda number: refs[int(number)])


def combined(checksums: list[int], block_bytes: int, nbytes: int) -> int:
    """The CRC-32 of `nbytes` of which those of blocks are known."""
    total = 0
    for number, checksum in enumerate(checksums):
        total = crc32_combine(total, checksum, min(block_bytes, nbytes - number * block_bytes))
    return total


# ---- folders of other programs, whose chunks are files of torch.save with the checksums of a zip


def foreign_skeleton(records: Records, contents: FolderContents) -> Any:
    """The nest as far as it is tensors and plain values; what is neither is left out, with a warning."""
    found: dict[str, Any] = {}
    with Files(records.path) as files:
        for name, stored in contents.tensors.items():
            chunks = [foreign_chunk(records, files, name, stored, part) for part in stored.chunks]
            stride = chunks[0]._stride if len(chunks) == 1 else row_major_stride(stored.shape)
            found[name] = records.tensor(stored, stride, chunks)
        for name, stored in contents.values.items():
            try:
                found[name] = foreign_value(records, files, name, stored)
            except NotACheckpointError as error:
                logger.warning("%s: %s is left out: %s", records.path, name, error.problem)
    if contents.paths is None:
        return found
    return nest_of({contents.paths[name]: value for name, value in found.items()})


def foreign_chunk(records: Records, files: Files, name: str, stored: StoredTensor, part: StoredChunk) -> TensorRef:
    ref, places = read_zip(files, part)
    if not isinstance(ref, TensorRef) or (ref.dtype, ref.shape) != (stored.dtype, part.box.sizes):
        raise CheckpointDamagedError(files.path, f"its part {part.file} holds another tensor than its {METADATA} says for {name}")
    place = places[ref._record]
    if place.nbytes != ref.nbytes or not is_dense(ref.shape, ref._stride):
        problem = f"its part {part.file} holds for {name} a view of a larger tensor, which is not read"
        raise NotACheckpointError(files.path, problem)
    return records.add(name, stored.dtype, part.box, ref._stride, part.file, place.offset, place.crc)


def foreign_value(records: Records, files: Files, name: str, part: StoredChunk) -> Any:
    value, places = read_zip(files, part)

    def ref_to(ref: TensorRef) -> TensorRef:
        place = places[ref._record]
        if place.nbytes != ref.nbytes or not is_dense(ref.shape, ref._stride):
            raise NotACheckpointError(files.path, "it holds a view of a larger tensor")
        box = Box((0,) * len(ref.shape), tuple(ref.shape))
        return records.add(name, ref.dtype, box, ref._stride, part.file, place.offset, place.crc)

    return map_leaves(value, (TensorRef,), ref_to)


def read_zip(files: Files, part: StoredChunk) -> tuple[Any, dict[str, Place]]:
    """What `torch.save` put into the part, and where each record's bytes lie in the part's file."""
    places = {}
    try:
        with zipfile.ZipFile(io.BytesIO() if part.length == 0 else Part(files, part)) as archive_:
            for entry in archive_.infolist():
                begin = part.offset + entry.header_offset
                header = files.read(part.file, begin, 30)
                name_length, extra_length = struct.unpack("<HH", header[26:30])
                if header[:4] != b"PK\x03\x04" or entry.compress_type or entry.compress_size != entry.file_size:
                    raise zipfile.BadZipFile(f"{entry.filename} is not where the directory says, or is compressed")
                begin += 30 + name_length + extra_length
                if begin + entry.file_size > part.offset + part.length:
                    raise zipfile.BadZipFile(f"{entry.filename} reaches beyond its part")
                places[entry.filename.partition("/")[2]] = Place(entry.filename, begin, entry.file_size, entry.CRC)
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError, IndexError) as error:
        problem = f"its part {part.file} has no file of torch.save at byte {part.offset:,} ({error})"
        raise CheckpointDamagedError(files.path, problem, part.file) from error
    if "data.pkl" not in places:
        raise NotACheckpointError(files.path, f"its part {part.file} has a zip without data.pkl at byte {part.offset:,}")
    for name, most in (("data.pkl", MAX_PICKLE_BYTES), ("byteorder", MAX_SMALL_BYTES)):
        if name in places and places[name].nbytes > most:
            raise NotACheckpointError(files.path, f"the record {name} in {part.file} has more than {most:,} bytes")
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


# ---- verifying


def verify_folder(path: str | os.PathLike) -> list[str]:
    """Read every byte of the folder and return what is wrong with it, a sentence each ([]: nothing)."""
    path = os.fspath(path)
    try:
        source = FolderSource(path, read_method="pread")
        own = read_own_record(path)["files"] if os.path.exists(os.path.join(path, OWN_RECORD)) else None
    except CheckpointError as error:
        return [str(error)]
    try:
        if own is None:
            return [problem for place in source.places.values() for problem in record_problems(source, place)]
        problems = verify_file(os.path.join(path, OWN_RECORD))
        return problems + [problem for file in own for problem in part_problems(source, *file)]
    finally:
        source.close()


def part_problems(source: FolderSource, name: str, nbytes: int, crc: int) -> list[str]:
    """Of one part every byte, those between its records too; where some have changed, which records they belong to."""
    problems = file_problems(source.path, name, nbytes, crc)
    records = source.records_in(name) if problems else []
    return [problem for place in records for problem in record_problems(source, place)] or problems


def file_problems(path: str, name: str, nbytes: int, crc: int) -> list[str]:
    checksum = 0
    try:
        with Files(path) as files:
            for begin in range(0, nbytes, archive.CHUNK_BYTES):
                checksum = crc32(files.read(name, begin, min(archive.CHUNK_BYTES, nbytes - begin)), checksum)
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [str(cannot_read(path, error))]
    return [] if checksum == crc else [str(damaged(path, name))]
