"""Where the bytes of a checkpoint come from: a file that is mapped or read by offset, or an old one held in memory."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from checkpoint_file.archive import NO_CHECKSUM, Place, crc32, read_directory
from checkpoint_file.errors import CheckpointDamagedError, NotACheckpointError, cannot_read
from checkpoint_file.nests import leaves, map_leaves
from checkpoint_file.skeleton import TensorRef, parse_skeleton

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse"}
)


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
