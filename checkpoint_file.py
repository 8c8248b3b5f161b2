"""The bytes of one checkpoint: write, checksum, verify, stream into tensors.

Owns: the layout of the file, its checksums, and the way of its bytes from tensors to disk and back.
Must not know: names and folders of a run, the Trainer, the config. docs/checkpoint.md numbers what must hold.

    Exception
      CheckpointError              a path, and a sentence on what is wrong with it          status 2
        CheckpointNotFoundError    there is nothing under the path (is a FileNotFoundError too)
        NotACheckpointError        something else lies there; the sentence says what
        CheckpointDamagedError     a checkpoint that lost bytes or changed some; `record` where it is known
        CheckpointWriteError       the system refused the bytes (disk full, no permission)  status 1
        UnsavableValueError        a value that would not come back equal, by its key path  status 1

Writing: `torch.save` lays down a valid file with room for every record, the bytes follow at their offsets, the
CRC-32 of each record is put where a zip keeps it. Reading: names and containers first (`skeleton`), the bytes only
when somebody says where they go (`copy`), in bounded pieces, each checked on its way.
"""

from __future__ import annotations

import bisect
import errno
import io
import logging
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import distributed_utils

try:
    from isal.isal_zlib import crc32  # 13 GB/s
except ImportError:  # 2 GB/s
    from zlib import crc32

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
CHUNK_BYTES = 4 << 20  # bytes that are read, checked and copied at a time
BUCKET_BYTES = 16 << 20  # bytes that rank 0 sends at a time
ALIGNMENT = 64  # of records in the file and of pieces in a bucket: every dtype can be viewed there
MAX_DEPTH = 100
NO_CHECKSUM = -1  # of a record in a file that keeps none
MAX_INT_BITS = 2000  # torch.load(weights_only=True) reads integers of at most 255 bytes
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse"}


# ---------------------------------------------------------------------------------------------------------- errors


class CheckpointError(Exception):
    """What is wrong with the checkpoint at `path`; `rank` is the rank that found it, None where there is only one."""

    exit_status = 2
    is_user_error = True

    def __init__(self, path: str, problem: str, record: str | None = None, rank: int | None = None) -> None:
        super().__init__(path, problem, record, rank)
        self.path, self.problem, self.record, self.rank = str(path), problem, record, rank

    def __str__(self) -> str:
        found_by = f" (found by rank {self.rank})" if self.rank is not None else ""
        return f"{self.path}: {self.problem}{found_by}"


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    pass


class NotACheckpointError(CheckpointError):
    pass


class CheckpointDamagedError(CheckpointError):
    pass


class CheckpointWriteError(CheckpointError):
    exit_status = 1


class UnsavableValueError(CheckpointError):
    exit_status = 1


def error_kinds(kind: type[CheckpointError] = CheckpointError) -> dict[str, type[CheckpointError]]:
    """The classes of checkpoint errors by name, also those of the modules above."""
    kinds = {kind.__name__: kind}
    for narrower in kind.__subclasses__():
        kinds.update(error_kinds(narrower))
    return kinds


def agree_on_error(error: BaseException | None, group: Any = None) -> None:
    """Collective. If any rank has an error, all raise: a CheckpointError as itself on every rank, naming the rank.

    Other errors go through `distributed_utils.agree`: the failing rank raises its own, the others a PeerError.
    """
    if distributed_utils.get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    own = None
    if isinstance(error, CheckpointError):
        own = (type(error).__name__, error.path, error.problem, error.record)
    found = distributed_utils.all_gather_list((own, error is not None), group=group)
    if any(failed and described is None for described, failed in found):
        distributed_utils.agree(error, group)
    for rank, (described, failed) in enumerate(found):
        if failed:
            kind, path, problem, record = described
            raise error_kinds()[kind](path, problem, record, rank) from error


# --------------------------------------------------------------------------------------- nests and tensors in them


