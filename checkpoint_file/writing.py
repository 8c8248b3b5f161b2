"""Writing: `torch.save` lays down a valid file with room for every record, the bytes follow at their offsets, and
the CRC-32 of each record is put where a zip keeps it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from checkpoint_file import archive
from checkpoint_file.archive import Place, crc32, patch_checksums, read_directory, write_all
from checkpoint_file.errors import CheckpointWriteError
from checkpoint_file.nests import flat_pieces
from checkpoint_file.planning import PlannedRecord, plan_file


def write_checkpoint_file(state: dict[str, Any], path: str | os.PathLike) -> int:
    """Write `state` to exactly `path`, flushed to the disk, and return the number of bytes.

    One process. Nothing larger than archive.CHUNK_BYTES is copied in memory. A view of a large base costs the bytes of the
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
            staging = torch.empty(
                min(archive.CHUNK_BYTES, max((record.nbytes for record in records), default=0)), dtype=torch.uint8
            )
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


def write_record(fd: int, place: Place, record: PlannedRecord, staging: Tensor) -> int:
    """Write the record's bytes at their place; returns their CRC-32."""
    assert place.nbytes == record.nbytes, (place, record.nbytes)
    checksum = 0
    for start, part in record.parts:
        step = max(1, archive.CHUNK_BYTES // part.element_size())
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
