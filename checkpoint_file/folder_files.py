"""The files of a checkpoint that is a folder: opened when they are first read, some of them at a time.

Must not know: what is in them.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import zipfile
from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor

from checkpoint_file.archive import Place, crc32
from checkpoint_file.dcp_metadata import StoredChunk
from checkpoint_file.errors import CheckpointDamagedError
from checkpoint_file.limits import MAX_DIRECTORY_BYTES, open_regular
from checkpoint_file.sources import map_file

MAX_OPEN = 64  # a folder may have thousands of files, a process often no more than 1024 descriptors


class Files:
    """The files of the folder `path`. Several threads may read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._users: dict[str, int] = defaultdict(int)
        self._maps: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """The descriptor of a file, open as long as this is. Raises: CheckpointDamagedError where there is none."""
        with self._lock:
            if name not in self._fds:
                self._make_room()
                self._fds[name] = self._open(name)
            self._users[name] += 1
        try:
            yield self._fds[name]
        finally:
            with self._lock:
                self._users[name] -= 1

    def _open(self, name: str) -> int:
        try:
            return open_regular(os.path.join(self.path, name))
        except FileNotFoundError as error:
            raise CheckpointDamagedError(self.path, f"its part {name} is missing", name) from error

    def _make_room(self) -> None:
        for name in [name for name in self._fds if not self._users[name]][: len(self._fds) - MAX_OPEN + 1]:
            os.close(self._fds.pop(name))

    def mapped(self, name: str) -> Tensor:
        """uint8, the whole file."""
        with self.opened(name) as fd, self._lock:
            if name not in self._maps:
                while len(self._maps) >= MAX_OPEN:
                    del self._maps[next(iter(self._maps))]  # a map holds a descriptor too
                self._maps[name] = map_file(fd)
            return self._maps[name]

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        with self.opened(name) as fd:
            if offset + nbytes > os.fstat(fd).st_size:  # before room is made for what it claims
                raise CheckpointDamagedError(self.path, f"its part {name} ends too early", name)
            data, filled = bytearray(nbytes), 0
            while filled < nbytes:
                count = os.preadv(fd, [memoryview(data)[filled:]], offset + filled)
                if count == 0:
                    raise CheckpointDamagedError(self.path, f"its part {name} ends too early", name)
                filled += count
        return bytes(data)

    def checked(self, name: str, place: Place) -> bytes:
        data = self.read(name, place.offset, place.nbytes)
        if crc32(data) != place.crc:
            raise damaged(self.path, name)
        return data

    def close(self) -> None:
        self._maps = {}
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
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
        if nbytes > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a directory of more than {MAX_DIRECTORY_BYTES:,} bytes")
        data = self._files.read(self._part.file, self._part.offset + self._position, nbytes)
        self._position += nbytes
        return data