def map_leaves(nest: Any, leaf_types: tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """The nest with new containers, and `change(leaf)` for each leaf of one of `leaf_types`."""
    if isinstance(nest, leaf_types):
        return change(nest)
    if isinstance(nest, dict):
        return type(nest)((key, map_leaves(value, leaf_types, change)) for key, value in nest.items())
    if type(nest) in (list, tuple):
        return type(nest)(map_leaves(value, leaf_types, change) for value in nest)
    return nest


def leaves(nest: Any, leaf_types: tuple[type, ...]) -> list[Any]:
    found: list[Any] = []
    map_leaves(nest, leaf_types, found.append)
    return found


def is_dense(shape: tuple, strides: tuple) -> bool:
    """Whether the elements fill one range of memory without holes or overlap, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(strides, shape) if sz > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def flat_pieces(t: Tensor, begin: int, end: int) -> Iterator[Tensor]:
    """Views of `t` that, flattened and put one after another, are its elements [begin, end) in row-major order."""
    if begin >= end:
        return
    if t.is_contiguous():
        yield t.reshape(-1)[begin:end]
        return
    row = t.numel() // t.shape[0]
    first, last = -(-begin // row), end // row  # whole rows are [first, last)
    if first > last:  # both ends lie in one row
        yield from flat_pieces(t[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from flat_pieces(t[first - 1], begin - (first - 1) * row, row)
    if first < last:
        yield t[first:last]
    if end > last * row:
        yield from flat_pieces(t[last], 0, end - last * row)


def empty_storage(nbytes: int) -> torch.UntypedStorage:
    # Unlike torch.empty, a storage is not filled under torch.use_deterministic_algorithms: untouched, it costs nothing.
    return torch.UntypedStorage(nbytes, device="cpu")


def tensor_in(storage: torch.UntypedStorage, dtype: torch.dtype, nbytes_before: int, shape: Any, stride: Any) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, nbytes_before // dtype.itemsize, shape, stride)


# --------------------------------------------------------------------------------------------------------- writing


def write_checkpoint_file(state: dict[str, Any], path: str | os.PathLike) -> int:
    """Write `state` to exactly `path`, flushed to the disk, and return the number of bytes.

    One process. Nothing larger than CHUNK_BYTES is copied in memory. A view of a large base costs the bytes of the
    view, an expanded tensor those of its distinct elements; tensors that share memory share it in the file.

    Raises: UnsavableValueError before a byte is written; CheckpointWriteError, leaving what was written so far.
    """
    path = os.fspath(path)
    skeleton, records = plan_file(state, path)
    try:
        with open(path, "wb") as file, torch.serialization.skip_data():
            torch.save(skeleton, file)
        del skeleton
        fd = os.open(path, os.O_RDWR)
        try:
            places, directory_offset = read_directory(fd, path)
            checksums = {place.name: place.crc for place in places.values()}
            staging = torch.empty(min(CHUNK_BYTES, max((record.nbytes for record in records), default=0)), dtype=torch.uint8)
            for record in records:
                checksums[record.name] = write_record(fd, places[record.name], record, staging)
            patch_checksums(fd, places, directory_offset, checksums)
            os.fsync(fd)
            return os.fstat(fd).st_size
        finally:
            os.close(fd)
    except OSError as error:
        needed = sum(record.nbytes for record in records)
        raise CheckpointWriteError(path, f"{error.strerror or error} (writing {needed:,} bytes of tensors)") from error


@dataclass
class PlannedRecord:
    """One distinct range of memory that becomes one record: `parts` are flat tensors, each with its first byte."""

    name: str
    nbytes: int
    parts: list[tuple[int, Tensor]] = field(default_factory=list)
    storage: torch.UntypedStorage | None = None


def plan_file(state: dict[str, Any], path: str) -> tuple[dict[str, Any], list[PlannedRecord]]:
    """The state with stand-ins for its tensors (shapes and sharing, no bytes), and the records that they stand for."""
    check_values(state, path)
    tensors = {id(t): t for t in leaves(state, (Tensor,))}
    stand_ins, records = lay_out(tensors)
    skeleton = map_leaves(state, (Tensor,), lambda t: stand_ins[id(t)])
    number_of: dict[int, int] = {}  # torch.save numbers storages in the order in which it meets them
    for stand_in in leaves(skeleton, (Tensor,)):
        number_of.setdefault(stand_in.untyped_storage()._cdata, len(number_of))
    for record in records:
        record.name = f"data/{number_of[record.storage._cdata]}"
        record.storage = None
    return skeleton, records


def check_values(state: Any, path: str) -> None:
    """Raise UnsavableValueError for the first value that would not come back equal in value and type."""
    if type(state) not in (dict, OrderedDict):
        raise UnsavableValueError(path, f"a checkpoint is a dict, not a {type_name(state)}")
    open_containers: list[int] = []

    def walk(value: Any, keys: tuple) -> None:
        problem = leaf_problem(value)
        if problem is None and type(value) in (dict, OrderedDict, list, tuple):
            if id(value) in open_containers:
                problem = "a container that contains itself"
            elif len(open_containers) >= MAX_DEPTH:
                problem = f"containers nested more than {MAX_DEPTH} deep"
        if problem is not None:
            raise UnsavableValueError(path, f"{key_path(keys)} cannot be saved: it is {problem}")
        if type(value) in (dict, OrderedDict):
            items = value.items()
            odd = next((key for key in value if type(key) not in (str, int)), None)
            if odd is not None:
                raise UnsavableValueError(path, f"{key_path(keys)} cannot be saved: key {odd!r} is neither str nor int")
        elif type(value) in (list, tuple):
            items = enumerate(value)
        else:
            return
        open_containers.append(id(value))
        for key, item in items:
            walk(item, keys + (key,))
        open_containers.pop()

    walk(state, ())


def leaf_problem(value: Any) -> str | None:
    """Why `value` cannot stand in a checkpoint (None: it can, or it is a container)."""
    kind = type(value)
    if value is None or kind in (bool, float, complex, dict, OrderedDict, list, tuple):
        return None
    if kind is int:
        return None if value.bit_length() <= MAX_INT_BITS else f"an integer of {value.bit_length()} bits"
    if kind is str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return "a text with characters that UTF-8 does not have"
        return None
    if isinstance(value, Tensor):
        if kind not in (Tensor, torch.nn.Parameter):
            return f"a {type_name(value)}; give it as a plain tensor"
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            return f"a tensor without plain values (layout {value.layout}, device {value.device})"
        return None
    hint = "give it as plain dicts, lists, numbers, text and tensors"
    if kind.__module__ == "numpy" and hasattr(value, "item"):
        hint = "give it as .item()" if getattr(value, "ndim", 0) == 0 else "give it as torch.from_numpy(...)"
    elif isinstance(value, (set, frozenset)):
        hint = "give it as sorted(...)"
    elif isinstance(value, (bytes, bytearray)):
        hint = "give it as a uint8 tensor"
    elif isinstance(value, os.PathLike) or kind in (torch.dtype, torch.device):
        hint = "give it as str(...)"
    elif isinstance(value, (tuple, list, dict, str, int, float)):
        hint = "give it as the plain type that it derives from"
    return f"a {type_name(value)}; {hint}"


def type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def key_path(keys: tuple) -> str:
    return "state" + "".join(f"[{key!r}]" for key in keys)


@dataclass
class Extent:
    """Where the distinct elements of one tensor lie: `base` is the tensor without its expanded dimensions."""

    tensor: Tensor
    base: Tensor
    begin: int
    end: int

    @property
    def memory(self) -> tuple[str, torch.dtype]:
        return str(self.base.device), self.base.dtype


def extent(t: Tensor) -> Extent:
    expanded = [stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape)]
    base = t.detach()
    if any(expanded):
        base = base[tuple(slice(0, 1) if one else slice(None) for one in expanded)]
    last = sum((size - 1) * stride for size, stride in zip(base.shape, base.stride()))
    begin = base.data_ptr()
    return Extent(t, base, begin, begin + (last + 1) * base.element_size() if base.numel() else begin)


def lay_out(tensors: dict[int, Tensor]) -> tuple[dict[int, Tensor], list[PlannedRecord]]:
    """A stand-in for each tensor, and the records: one for each distinct range of memory of one dtype.

    Dense tensors that overlap become one record, and a strided view lies in it if the record covers it; any other
    strided tensor gets a record of its own, row-major, so that of a large base only the view's bytes are written.
    """
    extents = [extent(t) for t in tensors.values()]
    plain = [e for e in extents if e.base.numel() and not e.base.is_conj() and not e.base.is_neg()]
    dense = [e for e in plain if is_dense(e.base.shape, e.base.stride())]
    dense.sort(key=lambda e: (str(e.memory), e.begin, -e.end))
    ranges: list[tuple[Extent, int, PlannedRecord]] = []  # first member, end of the range
    record_of: dict[int, tuple[int, PlannedRecord]] = {}  # id of a tensor: address of its record's first byte
    for e in dense:
        first, end, record = ranges[-1] if ranges else (None, 0, None)
        apart = first is None or e.memory != first.memory or e.begin >= end
        if apart or (e.begin - first.begin) % e.base.element_size():
            first, end, record = e, e.begin, PlannedRecord("", 0)
            ranges.append((first, end, record))
        if e.end > end:
            flat = e.base.as_strided((e.base.numel(),), (1,))
            record.parts.append((end - first.begin, flat[(end - e.begin) // e.base.element_size() :]))
            record.nbytes = e.end - first.begin
            ranges[-1] = (first, e.end, record)
        record_of[id(e.tensor)] = (first.begin, record)
    begins = [(str(first.memory), first.begin) for first, _, _ in ranges]
    for e in plain:
        at = bisect.bisect_right(begins, (str(e.memory), e.begin)) - 1
        if id(e.tensor) in record_of or at < 0 or begins[at][0] != str(e.memory):
            continue
        first, end, record = ranges[at]
        if e.end <= end and (e.begin - first.begin) % e.base.element_size() == 0:
            record_of[id(e.tensor)] = (first.begin, record)
    records = [record for _, _, record in ranges]
    for record in records:
        record.storage = empty_storage(record.nbytes)
    twins: dict[tuple, Tensor] = {}
    stand_ins = {id(e.tensor): stand_in(e, record_of.get(id(e.tensor)), records, twins) for e in extents}
    return stand_ins, records


def stand_in(
    e: Extent, shared: tuple[int, PlannedRecord] | None, records: list[PlannedRecord], twins: dict[tuple, Tensor]
) -> Tensor:
    """A tensor with the shape, dtype and sharing that `e` has in the file; adds its record if it has one of its own."""
    base = e.base
    if shared is not None:
        address, record = shared
        made = tensor_in(record.storage, base.dtype, e.begin - address, base.shape, base.stride())
    elif base.numel() == 0:
        return torch.empty(e.tensor.shape, dtype=base.dtype, device="cpu")
    else:
        key = (e.memory, e.begin, base.shape, base.stride(), base.is_conj(), base.is_neg())
        if key not in twins:
            record = PlannedRecord("", base.numel() * base.element_size(), [(0, base)])
            record.storage = empty_storage(record.nbytes)
            records.append(record)
            row_major = torch.empty(base.shape, device="meta").stride()
            twins[key] = tensor_in(record.storage, base.dtype, 0, base.shape, row_major)
        made = twins[key]
    return made.expand(e.tensor.shape) if made.shape != e.tensor.shape else made


def write_record(fd: int, place: Place, record: PlannedRecord, staging: Tensor) -> int:
    """Write the record's bytes at their place; returns their CRC-32."""
    assert place.nbytes == record.nbytes, (place, record.nbytes)
    checksum = 0
    for start, part in record.parts:
        step = max(1, CHUNK_BYTES // part.element_size())
        for begin in range(0, part.numel(), step):
            for piece in flat_pieces(part, begin, min(begin + step, part.numel())):
                data = memoryview(row_major_bytes(piece, staging).numpy())
                checksum = crc32(data, checksum)
                write_all(fd, data, place.offset + start)
                start += len(data)
    return checksum


def row_major_bytes(piece: Tensor, staging: Tensor) -> Tensor:
    """uint8 [nbytes] on the CPU: the bytes themselves where they lie in a row there, else a copy in `staging`."""
    if piece.device.type == "cpu" and piece.is_contiguous() and not piece.is_conj() and not piece.is_neg():
        return piece.as_strided((piece.numel(),), (1,)).view(torch.uint8)  # a lone element may have any stride
    data = staging[: piece.numel() * piece.element_size()]
    data.view(piece.dtype).view(piece.shape).copy_(piece)
    return data


def write_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def patch_checksums(fd: int, places: dict[str, "Place"], directory_offset: int, checksums: dict[str, int]) -> None:
    """Put the checksums where a zip keeps them: behind each record's bytes and in the central directory."""
    directory = bytearray(os.pread(fd, os.fstat(fd).st_size - directory_offset, directory_offset))
    for place in places.values():
        packed = struct.pack("<I", checksums[place.name])
        struct.pack_into("<I", directory, place.entry_offset - directory_offset + 16, checksums[place.name])
        if place.nbytes and place.crc != checksums[place.name]:  # an empty record has no descriptor behind it
            write_all(fd, packed, place.offset + place.nbytes + 4)
    write_all(fd, bytes(directory), directory_offset)


# ----------------------------------------------------------------------------------------------- the zip around it


@dataclass(frozen=True)
class Place:
    """Where one record lies: the offset of its first byte, its size and CRC-32, the offset of its directory entry."""

    name: str
    offset: int
    nbytes: int
    crc: int
    entry_offset: int = 0


def read_directory(fd: int, path: str) -> tuple[dict[str, Place], int]:
    """The records by name (without the archive's prefix) and the offset of the central directory.

    Raises: CheckpointDamagedError if directory and records contradict each other or reach beyond the file.
    """
    size = os.fstat(fd).st_size
    try:
        with open(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
            entries, directory_offset = archive.infolist(), archive.start_dir
    except OSError as error:
        raise cannot_read(path, error) from error
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError, IndexError) as error:
        raise CheckpointDamagedError(path, "truncated or damaged: it has no readable directory of records") from error
    prefix = next((e.filename[: -len("data.pkl")] for e in entries if e.filename.endswith("/data.pkl")), None)
    if prefix is None:
        raise NotACheckpointError(path, f"a zip archive without the record data.pkl ({len(entries)} entries)")
    places: dict[str, Place] = {}
    entry_offset = directory_offset
    for entry in entries:
        name = entry.filename[len(prefix) :]
        place = Place(name, data_offset(fd, path, entry), entry.file_size, entry.CRC, entry_offset)
        if name in places or not entry.filename.startswith(prefix) or place.offset + place.nbytes > directory_offset:
            raise CheckpointDamagedError(path, f"the directory entry of {name!r} makes no sense", name)
        places[name] = place
        entry_offset += 46 + len(entry.orig_filename.encode()) + len(entry.extra) + len(entry.comment)
    assert directory_offset <= size
    return places, directory_offset


def data_offset(fd: int, path: str, entry: zipfile.ZipInfo) -> int:
    """The offset of the entry's first data byte, from the header before it, which must agree with the directory."""
    try:
        header = os.pread(fd, 30 + len(entry.orig_filename.encode()), entry.header_offset)
        fields = struct.unpack("<4sHHHHHIIIHH", header[:30])
        signature, _, flags, method, _, _, crc, _, _, name_length, extra_length = fields
        agrees = signature == b"PK\x03\x04" and method == entry.compress_type == 0 and not (flags | entry.flag_bits) & 1
        agrees = agrees and header[30:] == entry.orig_filename.encode() and name_length == len(header) - 30
        agrees = agrees and crc in ((0, entry.CRC) if flags & 8 else (entry.CRC,))
        agrees = agrees and entry.compress_size == entry.file_size
    except (OSError, struct.error, OverflowError, ValueError):
        agrees = False
    if not agrees:
        name = entry.filename.partition("/")[2] or entry.filename
        raise CheckpointDamagedError(path, f"record {name} is not where the directory says", name)
    return entry.header_offset + 30 + name_length + extra_length


# --------------------------------------------------------------------------------------------------- the skeleton


class TensorRef:
    """A tensor of the file, by its description: `dtype`, `shape`, `nbytes` (of the full tensor). The rest is opaque."""

    __slots__ = ("dtype", "shape", "nbytes", "_record", "_offset", "_stride")

    def __init__(self, dtype: torch.dtype, shape: tuple, record: str, offset: int, stride: tuple) -> None:
        self.dtype, self.shape = dtype, torch.Size(shape)
        self.nbytes = self.shape.numel() * dtype.itemsize
        self._record, self._offset, self._stride = record, offset, tuple(stride)

    def __reduce__(self):
        return TensorRef, (self.dtype, tuple(self.shape), self._record, self._offset, self._stride)

    def __repr__(self) -> str:
        return f"TensorRef({self.dtype}, {tuple(self.shape)}, {self._record})"

    def span(self) -> tuple[int, int]:
        """The bytes [begin, end) of the record between which all elements lie."""
        if self.shape.numel() == 0:
            return self._offset, self._offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self._stride))
        return self._offset, self._offset + (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class _StorageRef:
    record: str
    dtype: torch.dtype | None


class _SkeletonUnpickler(pickle.Unpickler):
    """Reads data.pkl without making a tensor. Only the names below mean anything; all others are refused by name."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.sizes: dict[str, int] = {}  # bytes that each record must have at least

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self.tensor_of_dtype,
            ("torch._utils", "_rebuild_parameter"): self.parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): self.parameter,
            ("torch.storage", "UntypedStorage"): None,
            ("torch", "UntypedStorage"): None,
            ("torch", "Size"): self.shape,
            ("collections", "OrderedDict"): OrderedDict,
            ("__builtin__", "complex"): complex,
            ("builtins", "complex"): complex,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch" and name in storage_dtypes():
            return storage_dtypes()[name]
        raise UnknownClass(f"{module}.{name}")

    def persistent_load(self, saved_id: Any) -> _StorageRef:
        _, dtype, key, _, count = saved_id
        record = f"data/{key}"
        self.sizes[record] = max(self.sizes.get(record, 0), int(count) * (dtype.itemsize if dtype else 1))
        return _StorageRef(record, dtype)

    def tensor(self, storage: _StorageRef, offset: int, shape: tuple, stride: tuple, *_: Any) -> TensorRef:
        return self.tensor_of_dtype(storage, offset, shape, stride, None, None, storage.dtype)

    def tensor_of_dtype(self, storage: _StorageRef, offset: int, shape: tuple, stride: tuple, *rest: Any) -> TensorRef:
        dtype = rest[2]
        ref = TensorRef(dtype, tuple(shape), storage.record, offset * dtype.itemsize, stride)
        begin, end = ref.span()
        if min((0, offset, *shape, *stride)) < 0 or (end > begin and end > self.sizes[storage.record]):
            raise ValueError(f"{ref} reaches beyond its record")
        return ref

    @staticmethod
    def parameter(data: TensorRef, *_: Any) -> TensorRef:
        return data

    @staticmethod
    def shape(sizes: Any = ()) -> tuple:
        return tuple(sizes)


class UnknownClass(pickle.UnpicklingError):
    pass


def storage_dtypes() -> dict[str, torch.dtype]:
    names = {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    }  # fmt: skip
    return {f"{name}Storage": dtype for name, dtype in names.items()}


def parse_skeleton(data: bytes, places: dict[str, Place], path: str) -> Any:
    reader = _SkeletonUnpickler(data)
    try:
        skeleton = reader.load()
    except UnknownClass as unknown:
        problem = f"holds objects of {unknown}, which is neither a tensor nor plain data; nothing of it was run"
        raise NotACheckpointError(path, problem) from None
    except Exception as error:  # whatever a pickle of another make can raise: its bytes are as they were written
        problem = f"its record data.pkl cannot be read ({type(error).__name__}: {error})"
        raise NotACheckpointError(path, problem) from error
    for record, nbytes in reader.sizes.items():
        if record not in places or places[record].nbytes < nbytes:
            raise CheckpointDamagedError(path, f"record {record} is missing or too short", record)
    return skeleton


def require_own_format(skeleton: Any, path: str) -> None:
    """Raise NotACheckpointError, saying what the file holds, unless the skeleton is one that fairtrain wrote."""
    if not isinstance(skeleton, dict):
        raise NotACheckpointError(path, f"holds a {type_name(skeleton)}, not the dict of a checkpoint")
    if "format_version" in skeleton and isinstance(skeleton.get("model"), dict):
        if skeleton["format_version"] == FORMAT_VERSION:
            return
        version = skeleton["format_version"]
        problem = f"has format version {version!r}; this fairtrain reads version {FORMAT_VERSION}"
        raise NotACheckpointError(path, problem)
    keys = ", ".join(map(str, list(skeleton)[:6])) + (", ..." if len(skeleton) > 6 else "")
    if skeleton and all(isinstance(value, TensorRef) for value in skeleton.values()):
        found = f"a bare state dict of {len(skeleton)} tensors ({keys})"
    elif {"model", "ema", "opt"} <= set(skeleton):
        found = "a checkpoint of DiT's own training script (model, ema, opt)"
    elif {"model", "optimizer_history"} <= set(skeleton):
        found = "a checkpoint of fairseq"
    else:
        found = f"a dict with the keys {keys or '(none)'}"
    raise NotACheckpointError(path, f"is no checkpoint of fairtrain: it holds {found}")


# --------------------------------------------------------------------------------------------------------- reading


class FileSource:
    """The bytes of a zip checkpoint, mapped (fastest) or read by offset (network file systems, where mapping hangs)."""

    def __init__(self, path: str, mapped: bool | None = None) -> None:
        self.path = path
        self._map: Tensor | None = None
        self._buffer = bytearray()
        self._fd: int | None = open_file(path)
        try:
            self.places, _ = read_directory(self._fd, path)
            self.pickle = self.read_checked("data.pkl")
            if "byteorder" in self.places and self.read_checked("byteorder") != b"little":
                raise NotACheckpointError(path, "is of a big-endian machine, whose byte order is not read here")
            if not is_on_network(path) if mapped is None else mapped:
                self._map = map_file(self._fd)
        except BaseException:
            self.close()
            raise

    def read_checked(self, name: str) -> bytes:
        place = self.places[name]
        data = os.pread(self._fd, place.nbytes, place.offset)
        if len(data) != place.nbytes or crc32(data) != place.crc:
            problem = f"record {name} does not have the checksum it was written with"
            raise CheckpointDamagedError(self.path, problem, name)
        return data

    def skeleton(self) -> Any:
        return parse_skeleton(self.pickle, self.places, self.path)

    def signature(self) -> tuple:
        return len(self.pickle), crc32(self.pickle), crc32(repr(sorted(map(str, self.places.values()))).encode())

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """uint8 [end - begin]: bytes of a record. Valid until the next call."""
        offset = self.places[name].offset + begin
        if self._map is not None:
            return self._map[offset : offset + end - begin]
        if len(self._buffer) < end - begin:
            self._buffer = bytearray(end - begin)
        buffer, filled = memoryview(self._buffer)[: end - begin], 0
        while filled < len(buffer):
            count = os.preadv(self._fd, [buffer[filled:]], offset + filled)
            if count == 0:
                raise CheckpointDamagedError(self.path, f"ends in the middle of record {name}", name)
            filled += count
        return torch.frombuffer(self._buffer, dtype=torch.uint8)[: end - begin]

    def close(self) -> None:
        self._map = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class MemorySource:
    """A file of torch's layout before 1.6, which can be neither mapped nor checked: loaded whole, on this rank."""

    def __init__(self, path: str) -> None:
        try:
            nest = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever the pickle leads it into
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            problem = f"looks like a file of torch's old layout, and torch.load(weights_only=True) refuses it: {reason}"
            raise NotACheckpointError(path, problem) from error
        self._nest = map_leaves(nest, (torch.Size,), tuple)
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in leaves(self._nest, (Tensor,))}
        self._storages = {f"memory/{key}": storage for key, storage in storages.items()}
        self.places = {name: Place(name, 0, storage.nbytes(), NO_CHECKSUM) for name, storage in self._storages.items()}

    def skeleton(self) -> Any:
        def describe(t: Tensor) -> TensorRef:
            record = f"memory/{t.untyped_storage()._cdata}"
            return TensorRef(t.dtype, tuple(t.shape), record, t.storage_offset() * t.element_size(), t.stride())

        return map_leaves(self._nest, (Tensor,), describe)

    def signature(self) -> tuple:
        return tuple(place.nbytes for place in self.places.values())

    def read(self, name: str, begin: int, end: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self._storages[name])[begin:end]

    def close(self) -> None:
        self._nest, self._storages = None, {}


