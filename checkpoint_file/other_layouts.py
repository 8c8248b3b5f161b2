"""Files of other layouts than a zip, each as names and the records that its tensors lie in: read by offset, or mapped.

Owns: torch's layout before 1.6 (pickles, then one storage after another) and safetensors (a JSON header, then tensors).
Neither has checksums. Nothing in them is executed. Must not know: what the names mean.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import struct
from collections.abc import Callable
from typing import Any

import torch

from checkpoint_file.archive import NO_CHECKSUM, Place, crc32
from checkpoint_file.errors import CheckpointDamagedError, NotACheckpointError
from checkpoint_file.limits import RefusedBytes, check_pickle, shown
from checkpoint_file.skeleton import TensorRef, _SkeletonUnpickler, _StorageRef, unpickled
from checkpoint_file.sources import OneFileSource
from checkpoint_file.stand_ins import find_data

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the first of the pickles that torch.save wrote before 1.6
MAX_HEADER_BYTES = 100 << 20  # of safetensors, as the format says
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip


class UncheckedSource(OneFileSource):
    """A file without checksums. `_look` fills `places` and `_nest`, what the names and containers are."""

    _nest: Any

    def skeleton(self, own_format: bool = False) -> Any:
        return self._nest

    def signature(self) -> tuple:
        return self._size(), crc32(repr(sorted(map(str, self.places.values()))).encode())

    def _size(self) -> int:
        return os.fstat(self._fd).st_size


class LegacySource(UncheckedSource):
    """torch's layout before 1.6."""

    def _look(self) -> None:
        self.places = {}
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as data:
            pickles = Pickles(data, self.path)
            for what in ("magic number", "protocol", "system"):
                value, _ = pickles.next(_SkeletonUnpickler, "its beginning")
                if what == "magic number" and value != LEGACY_MAGIC:
                    problem = f"is a pickle of a {type(value).__name__}, not a file of torch.save"
                    raise NotACheckpointError(self.path, problem)
                if what == "system" and isinstance(value, dict) and not value.get("little_endian", True):
                    raise NotACheckpointError(
                        self.path, "is of a big-endian machine, whose byte order is not read here"
                    )
            nest, reader = pickles.next(lambda file: _LegacyUnpickler(file, find_data), "its pickle")
            keys, _ = pickles.next(_SkeletonUnpickler, "its list of storages")
            offset = pickles.offset
        if not isinstance(keys, list) or not all(type(key) in (str, int) for key in keys):
            raise CheckpointDamagedError(self.path, "has no list of storages")
        for key in keys:
            offset = self._storage(f"data/{key}", reader, offset)
        missing = [name for name in reader.sizes if name not in self.places]
        if missing:
            raise CheckpointDamagedError(self.path, f"record {missing[0]} is missing", missing[0])
        self._nest = nest

    def _storage(self, name: str, reader: _LegacyUnpickler, offset: int) -> int:
        """Note the storage that begins at `offset` with its number of elements; returns where the next one begins."""
        header = os.pread(self._fd, 8, offset)
        count = struct.unpack("<q", header)[0] if len(header) == 8 else -1
        nbytes = count * reader.itemsizes.get(name, 1)
        if count < 0 or offset + 8 + nbytes > self._size() or nbytes < reader.sizes.get(name, 0):
            raise CheckpointDamagedError(self.path, f"ends in the middle of record {name}", name)
        self.places[name] = Place(name, offset + 8, nbytes, NO_CHECKSUM)
        return offset + 8 + nbytes


class Pickles:
    """Pickles one behind the other in a mapped file; `offset` is where the next one begins."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._data, self._path, self.offset = data, path, 0

    def next(self, make: Callable[[io.BytesIO], _SkeletonUnpickler], what: str) -> tuple[Any, _SkeletonUnpickler]:
        """(the next object, the reader that `make` made for it)."""
        try:
            end = check_pickle(self._data, self.offset)
        except RefusedBytes as error:
            raise NotACheckpointError(self._path, f"{what} cannot be read: {error}") from error
        data = self._data[self.offset : end]
        reader, self.offset = make(io.BytesIO(data)), end
        return unpickled(reader, data, self._path, what), reader


class _LegacyUnpickler(_SkeletonUnpickler):
    def __init__(self, file: Any, find_other: Any) -> None:
        super().__init__(file, find_other)
        self.itemsizes: dict[str, int] = {}

    def persistent_load(self, saved_id: Any) -> Any:
        """A storage; or a class of a module that was saved whole, whose source the file may hold: only data here."""
        kind = saved_id[0].decode() if isinstance(saved_id[0], bytes) else saved_id[0]
        if kind == "module":
            return saved_id[1]
        _, dtype, key, _, count, *view = saved_id
        ref = super().persistent_load((kind, dtype, str(key) if type(key) is int else key, None, count))
        if ref.dtype is None:
            ref = _StorageRef(ref.record, torch.uint8)
        self.itemsizes[ref.record] = ref.dtype.itemsize
        if view and view[0] is not None:
            raise ValueError("it has views of storages, as torch wrote before 0.4")
        return ref


class SafetensorsSource(UncheckedSource):
    """A file of safetensors: eight bytes with the length of a JSON header, the header, the bytes of the tensors."""

    def _look(self) -> None:
        self.places = {}
        length = struct.unpack("<Q", os.pread(self._fd, 8, 0))[0]
        try:
            header = json.loads(os.pread(self._fd, length, 8).decode())
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointDamagedError(self.path, f"its header of safetensors cannot be read ({error})") from error
        self._nest = {name: self._tensor(name, entry, 8 + length) for name, entry in entries.items()}

    def _tensor(self, name: str, entry: Any, first: int) -> TensorRef:
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except KeyError as error:
            problem = f"its tensor {name} is of the type {entry.get('dtype')}, which is not read here"
            raise NotACheckpointError(self.path, problem) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointDamagedError(
                self.path, f"its header says nothing that makes sense of {name}", name
            ) from error
        sizes = (*shape, begin, end)
        if not all(type(size) is int and size >= 0 for size in sizes) or begin > end or first + end > self._size():
            raise CheckpointDamagedError(self.path, f"ends before its tensor {name} does", name)
        if max(math.prod(shape), *sizes) >= 2**60 or len(shape) > 64:
            raise CheckpointDamagedError(self.path, f"its header gives {name} the shape {shown(shape)}", name)
        ref = TensorRef(dtype, shape, name, 0, row_major(shape))
        if ref.nbytes != end - begin:
            raise CheckpointDamagedError(
                self.path, f"its header gives {name} {end - begin:,} bytes, not {ref.nbytes:,}", name
            )
        self.places[name] = Place(name, first + begin, end - begin, NO_CHECKSUM)
        return ref


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def looks_like_safetensors(start: bytes, size: int) -> bool:
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 9 else 0
    return 2 <= length <= min(MAX_HEADER_BYTES, size - 8) and start[8:9] == b"{"
