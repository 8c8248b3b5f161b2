"""Locks, links, renames and syncs, on mounts that lack some of them."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any

from checkpoint_utils.names import is_temporary_name, temporary_name

try:
    import fcntl
except ImportError:  # not on this system: who writes a temporary file cannot be told there
    fcntl = None

logger = logging.getLogger(__name__)

LARGE_FILE_BYTES = 16 << 20
MOST_FREED_LATER = 64  # files of one folder: each is a descriptor


class held:
    """While open, marks a temporary file as being written by a living process (see `remove_stale_temporaries`)."""

    def __init__(self, path: str) -> None:
        self.path, self.fd = path, -1

    def __enter__(self) -> None:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        lock(self.fd)

    def __exit__(self, *_: Any) -> None:
        os.close(self.fd)


def lock(fd: int) -> bool:
    """Take the file's lock. False: another process holds it."""
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks on this mount
    return True


@contextlib.contextmanager
def freed_later(*paths: str) -> Iterator[None]:
    """While open, large files at `paths` may lose their names; their bytes are freed by a thread, which nobody waits for.

    Freeing a gigabyte takes a quarter of a second, which was most of the time that an asynchronous save blocked.
    """
    fds = []
    for path in paths[:MOST_FREED_LATER]:
        with contextlib.suppress(OSError):
            if os.stat(path).st_size >= LARGE_FILE_BYTES:
                fds.append(os.open(path, os.O_RDONLY))
    try:
        yield
    finally:
        if fds:
            threading.Thread(target=close_all, args=(fds,), name="freeing a file", daemon=True).start()


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        notice(f"{os.path.dirname(source)}: no hard links here ({error.strerror}); further names of a save are copies")
        shutil.copyfile(source, target)
        with open(target, "rb+") as copy:
            os.fsync(copy.fileno())


def sync_folder(folder: str) -> None:
    """Until its folder is on the disk, a power cut undoes a rename."""
    fd = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise
        notice(f"{folder}: this mount does not sync folders ({error.strerror}); a power cut may undo the newest save")
    finally:
        os.close(fd)


def make_folder(folder: str) -> None:
    """Make it and those above it that are missing, each on the disk under its name."""
    if not os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        sync_names(folder)


def sync_names(path: str) -> None:
    """Sync the folders above, up to the root of the mount: who made one of them may have been killed before he did it."""
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
        try:
            sync_folder(path)
        except PermissionError:
            return  # not ours, and older than the run


@functools.cache
def notice(text: str) -> None:
    """Log a warning once in the life of the process."""
    logger.warning("%s", text)


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass


def remove(path: str) -> None:
    """Remove a file, a link, or a folder, whose name is free before the first of its files is gone."""
    if os.path.islink(path) or not os.path.isdir(path):
        with freed_later(path):
            return unlink(path)
    folder, name = os.path.split(path)
    if not is_temporary_name(name) and not name.endswith(".old"):
        temporary = os.path.join(folder, temporary_name(name))
        os.rename(path, temporary)
        path = temporary
    with freed_later(*(entry.path for entry in os.scandir(path))):
        shutil.rmtree(path)


def free_name(path: str) -> str:
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = f"{path}-{number}"
    return free


def bytes_of(path: str) -> int:
    """The bytes of a file, or of all files of a folder."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(entry.stat().st_size for entry in os.scandir(path))


def move_to_free_name(path: str, target: str) -> str:
    stem, dot, suffix = target.rpartition(".pt") if ".pt" in os.path.basename(target) else (target, "", "")
    number = 1
    while os.path.lexists(target):
        number += 1
        target = f"{stem}-{number}{dot}{suffix}"
    os.rename(path, target)
    return target


def is_held(path: str) -> bool:
    """Whether a living process writes the temporary file or folder."""
    if os.path.islink(path):
        return False
    fd = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR)
    try:
        return not lock(fd)
    finally:
        os.close(fd)