def open_source(path: str, mapped: bool | None = None) -> FileSource | MemorySource:
    fd = open_file(path)
    try:
        size, start = os.fstat(fd).st_size, os.pread(fd, 64, 0)
    except OSError as error:
        raise cannot_read(path, error) from error
    finally:
        os.close(fd)
    if size == 0:
        raise CheckpointDamagedError(path, "is empty (0 bytes)")
    if start.startswith(b"PK\x03\x04"):
        return FileSource(path, mapped)
    if start.startswith(b"\x80"):
        return MemorySource(path)
    if not any(start):
        raise CheckpointDamagedError(path, f"begins with zeros ({size:,} bytes): it was never written to the disk")
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start):
        raise NotACheckpointError(path, f"is a text file; it begins with {start[:24].decode()!r}")
    raise NotACheckpointError(path, f"is no file of torch.save; it begins with the bytes {start[:8].hex(' ')}")


def open_file(path: str) -> int:
    try:
        if os.path.isdir(path):
            raise NotACheckpointError(path, "is a folder, not a checkpoint file")
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: str, error: OSError) -> CheckpointError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        folder = os.path.dirname(os.path.abspath(path))
        no_folder = "" if os.path.isdir(folder) else f", nor the folder {folder}"
        return CheckpointNotFoundError(path, f"no such file{no_folder}")
    if error.errno == errno.EIO:
        return CheckpointDamagedError(path, "the disk fails to read it (input/output error)")
    return CheckpointError(path, f"cannot be read: {error.strerror or error}")


