"""Where the bytes of a checkpoint come from: a file that is read by offset or mapped."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import Tensor

from checkpoint_file.archive import Place, crc32, read_directory
from checkpoint_file.errors import CheckpointDamagedError, NotACheckpointError, cannot_read
from checkpoint_file.limits import MAX_PICKLE_BYTES, MAX_SMALL_BYTES, open_regular
from checkpoint_file.skeleton import TensorRef, parse_skeleton

READ_METHODS = ("auto", "mmap", "pread")
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse"}
)


class RecordSource:
    """Records that lie as they are in files. `places` says where, in the order in which they are best read.

    read_method: pread reads by offset straight into its destination, which was measured to be faster than copying from
    a map, and never ends in SIGBUS; mmap maps a file and copies; auto is pread, and maps a file that is not on a
    network file system (where mapping has been seen to hang) for tensors whose elements are taken one by one.
    Several threads may call `read_into`.
    """

    path: str
    places: dict[str, Place]

    def __init__(self, read_method: str = "auto") -> None:
        assert read_method in READ_METHODS, read_method
        self._method = read_method
        self._buffer = bytearray()
        self._stored: tuple[TensorRef, Tensor] | None = None

    def opened(self, name: str) -> contextlib.AbstractContextManager[int]:
        """The descriptor of the file that holds the record."""
        raise NotImplementedError

    def mapped(self, name: str) -> Tensor:
        """uint8, all of the file that holds the record."""
        raise NotImplementedError

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """uint8 [end - begin]: bytes of a record. Valid until the next call."""
        if self._method == "mmap":
            offset = self.places[name].offset
            return self.mapped(name)[offset + begin : offset + end]
        if len(self._buffer) < end - begin:
            self._buffer = bytearray(end - begin)
        self.read_into(name, begin, memoryview(self._buffer)[: end - begin])
        return torch.frombuffer(self._buffer, dtype=torch.uint8)[: end - begin]

    def read_into(self, name: str, begin: int, memory: memoryview) -> None:
        """Fill `memory` with the record's bytes from `begin` on."""
        offset = self.places[name].offset + begin
        if self._method == "mmap":
            torch.frombuffer(memory, dtype=torch.uint8).copy_(self.mapped(name)[offset : offset + len(memory)])
            return
        with self.opened(name) as fd:
            while len(memory):
                count = os.preadv(fd, [memory], offset)
                if count == 0:
                    raise CheckpointDamagedError(self.path, f"ends in the middle of record {name}", name)
                memory, offset = memory[count:], offset + count

    def stored(self, ref: TensorRef) -> Tensor:
        """The tensor as it lies in the file: a view of the mapped file, or a copy of its own where none is mapped."""
        if self._stored is None or self._stored[0] is not ref:
            begin, end = ref.span()
            offset = self.places[ref._record].offset + begin
            self._stored = None  # at most one copy at a time
            maps = self._method == "mmap" or (self._method == "auto" and not is_on_network(self.path))
            if maps and offset % ref.dtype.itemsize == 0:
                data = self.mapped(ref._record)[offset : offset + end - begin]
            else:
                data = torch.empty(end - begin, dtype=torch.uint8)
                self.read_into(ref._record, begin, memoryview(data.numpy()))
            self._stored = ref, data.view(ref.dtype).as_strided(ref.shape, ref._stride)
        return self._stored[1]

    def close(self) -> None:
        self._stored = None


class OneFileSource(RecordSource):
    """Records of one file. `_look` finds them."""

    def __init__(self, path: str, read_method: str = "auto") -> None:
        super().__init__(read_method)
        self.path = path
        self._map: Tensor | None = None
        self._fd: int | None = open_file(path)
        try:
            self._look()
        except BaseException:
            self.close()
            raise

    def _look(self) -> None:
        """Fill `places`."""
        raise NotImplementedError

    def opened(self, name: str) -> contextlib.AbstractContextManager[int]:
        return contextlib.nullcontext(self._fd)

    def mapped(self, name: str) -> Tensor:
        if self._map is None:
            self._map = map_file(self._fd)
        return self._map

    def close(self) -> None:
        super().close()
        self._map = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class FileSource(OneFileSource):
    """The bytes of a zip checkpoint."""

    def _look(self) -> None:
        self.places, _ = read_directory(self._fd, self.path)
        self.pickle = self.read_checked("data.pkl", MAX_PICKLE_BYTES)
        if "byteorder" in self.places and self.read_checked("byteorder", MAX_SMALL_BYTES) != b"little":
            raise NotACheckpointError(self.path, "is of a big-endian machine, whose byte order is not read here")

    def read_checked(self, name: str, most: int) -> bytes:
        place = self.places[name]
        if place.nbytes > most:
            raise NotACheckpointError(self.path, f"its record {name} has {place.nbytes:,} bytes, more than {most:,}")
        data = os.pread(self._fd, place.nbytes, place.offset)
        if len(data) != place.nbytes or crc32(data) != place.crc:
            problem = f"record {name} does not have the checksum it was written with"
            raise CheckpointDamagedError(self.path, problem, name)
        return data

    def skeleton(self, own_format: bool = True) -> Any:
        """Names and containers. own_format: objects of other people's classes are refused, not read as plain data."""
        return parse_skeleton(self.pickle, self.places, self.path, own_format)

    def signature(self) -> tuple:
        return len(self.pickle), crc32(self.pickle), crc32(repr(sorted(map(str, self.places.values()))).encode())


def open_file(path: str) -> int:
    try:
        if os.path.isdir(path):
            raise NotACheckpointError(path, "is a folder, not a checkpoint file")
        return open_regular(path)
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
