"""The zip around the records: where each lies, and where its CRC-32 stands."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import dataclass

from isal.isal_zlib import crc32, crc32_combine  # 13 GB/s; zlib's own: 2 GB/s

from checkpoint_file.errors import CheckpointDamagedError, NotACheckpointError, cannot_read
from checkpoint_file.limits import MAX_DIRECTORY_BYTES

__all__ = [
    "CHUNK_BYTES",
    "NO_CHECKSUM",
    "Place",
    "crc32",
    "crc32_combine",
    "patch_checksums",
    "read_directory",
    "write_all",
]

CHUNK_BYTES = 512 << 10  # bytes that are read, checked and copied at a time: they fit into a processor's own cache
NO_CHECKSUM = -1  # of a record in a file that keeps none


def write_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def patch_checksums(fd: int, places: dict[str, Place], directory_offset: int, checksums: dict[str, int]) -> None:
    """Put the checksums where a zip keeps them: behind each record's bytes and in the central directory."""
    directory = bytearray(os.pread(fd, os.fstat(fd).st_size - directory_offset, directory_offset))
    for place in places.values():
        packed = struct.pack("<I", checksums[place.name])
        struct.pack_into("<I", directory, place.entry_offset - directory_offset + 16, checksums[place.name])
        if place.nbytes and place.crc != checksums[place.name]:  # an empty record has no descriptor behind it
            write_all(fd, packed, place.offset + place.nbytes + 4)
    write_all(fd, bytes(directory), directory_offset)


@dataclass(frozen=True)
class Place:
    """Where one record lies: the offset of its first byte, its size and CRC-32, the offset of its directory entry."""

    name: str
    offset: int
    nbytes: int
    crc: int
    entry_offset: int = 0


def read_directory(fd: int, path: str) -> tuple[dict[str, Place], int]:
    """The records by name (without the archive's prefix), as they lie, and the offset of the central directory.

    Raises: CheckpointDamagedError if directory and records contradict each other or reach beyond the file.
    """
    size = os.fstat(fd).st_size
    try:
        with DirectoryFile(os.dup(fd)) as file, zipfile.ZipFile(file) as archive:
            entries, directory_offset = archive.infolist(), archive.start_dir
    except OSError as error:
        raise cannot_read(path, error) from error
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError, IndexError) as error:
        raise CheckpointDamagedError(path, "truncated or damaged: it has no readable directory of records") from error
    prefix = next((e.filename[: -len("data.pkl")] for e in entries if e.filename.endswith("/data.pkl")), None)
    if prefix is None:
        raise NotACheckpointError(path, f"a zip archive without the record data.pkl ({len(entries)} entries)")
    check_apart(entries, path)
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
    return dict(sorted(places.items(), key=lambda item: item[1].offset)), directory_offset


class DirectoryFile(io.FileIO):
    """A file of which no more is read at once than a directory may have, whatever size it claims."""

    def read(self, nbytes: int = -1) -> bytes:
        data = super().read(min(nbytes, MAX_DIRECTORY_BYTES + 1) if nbytes >= 0 else MAX_DIRECTORY_BYTES + 1)
        if len(data) > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a directory of more than {MAX_DIRECTORY_BYTES:,} bytes")
        return data


def check_apart(entries: list[zipfile.ZipInfo], path: str) -> None:
    """No byte belongs to two records: a file that says otherwise would grow when it is read."""
    end, owner = 0, ""
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        name = entry.filename.partition("/")[2]
        if entry.header_offset < end:
            raise CheckpointDamagedError(path, f"the records {owner!r} and {name!r} lie in the same bytes", name)
        end, owner = entry.header_offset + 30 + len(entry.filename) + entry.file_size, name


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
