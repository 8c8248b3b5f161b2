"""Which kind of file lies under a path, seen by its bytes and never by its name."""

from __future__ import annotations

import os

from checkpoint_file.errors import CheckpointDamagedError, CheckpointError, NotACheckpointError, cannot_read
from checkpoint_file.joined import JoinedSource, contents_of_folder, files_of_index
from checkpoint_file.other_layouts import LegacySource, SafetensorsSource, looks_like_safetensors
from checkpoint_file.sources import FileSource, RecordSource, open_file


def open_source(path: str, read_method: str = "auto") -> RecordSource:
    """What reads the file, or the folder of files, under the path.

    Raises: CheckpointNotFoundError, NotACheckpointError saying what lies there, CheckpointDamagedError.
    """
    if os.path.isdir(path):
        return JoinedSource(path, contents_of_folder(path), lambda part: open_source(part, read_method), read_method)
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
        return FileSource(path, read_method)
    if start.startswith(b"\x80"):
        return LegacySource(path, read_method)
    if looks_like_safetensors(start, size):
        return SafetensorsSource(path, read_method)
    if start.lstrip()[:1] == b"{" and (files := files_of_index(path)) is not None:
        return JoinedSource(path, files, lambda part: open_source(part, read_method), read_method)
    raise what_else(path, size, start)


def what_else(path: str, size: int, start: bytes) -> CheckpointError:
    if not any(start):
        return CheckpointDamagedError(path, f"begins with zeros ({size:,} bytes): it was never written to the disk")
    if start[8:9] == b"{":
        return CheckpointDamagedError(path, "looks like safetensors, but ends within its header")
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start):
        return NotACheckpointError(path, f"is a text file; it begins with {start[:24].decode()!r}")
    return NotACheckpointError(path, f"is no file of torch.save; it begins with the bytes {start[:8].hex(' ')}")
