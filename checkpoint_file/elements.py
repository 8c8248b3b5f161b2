"""The elements of one tensor of an open checkpoint, in bounded pieces and in row-major order, for whoever looks at a
file without loading it. Bytes are checked on their way. One process. Must not know: what the values are wanted for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from checkpoint_file import archive
from checkpoint_file.archive import NO_CHECKSUM, crc32
from checkpoint_file.boxes import Box, range_of_box, row_major_stride
from checkpoint_file.errors import CheckpointDamagedError
from checkpoint_file.nests import ShardedTensor, flat_pieces
from checkpoint_file.skeleton import TensorRef
from checkpoint_file.verifying import record_problems

COPIED_BYTES = 16 << 20  # pieces of a reader that offers no bytes of its own, only `copy`


class ElementReader:
    """Gives the elements of an open checkpoint's tensors, whatever kind of reader it was opened by."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._checked: set[str] = set()  # records of which every byte has been compared with the checksum

    def pieces(self, ref: TensorRef, begin: int = 0, end: int | None = None) -> Iterator[Tensor]:
        """The elements [begin, end) of the tensor, flat, a few MiB at a time; each piece is valid until the next.

        Raises: CheckpointDamagedError, at the latest behind the last piece, if bytes have changed.
        """
        end = ref.shape.numel() if end is None else end
        if begin >= end:
            return
        source = getattr(self._reader, "_source", None)
        if not hasattr(source, "places"):
            yield from self._copied(ref, begin, end)
        elif ref._chunks:
            yield from self._boxes(ref, begin, end)
        elif _lies_in_a_row(ref):
            yield from self._in_a_row(source, ref, begin, end)
        else:
            yield from self._strided(source, ref, begin, end)

    def _in_a_row(self, source: Any, ref: TensorRef, begin: int, end: int) -> Iterator[Tensor]:
        size, place, checksum = ref.dtype.itemsize, source.places[ref._record], 0
        whole = ref._offset == 0 and (begin, end * size) == (0, place.nbytes) and ref._record not in self._checked
        if not whole:
            self._check_record(source, ref)
        step = max(1, archive.CHUNK_BYTES // size) * size
        first, last = ref._offset + begin * size, ref._offset + end * size
        for low in range(first, last, step):
            data = source.read(ref._record, low, min(low + step, last))
            if whole:
                checksum = crc32(data.numpy(), checksum)
            yield data.view(ref.dtype)
        if whole and place.crc not in (NO_CHECKSUM, checksum):
            raise _damaged(self._reader.path, ref._record)
        self._checked.add(ref._record)

    def _boxes(self, ref: TensorRef, begin: int, end: int) -> Iterator[Tensor]:
        """Of a tensor that lies in several records: one after the other where each holds a range of the whole."""
        ranges = []
        for offsets, chunk in ref._chunks:
            box = Box(offsets, tuple(chunk.shape))
            first, last = range_of_box(box, row_major_stride(ref.shape))
            if last - first != box.numel:
                yield from self._copied(ref, begin, end)
                return
            ranges.append((first, last, chunk))
        for first, last, chunk in sorted(ranges, key=lambda one: one[0]):
            yield from self.pieces(chunk, max(begin - first, 0), min(end, last) - first)

    def _strided(self, source: Any, ref: TensorRef, begin: int, end: int) -> Iterator[Tensor]:
        self._check_record(source, ref)
        stored, step = source.stored(ref), max(1, archive.CHUNK_BYTES // ref.dtype.itemsize)
        for low in range(begin, end, step):
            yield torch.cat([piece.reshape(-1) for piece in flat_pieces(stored, low, min(low + step, end))])

    def _check_record(self, source: Any, ref: TensorRef) -> None:
        """Of a record of which a part is asked for, every byte is compared with the checksum, once."""
        place = source.places[ref._record]
        if ref._record in self._checked or place.crc == NO_CHECKSUM:
            return
        if record_problems(source, place):
            raise _damaged(self._reader.path, ref._record)
        self._checked.add(ref._record)

    def _copied(self, ref: TensorRef, begin: int, end: int) -> Iterator[Tensor]:
        stride, step = row_major_stride(ref.shape), max(1, COPIED_BYTES // ref.dtype.itemsize)
        for low in range(begin, end, step):
            piece = torch.empty(min(step, end - low), dtype=ref.dtype)
            self._reader.copy([(ref, ShardedTensor(ref.dtype, ref.shape, stride, ((low, piece),)))])
            yield piece


def _lies_in_a_row(ref: TensorRef) -> bool:
    return all(a == b for a, b, size in zip(ref._stride, row_major_stride(ref.shape), ref.shape) if size > 1)


def _damaged(path: str, record: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(path, f"record {record} does not have the checksum it was written with", record)
