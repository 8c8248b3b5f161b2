"""Who writes which bytes of a file. Every rank answers alike, without asking the others again.

Owns: the comparison of the ranks' plans, and the sharing out of what all of them hold. A row is (index of the record,
first byte, end); the rows of all ranks together are every byte of every record once.
Must not know: files, how bytes travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

import distributed_utils
from checkpoint_file.errors import UnsavableValueError, decided_by_rank_0
from checkpoint_file.planning import FilePlan

CUT_BYTES = 64  # a record is cut at multiples of this, so that no element is


def compare_plans(
    plan: FilePlan | None,
    error: Exception | None,
    path: str,
    group: Any,
    then: Callable[[], Any] = lambda: None,
) -> tuple[list[np.ndarray], Any]:
    """Collective. The pieces of every rank, after all plans were found alike and the pieces complete.

    then: what rank 0 does next, of which every rank gets the result, plain values.
    Raises: on all ranks `error` of any rank; UnsavableValueError for plans that differ or pieces that do not fit; what
        `then` raises.
    """
    digest, pieces = b"", b""
    if plan is not None:
        digest = hashlib.blake2b("\n".join(plan.lines).encode(), digest_size=16).digest()
        pieces = plan.pieces().tobytes()

    def decide(told: list[tuple[bytes, bytes]]) -> tuple[list[bytes], Any] | None:
        if len({digest for digest, _ in told}) > 1:
            return None
        check_pieces(plan, [pieces_in(pieces) for _, pieces in told], path)
        return [pieces for _, pieces in told], then()

    decided = decided_by_rank_0(error, (digest, pieces), decide, group)
    if decided is None:
        raise UnsavableValueError(path, first_difference(distributed_utils.all_gather_list(plan.lines, group)))
    return [pieces_in(pieces) for pieces in decided[0]], decided[1]


def pieces_in(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.int64).reshape(-1, 3)


def first_difference(lines_of: list[list[str]]) -> str:
    rank = next(rank for rank, lines in enumerate(lines_of) if lines != lines_of[0])
    expected, lines = lines_of[0], lines_of[rank]
    at = next((i for i, pair in enumerate(zip(expected, lines)) if pair[0] != pair[1]), min(len(expected), len(lines)))
    there, here = (one[at] if at < len(one) else "no further tensor" for one in (expected, lines))
    return f"the ranks would save different states: rank {rank} has {here}; rank 0 has {there}"


def check_pieces(plan: FilePlan, pieces_of: list[np.ndarray], path: str) -> None:
    """Raise UnsavableValueError unless the pieces of all ranks have every byte of the sharded records once."""
    rows = np.concatenate(pieces_of)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    bounds = np.searchsorted(rows[:, 0], np.arange(len(plan.records) + 1))
    for index, record in enumerate(plan.records):
        if not record.sharded:
            continue
        begins, ends = rows[bounds[index] : bounds[index + 1], 1:].T
        starts, stops = np.append(begins, record.nbytes), np.append(0, ends)  # each begins where the one before ended
        wrong = np.flatnonzero(starts != stops)
        if len(wrong):
            start, stop = (int(x[wrong[0]]) // record.itemsize for x in (starts, stops))
            how = "no rank has" if start > stop else "two ranks have"
            first, last = min(start, stop), max(start, stop)
            problem = f"{record.owner} is sharded, and {how} its elements from {first} to {last - 1}"
            raise UnsavableValueError(path, problem, record.name)


def share_out(plan: FilePlan, offsets: np.ndarray, pieces_of: list[np.ndarray]) -> list[np.ndarray]:
    """The rows of each rank, int64 [n, 3], in the order of the file.

    A rank writes its pieces; what all hold is cut, in the order of the file, so that bytes per rank are level.
    """
    whole = [int(i) for i in np.argsort(offsets, kind="stable") if not plan.records[i].sharded]
    starts = np.cumsum([0] + [plan.records[i].nbytes for i in whole])
    quotas = level_quotas([int((rows[:, 2] - rows[:, 1]).sum()) for rows in pieces_of], int(starts[-1]))
    shares, begin, taken = [], 0, 0.0
    for pieces, quota in zip(pieces_of, quotas):
        taken += quota
        end = int(starts[-1]) if len(shares) == len(quotas) - 1 else cut_near(taken, starts)
        rows = np.concatenate([pieces, rows_between(begin, end, whole, starts)])
        shares.append(rows[np.argsort(offsets[rows[:, 0]] + rows[:, 1], kind="stable")])
        begin = end
    return shares


def level_quotas(held: list[int], total: int) -> list[float]:
    """What each rank takes of `total` more bytes so that the one with the most has as little as possible."""
    below = sum(held)
    for count, most in zip(range(len(held), 0, -1), sorted(held, reverse=True)):
        level = (total + below) / count
        if level >= most:
            break
        below -= most
    return [max(0.0, level - own) for own in held]


def cut_near(position: float, starts: np.ndarray) -> int:
    """The last place at or before `position` at which a record may be cut; `starts` are where records begin."""
    if position >= starts[-1]:
        return int(starts[-1])
    start = int(starts[np.searchsorted(starts, position, side="right") - 1])
    return start + int(position - start) // CUT_BYTES * CUT_BYTES


def rows_between(begin: int, end: int, whole: list[int], starts: np.ndarray) -> np.ndarray:
    """The bytes [begin, end) of the records `whole`, laid end to end, as rows."""
    rows = []
    first = int(np.searchsorted(starts, begin, side="right")) - 1
    for at in range(first, len(whole)):
        low, high = max(begin, int(starts[at])), min(end, int(starts[at + 1]))
        if low >= end:
            break
        if low < high:
            rows.append((whole[at], low - int(starts[at]), high - int(starts[at])))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
