"""A layer between this process and its disk: each call that changes something under a folder passes through a function.

    with seen(root, around):     around(call, do): `do()` performs the call; a write is cut short by `do(nbytes)`

So a test counts calls, records them, fails them with an error of its choice, or ends the process before, in the middle
of or after any of them. It sees what Python does, with `os`, `open`, `pathlib` and `shutil`; what a library writes from
C it does not see; strace does (tests/power_cut.py).
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Call:
    """kind: create, write, truncate, fsync, rename, link, symlink, unlink, mkdir or rmdir.

    path: absolute, as the system names it. target: of rename and link the new name, of symlink what it points to.
    size: of truncate. data and offset: of write; -1 is the end of the file.
    """

    kind: str
    path: str
    target: str = ""
    data: bytes = b""
    offset: int = -1
    size: int = 0


Around = Callable[[Call, Callable[..., Any]], Any]


@contextlib.contextmanager
def seen(root: str | os.PathLike, around: Around) -> Iterator[None]:
    """While open, calls below `root` go through `around`, one at a time."""
    layer = _Layer(os.path.realpath(root), around)
    replaced = [(os, name, getattr(os, name)) for name in layer.NAMES]
    replaced += [(builtins, "open", builtins.open), (io, "open", io.open)]
    for module, name, _ in replaced:
        setattr(module, name, getattr(layer, f"{'file_' if module is not os else ''}{name}"))
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


class _Layer:
    NAMES = (
        "open write pwrite fsync fdatasync ftruncate truncate rename replace link symlink unlink remove mkdir rmdir sendfile"
    ).split()

    def __init__(self, root: str, around: Around) -> None:
        self._root, self._around = root, around
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in self.NAMES}
        self._real_open = io.open

    def _pass(self, call: Call, do: Callable[..., Any]) -> Any:
        if call.path != self._root and not call.path.startswith(self._root + "/"):
            return do()
        with self._lock:
            return self._around(call, do)

    def _path(self, path: Any, dir_fd: int | None = None) -> str:
        if isinstance(path, int):
            return self._of(path)
        folder = self._of(dir_fd) if dir_fd is not None else os.getcwd()
        parent, name = os.path.split(os.path.join(folder, os.fsdecode(path)))
        return os.path.join(os.path.realpath(parent), name)

    def _of(self, fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    # ---- descriptors

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        do = lambda: self._real["open"](path, flags, mode, dir_fd=dir_fd)  # noqa: E731
        full = self._path(path, dir_fd)
        exists = os.path.exists(full)
        if flags & os.O_CREAT and not exists:
            return self._pass(Call("create", full), do)
        if flags & os.O_TRUNC and exists:
            return self._pass(Call("truncate", full), do)
        return do()

    def write(self, fd, data):
        do = lambda n=None: self._real["write"](fd, memoryview(data).cast("B")[:n])  # noqa: E731
        return self._pass(Call("write", self._of(fd), data=bytes(data)), do)

    def pwrite(self, fd, data, offset):
        do = lambda n=None: self._real["pwrite"](fd, memoryview(data).cast("B")[:n], offset)  # noqa: E731
        return self._pass(Call("write", self._of(fd), data=bytes(data), offset=offset), do)

    def sendfile(self, out_fd, in_fd, offset, count, *args, **kwargs):
        data = os.pread(in_fd, count, offset)
        do = lambda n=None: self._real["sendfile"](out_fd, in_fd, offset, count if n is None else n)  # noqa: E731
        return self._pass(Call("write", self._of(out_fd), data=data, offset=os.lseek(out_fd, 0, os.SEEK_CUR)), do)

    def fsync(self, fd):
        number = fd if isinstance(fd, int) else fd.fileno()
        return self._pass(Call("fsync", self._of(number)), lambda: self._real["fsync"](fd))

    fdatasync = fsync

    def ftruncate(self, fd, length):
        call = Call("truncate", self._of(fd), size=length)
        return self._pass(call, lambda: self._real["ftruncate"](fd, length))

    def truncate(self, path, length):
        call = Call("truncate", self._path(path), size=length)
        return self._pass(call, lambda: self._real["truncate"](path, length))

    # ---- names

    def rename(self, src, dst, *, src_dir_fd=None, dst_dir_fd=None):
        call = Call("rename", self._path(src, src_dir_fd), self._path(dst, dst_dir_fd))
        return self._pass(call, lambda: self._real["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd))

    replace = rename

    def link(self, src, dst, **kwargs):
        return self._pass(
            Call("link", self._path(src), self._path(dst)), lambda: self._real["link"](src, dst, **kwargs)
        )

    def symlink(self, src, dst, *args, **kwargs):
        call = Call("symlink", self._path(dst), os.fsdecode(src))
        return self._pass(call, lambda: self._real["symlink"](src, dst, *args, **kwargs))

    def unlink(self, path, *, dir_fd=None):
        return self._pass(Call("unlink", self._path(path, dir_fd)), lambda: self._real["unlink"](path, dir_fd=dir_fd))

    remove = unlink

    def mkdir(self, path, mode=0o777, *, dir_fd=None):
        return self._pass(
            Call("mkdir", self._path(path, dir_fd)), lambda: self._real["mkdir"](path, mode, dir_fd=dir_fd)
        )

    def rmdir(self, path, *, dir_fd=None):
        return self._pass(Call("rmdir", self._path(path, dir_fd)), lambda: self._real["rmdir"](path, dir_fd=dir_fd))

    # ---- open()

    def file_open(
        self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None
    ):
        plain = isinstance(file, int) or opener is not None or not set(mode) & set("wax+")
        if plain or not self._is_below(file):
            return self._real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _SeenFile(self, file, mode.replace("t", "").replace("b", ""))
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        made = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return made
        text = io.TextIOWrapper(made, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode
        return text

    def _is_below(self, file: Any) -> bool:
        path = self._path(file)
        return path.startswith(self._root + "/")


class _SeenFile(io.FileIO):
    """What `open` gives, its changes passed through the layer."""

    def __init__(self, layer: _Layer, file: Any, mode: str) -> None:
        self._layer = layer
        self._appends = "a" in mode
        super().__init__(file, mode, opener=lambda path, flags: layer.open(path, flags, 0o666))

    def write(self, data):
        offset = -1 if self._appends else self.tell()
        call = Call("write", self._layer._of(self.fileno()), data=bytes(data), offset=offset)
        return self._layer._pass(call, lambda n=None: io.FileIO.write(self, memoryview(data).cast("B")[:n]))

    def truncate(self, size=None):
        size = self.tell() if size is None else size
        call = Call("truncate", self._layer._of(self.fileno()), size=size)
        return self._layer._pass(call, lambda: io.FileIO.truncate(self, size))
