"""Writing, by all ranks of a group at once: `torch.save` lays down a valid file with room for every record, each rank
writes its share of the bytes at their offsets, and the CRC-32 of each record is put where a zip keeps it.

    open_writer   collective: plans are compared, rank 0 lays down the file, all learn where the records are
    write         this rank's share, checksums, fsync. Talks to nobody: a thread can do it, after `copy_share`
    finish        collective: shares of ranks that do not see the file, checksums, fsync
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import numpy as np
import torch
from torch import Tensor

import distributed_utils
from checkpoint_file import archive, streaming
from checkpoint_file.archive import Place, crc32, crc32_combine, patch_checksums, read_directory, write_all
from checkpoint_file.errors import CheckpointError, CheckpointWriteError, decided_by_rank_0
from checkpoint_file.nests import flat_pieces
from checkpoint_file.planning import FilePlan, plan_file
from checkpoint_file.shares import CUT_BYTES, compare_plans, share_out

# As `row_bytes`: (parts of a record, begin, end) to its bytes [begin, end) in chunks, each valid until the next.
Supply = Callable[[list[tuple[int, Tensor]], int, int], Iterator[memoryview]]
Directory = tuple[dict[str, Place], int]  # where the records lie, and the offset of the zip's own directory


def write_checkpoint_file(state: dict[str, Any], path: str | os.PathLike, group: Any = None) -> int:
    """Write `state` to exactly `path`, flushed to the disk, and return the number of bytes. All ranks call it.

    state: its tensors are equal on all ranks, its ShardedTensors have each element on one rank; other values are rank
    0's. Nothing larger than 16 MiB is copied in memory. A view of a large base costs the bytes of the view, an expanded
    tensor those of its distinct elements; tensors that share memory share it in the file, and so do the places of one
    ShardedTensor. A rank that does not see the folder of rank 0 sends its share to rank 0.

    Raises: on all ranks, with the rank that found it, UnsavableValueError before a byte is written;
        CheckpointWriteError, leaving what was written so far.
    """
    with open_writer(state, path, group) as writer:
        writer.write()
        return writer.finish()


@dataclass(frozen=True)
class Layout:
    """The file as rank 0 laid it down; `offsets` are those of the planned records, int64 in bytes."""

    nbytes: int
    inode: int
    pickle_place: tuple[int, int]  # offset, bytes
    pickle_crc: int
    offsets: bytes


class ShareWriter:
    """What one rank writes of a checkpoint: ranges of bytes of records, each at a place of its own in one file.

    Its own step is `write`, which talks to nobody: a thread can do it, after `copy_share`. What is collective, before
    and after, is that of a file or of a folder.
    """

    def __init__(
        self, path: str, parts: list[list[tuple[int, Tensor]]], rows: np.ndarray, offsets: np.ndarray, group: Any
    ) -> None:
        """parts: flat tensors of each record, with their first bytes. rows: (record, first byte, end), int64 [n, 3].

        offsets: int64 [n], where each row lies in the file.
        """
        self.path, self.error = path, None
        self._group, self._rank = group, distributed_utils.get_rank(group)
        self._parts, self._rows, self._row_offsets = parts, rows, offsets
        self._checksums = np.zeros(len(rows), dtype=np.int64)
        self._cancelled = False
        self._fd: int | None = None

    @property
    def own_bytes(self) -> int:
        """What this rank writes of the tensors."""
        return int((self._rows[:, 2] - self._rows[:, 1]).sum())

    def copy_share(self, room: Callable[[int, bool], Tensor]) -> None:
        """Copy this rank's share into `room(nbytes, pinned)`: from then on the state may change.

        pinned: something of it lies on an accelerator.
        """
        spans = (self._rows[:, 2] - self._rows[:, 1] + CUT_BYTES - 1) // CUT_BYTES * CUT_BYTES
        devices = {part.device for index in self._rows[:, 0].tolist() for _, part in self._parts[index]}
        memory = room(int(spans.sum()), any(device.type != "cpu" for device in devices))
        parts: list[list[tuple[int, Tensor]]] = [[] for _ in self._parts]
        targets, sources, at = [], [], 0
        for (index, begin, end), span in zip(self._rows.tolist(), spans.tolist()):
            copy = memory[at : at + end - begin]
            parts[index].append((begin, copy))
            for piece in row_pieces(self._parts[index], begin, end):
                nbytes = piece.numel() * piece.element_size()
                targets.append(copy[:nbytes].view(piece.dtype).view(piece.shape))
                sources.append(piece)
                copy = copy[nbytes:]
            at += span
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._parts = parts

    def cancel(self) -> None:
        """Have `write` end after its current chunk; the file will not be finished."""
        self._cancelled = True

    def write(self, supply: Supply | None = None) -> None:
        """Write this rank's share and flush it; what goes wrong is raised by `finish`, on all ranks.

        supply: gives the bytes of a record where the state has stand-ins for its tensors, that nobody has filled.
        """
        if self._fd is None:
            return
        try:
            self._write_rows(supply or row_bytes)
            if not self._cancelled:
                self._write_rest()
            os.fsync(self._fd)
        except Exception as error:  # whatever it is, the other ranks wait in `finish`
            self.error = error

    def _write_rows(self, supply: Supply) -> None:
        for at, (index, begin, end) in enumerate(self._rows.tolist()):
            offset, checksum = int(self._row_offsets[at]), 0
            for data in supply(self._parts[index], begin, end):
                if self._cancelled:
                    return
                checksum = crc32(data, checksum)
                write_all(self._fd, data, offset)
                offset += len(data)
            self._checksums[at] = checksum

    def _write_rest(self) -> None:
        """Write what this rank has beside its rows, whose checksums are known."""

    def _described(self, error: Exception | None) -> Exception | None:
        return write_error(self.path, error, self.own_bytes) if isinstance(error, OSError) else error

    def close(self) -> None:
        """Let go of the file and of the state's tensors."""
        self._parts = []
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> ShareWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class CheckpointWriter(ShareWriter):
    """One file on its way to the disk. Made by `open_writer`; the rank's own step is `write`."""

    def __init__(
        self, path: str, plan: FilePlan, layout: Layout, directory: Directory, shares: list[np.ndarray], group: Any
    ) -> None:
        rows = shares[distributed_utils.get_rank(group)]
        self._offsets = np.frombuffer(layout.offsets, dtype=np.int64)
        offsets = self._offsets[rows[:, 0]] + rows[:, 1]
        super().__init__(path, [record.parts for record in plan.records], rows, offsets, group)
        self.nbytes, self._directory, self._shares = layout.nbytes, directory, shares
        self._names = [record.name for record in plan.records]
        self._sizes = [record.nbytes for record in plan.records]
        self._fd = self._look(layout)

    def _look(self, layout: Layout) -> int | None:
        """The file, open, if this rank sees the one that rank 0 laid down."""
        fd = None
        try:
            fd = os.open(self.path, os.O_RDWR)
            offset, nbytes = layout.pickle_place
            stat = os.fstat(fd)
            same = (stat.st_size, stat.st_ino) == (layout.nbytes, layout.inode)
            if same and crc32(os.pread(fd, nbytes, offset)) == layout.pickle_crc:
                return fd
            self.error = (
                CheckpointWriteError(self.path, "another file has taken its place") if self._rank == 0 else None
            )
        except OSError as error:  # as good as another folder, except on rank 0
            self.error = error if self._rank == 0 else None
        if fd is not None:
            os.close(fd)
        return None

    def finish(self) -> int:
        """Collective: make the file whole. Returns its size. Raises: what failed on any rank in any step."""
        sees = self._fd is not None
        found = [np.column_stack((self._rows, self._checksums))] if sees else []

        def decide(told: list[tuple[bool, bytes]]) -> list[int]:
            blind = [rank for rank, (sees, _) in enumerate(told) if not sees]
            return blind or self._seal([rows for _, rows in told])

        own = sees, as_bytes(found)
        blind = decided_by_rank_0(self._described(self.error), own, decide, self._group)
        if blind:
            try:
                found += self._stream(blind)
            except Exception as error:  # agreed right below
                self.error = error
            decided_by_rank_0(self._described(self.error), as_bytes(found), self._seal, self._group)
        return self.nbytes

    def _stream(self, blind: list[int]) -> list[np.ndarray]:
        """Rank 0 writes the shares of the ranks that do not see the file; returns their rows with checksums."""
        if self._rank != 0:
            if self._rank in blind:
                chunks = (d for i, begin, end in self._rows.tolist() for d in row_bytes(self._parts[i], begin, end))
                streaming.send(chunks, self.own_bytes, self._group)
            return []
        found: list[np.ndarray] = []
        for rank in blind:
            rows = self._shares[rank]
            checksums = np.zeros(len(rows), dtype=np.int64)
            writing = self._write_received(rows, checksums)
            next(writing)
            try:
                nbytes = int((rows[:, 2] - rows[:, 1]).sum())
                streaming.receive(rank, nbytes, writing.send, self._group, refused=self.error is not None)
            except Exception as error:  # the ranks behind this one are told to stop
                self.error = self.error or error
            found.append(np.column_stack((rows, checksums)))
        if self.error is None:
            os.fsync(self._fd)
        return found

    def _write_received(self, rows: np.ndarray, checksums: np.ndarray) -> Iterator[None]:
        """Takes the bytes of the rows, by `send`, cut anywhere."""
        data = yield
        for at, (index, begin, end) in enumerate(rows.tolist()):
            while begin < end:
                if not data:
                    data = yield
                piece, data = data[: end - begin], data[end - begin :]
                checksums[at] = crc32(piece, int(checksums[at]))
                write_all(self._fd, piece, int(self._offsets[index]) + begin)
                begin += len(piece)
        yield

    def _seal(self, told: list[bytes]) -> list[int]:
        """Rank 0: combine the checksums of all rows and put them where the zip keeps them. Nobody is blind then."""
        try:
            self._patch(np.frombuffer(b"".join(told), dtype=np.int64).reshape(-1, 4))
            os.fsync(self._fd)
        except OSError as error:
            raise self._described(error) from error
        return []

    def _patch(self, rows: np.ndarray) -> None:
        places, directory_offset = self._directory
        checksums = {place.name: place.crc for place in places.values()}
        ends = dict.fromkeys(range(len(self._names)), 0)
        for index, begin, end, checksum in rows[np.lexsort((rows[:, 1], rows[:, 0]))].tolist():
            name = self._names[index]
            assert begin == ends[index], (name, begin, ends[index])
            checksums[name] = crc32_combine(checksums[name], checksum, end - begin) if begin else checksum
            ends[index] = end
        assert list(ends.values()) == self._sizes, "a byte of a record was given to no rank"
        patch_checksums(self._fd, places, directory_offset, checksums)

    def _described(self, error: Exception | None) -> Exception | None:
        return write_error(self.path, error, sum(self._sizes)) if isinstance(error, OSError) else error


