"""Who checks which bytes of the records that a load reads, and what comes out.

Every byte of a record of which anything is read is checked by exactly one rank, one that reads it anyway where there
is one. Knows nothing of tensors, reads nothing and sends nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from checkpoint_file.archive import NO_CHECKSUM, Place, crc32_combine
from checkpoint_file.errors import CheckpointDamagedError
from checkpoint_file.filling import Interval

SLICE_BYTES = 4 << 20  # by which bytes that several ranks read are shared out


def share_out(
    nbytes: int, needs: Sequence[list[Interval]], loads: list[int], for_gaps: Sequence[int]
) -> list[list[Interval]]:
    """Which bytes of a record of `nbytes` each reader checks: together all, each once.

    needs: ascending, apart, the bytes that each reader reads. Bytes that several read go to the one with the smallest
    of `loads`, which counts bytes and is kept up; bytes that nobody reads go to one of `for_gaps` in the same way.
    """
    spans = sorted((begin, end, reader) for reader, own in enumerate(needs) for begin, end in own)
    if [begin for begin, _, _ in spans] + [nbytes] == [0] + [end for _, end, _ in spans]:  # each byte has its reader
        for begin, end, reader in spans:
            loads[reader] += end - begin
        return list(needs)
    edges = [(at, reader, True) for reader, own in enumerate(needs) for at, _ in own]
    edges += [(at, reader, False) for reader, own in enumerate(needs) for _, at in own]
    slices: list[list[Interval]] = [[] for _ in needs]
    reading: set[int] = set()
    position = 0
    for edge, reader, begins in [*sorted(edges), (nbytes, -1, False)]:
        while position < edge:
            end = min(edge, position + SLICE_BYTES)
            taker = min(reading or for_gaps, key=lambda one: (loads[one], one))
            loads[taker] += end - position
            if slices[taker] and slices[taker][-1][1] == position:
                slices[taker][-1] = (slices[taker][-1][0], end)
            else:
                slices[taker].append((position, end))
            position = end
        (reading.add if begins else reading.discard)(reader)
    return slices


def marked(slices: list[Interval], begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """The bytes [begin, end) of a record, cut where one of `slices` begins or ends, and whether it is of them."""
    at = max(0, bisect_right(slices, (begin,)) - 1)
    while begin < end:
        while at < len(slices) and slices[at][1] <= begin:
            at += 1
        first, last = slices[at] if at < len(slices) else (end, end)
        stop = min(end, last if first <= begin else first)
        yield begin, stop, first <= begin < last
        begin = stop


def changed_record(path: str, record: str, owners: str) -> CheckpointDamagedError:
    """owners: the names of the tensors in it, empty where it has none or is named after one."""
    of = f" ({owners})" if owners and not record.startswith(owners) else ""
    problem = f"record {record}{of} does not have the checksum it was written with: bytes of it have changed"
    return CheckpointDamagedError(path, problem, record)


class Checksums:
    """The CRC-32 of slices of records. A record of which all slices are there is compared at once.

    Raises: CheckpointDamagedError, naming file and record.
    """

    def __init__(
        self, path: str, places: dict[str, Place], names: list[str], owners: Callable[[str], str] = lambda record: ""
    ) -> None:
        self._path, self._places, self._owners = path, places, owners
        self._names = [name for name in names if places[name].crc != NO_CHECKSUM]
        self._parts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self._missing = {name: places[name].nbytes for name in self._names}

    def add(self, name: str, parts: list[tuple[int, int, int]]) -> None:
        """Take (begin, end, CRC-32) of ranges of a record, each range once, in any order."""
        known = self._parts[name]
        for begin, end, crc in parts:
            if known and known[-1][1] == begin:
                known[-1] = (known[-1][0], end, crc32_combine(known[-1][2], crc, end - begin))
            else:
                known.append((begin, end, crc))
            self._count(name, end - begin)

    def _count(self, name: str, nbytes: int) -> None:
        self._missing[name] -= nbytes
        if self._missing[name] == 0:
            self._compare(name)

    def _compare(self, name: str) -> None:
        position = checksum = 0
        for begin, end, crc in sorted(self._parts.pop(name)):
            assert begin == position, (name, begin, position)
            checksum, position = crc32_combine(checksum, crc, end - begin), end
        assert position == self._places[name].nbytes, (name, position)
        if checksum != self._places[name].crc:
            raise changed_record(self._path, name, self._owners(name))

    def parts(self) -> bytes:
        """The slices of records that this reader has not checked alone, for `merge`."""
        number = {name: position for position, name in enumerate(self._names)}
        rows = [(number[name], *part) for name, parts in self._parts.items() for part in parts]
        return np.array(rows, dtype=np.int64).tobytes()

    def merge(self, others: list[bytes]) -> None:
        """Take in what the other readers checked; all records must then have been compared on some rank.

        Every rank compares the same records in the same order, so that all raise the same error.
        """
        rows = np.concatenate([np.frombuffer(one, dtype=np.int64).reshape(-1, 4) for one in others])
        parts = defaultdict(list)
        for number, begin, end, crc in rows[np.argsort(rows[:, 0], kind="stable")].tolist():
            parts[self._names[number]].append((begin, end, crc))
        self._parts = parts
        for name in list(parts):
            self._compare(name)