def map_file(fd: int) -> Tensor:
    import mmap

    # Private and writable, as torch maps files: nobody writes, and a read-only buffer would make torch warn.
    return torch.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def is_on_network(path: str) -> bool:
    """Whether the file system under `path` is one of NETWORK_FILE_SYSTEMS (False where the system does not say)."""
    path, longest, kind = os.path.realpath(path), -1, ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                left, _, right = line.partition(" - ")
                point = left.split()[4].replace("\\040", " ")
                if len(point) > longest and (path + "/").startswith(point.rstrip("/") + "/"):
                    longest, kind = len(point), right.split()[0]
    except (OSError, IndexError):
        return False
    return kind.partition(".")[0] in NETWORK_FILE_SYSTEMS


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
        for begin in range(0, places[name].nbytes, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, places[name].nbytes)
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
            for begin in range(0, self._places[name].nbytes, CHUNK_BYTES):
                data = self._source.read(name, begin, min(begin + CHUNK_BYTES, self._places[name].nbytes))
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
        bucket = torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=distributed_utils.communication_device(self._group))
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


# ------------------------------------------------------------------------------------------------------- verifying


def verify_file(path: str | os.PathLike) -> list[str]:
    """Read every byte of the checkpoint and return what is wrong with it, a sentence each ([]: nothing).

    Whether fairtrain can continue from it is another question: an intact file of another program has no problem.
    """
    path = os.fspath(path)
    try:
        source = open_source(path, mapped=False)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    try:
        if isinstance(source, MemorySource):
            return [f"{path}: its layout (torch before 1.6) has no checksums, so that nothing can be verified"]
        for name, place in source.places.items():
            problems += record_problems(source, place)
        source.skeleton()
    except NotACheckpointError as error:
        problems += [] if isinstance(error.__context__, UnknownClass) else [str(error)]
    except CheckpointError as error:
        problems.append(str(error))
    finally:
        source.close()
    return problems


def record_problems(source: FileSource, place: Place) -> list[str]:
    checksum = 0
    try:
        for begin in range(0, place.nbytes, CHUNK_BYTES):
            checksum = crc32(source.read(place.name, begin, min(begin + CHUNK_BYTES, place.nbytes)).numpy(), checksum)
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [str(cannot_read(source.path, error))]
    if checksum != place.crc:
        return [f"{source.path}: record {place.name} does not have the checksum it was written with"]
    return []