def open_writer(state: dict[str, Any], path: str | os.PathLike, group: Any = None) -> CheckpointWriter:
    """Collective: plan the file and lay it down under `path`. Raises: as `write_checkpoint_file`."""
    path = os.fspath(path)
    plan, error = None, None
    try:
        plan = plan_file(state, path)
    except Exception as problem:  # agreed by all ranks right below
        error = problem
    directories: list[Directory] = []

    def then() -> dict[str, Any]:
        try:
            layout, directory = lay_down(plan, path)
        except OSError as problem:
            raise write_error(path, problem, plan.nbytes) from problem
        directories.append(directory)
        return vars(layout)

    pieces_of, layout = compare_plans(plan, error, path, group, then)
    plan.skeleton, layout = {}, Layout(**layout)
    directory = directories[0] if directories else ({}, 0)
    shares = share_out(plan, np.frombuffer(layout.offsets, dtype=np.int64), pieces_of)
    return CheckpointWriter(path, plan, layout, directory, shares, group)


def as_bytes(rows: list[np.ndarray]) -> bytes:
    return np.concatenate(rows).tobytes() if rows else b""


def lay_down(plan: FilePlan, path: str) -> tuple[Layout, Directory]:
    """Write a complete, valid file around room for the records."""
    with open(path, "wb") as file, torch.serialization.skip_data():
        torch.save(plan.skeleton, file)
    fd = os.open(path, os.O_RDONLY)
    try:
        places, directory_offset = read_directory(fd, path)
        stat, pickle = os.fstat(fd), places["data.pkl"]
        offsets = [checked_offset(places[record.name], record.nbytes) for record in plan.records]
        layout = Layout(
            nbytes=stat.st_size,
            inode=stat.st_ino,
            pickle_place=(pickle.offset, pickle.nbytes),
            pickle_crc=crc32(os.pread(fd, pickle.nbytes, pickle.offset)),
            offsets=np.array(offsets, dtype=np.int64).tobytes(),
        )
        return layout, (places, directory_offset)
    finally:
        os.close(fd)


