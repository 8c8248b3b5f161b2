"""A place for objects: what a URL may be, and each operation with its retries and its errors in plain words."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

from checkpoint_file import CheckpointError, CheckpointNotFoundError
from checkpoint_utils.object_store.retrying import with_retries

PIECE_BYTES = 8 << 20


class ObjectStoreError(CheckpointError):
    """The store refuses, or does not answer. `problem` says what was tried, and names no credentials."""


def open_store() -> Store:
    """The store that URLs lead to, with what the environment says of it. Raises: ObjectStoreError without credentials."""
    from checkpoint_utils.object_store import s3

    if not s3.has_credentials():
        raise ObjectStoreError("s3://", f"the environment has no credentials: set one of {', '.join(s3.IDENTITIES)}")
    return Store(*s3.path_manager(), s3)


class Store:
    """Objects by URL, through a PathManager. Every call waits out what passes by itself; all raise ObjectStoreError."""

    def __init__(self, files: Any, handler: Any, terms: Any) -> None:
        self._files, self._handler = files, handler
        self._passes, self._is_missing, self._words = terms.passes_by_itself, terms.is_missing, terms.words_of

    def read(self, url: str) -> bytes | None:
        """The whole of a small object, None if there is none."""
        try:
            return self._do("reading", url, lambda: self._read(url))
        except CheckpointNotFoundError:
            return None

    def _read(self, url: str) -> bytes:
        with self._files.open(url, "rb") as file:
            return file.read()

    def upload(self, path: str, url: str) -> None:
        """The file becomes the object, whole or not at all."""
        self._do("writing", url, lambda: self._files.copy_from_local(path, url, overwrite=True))

    def download(self, url: str, path: str) -> int:
        """Write the object to the new file `path`, on the disk. Returns the CRC-32 of what came."""
        return self._do("reading", url, lambda: self._download(url, path))

    def _download(self, url: str, path: str) -> int:
        crc = 0
        with self._files.open(url, "rb") as source, open(path, "wb") as target:
            while piece := source.read(PIECE_BYTES):
                crc = zlib.crc32(piece, crc)
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
        return crc

    def list(self, url: str) -> list[str]:
        return self._do("listing", url, lambda: self._files.ls(url))

    def remove(self, url: str) -> None:
        self._do("removing", url, lambda: self._files.rm(url))

    def abort_uploads(self, url: str, of: Callable[[str], bool]) -> None:
        """Throw away the parts of unfinished uploads below `url`, those whose URL `of` takes."""
        self._do("clearing", url, lambda: self._handler.abort_uploads(url, of))

    def _do(self, doing: str, url: str, do: Callable[[], Any]) -> Any:
        try:
            return with_retries(do, f"{doing} {url}", self._passes)
        except OSError as error:
            if not self._passes(error):
                raise  # of this machine's disk
            raise ObjectStoreError(url, f"{doing} it failed: {self._words(error)}") from error
        except Exception as error:
            if self._is_missing(error):
                raise CheckpointNotFoundError(url, "there is no such object") from error
            raise ObjectStoreError(url, f"{doing} it failed: {self._words(error)}") from error


def crc_of(path: str) -> int:
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            crc = zlib.crc32(piece, crc)
    return crc