def checked_offset(place: Place, nbytes: int) -> int:
    assert place.nbytes == nbytes, (place, nbytes)
    return place.offset


def write_error(path: str, error: OSError, nbytes: int) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    made = CheckpointWriteError(path, f"{error.strerror or error} (writing {nbytes:,} bytes of tensors)")
    made.__cause__ = error
    return made


def row_pieces(parts: list[tuple[int, Tensor]], begin: int, end: int) -> Iterator[Tensor]:
    """Views that, flattened and put one after another, are the bytes [begin, end) of a record."""
    for start, part in parts:
        size = part.element_size()
        low, high = max(begin - start, 0) // size, min(end - start, part.numel() * size) // size
        yield from flat_pieces(part, low, high)


def row_bytes(parts: list[tuple[int, Tensor]], begin: int, end: int) -> Iterator[memoryview]:
    """The bytes [begin, end) of a record, in chunks; each is valid until the next is asked for."""
    for start, part in parts:
        size = part.element_size()
        low, high = max(begin - start, 0) // size, min(end - start, part.numel() * size) // size
        step = max(1, archive.CHUNK_BYTES // size)
        for first in range(low, high, step):
            for piece in flat_pieces(part, first, min(first + step, high)):
                yield memoryview(row_major_bytes(piece).numpy())


def row_major_bytes(piece: Tensor) -> Tensor:
    """uint8 [nbytes] on the CPU: the bytes themselves where they lie in a row there, else a copy."""
    if piece.device.type == "cpu" and piece.is_contiguous() and not piece.is_conj() and not piece.is_neg():
        return piece.as_strided((piece.numel(),), (1,)).view(torch.uint8)  # a lone element may have any stride
    data = torch.empty(piece.numel() * piece.element_size(), dtype=torch.uint8, device="cpu")
    data.view(piece.dtype).view(piece.shape).copy_(piece)
    return data
