"""What can be wrong with a checkpoint, and how the ranks agree on it.

Exception
  CheckpointError              a path, and a sentence on what is wrong with it          status 2
    CheckpointNotFoundError    there is nothing under the path (is a FileNotFoundError too)
    NotACheckpointError        something else lies there; the sentence says what
    CheckpointDamagedError     a checkpoint that lost bytes or changed some; `record` where it is known
    CheckpointWriteError       the system refused the bytes (disk full, no permission)  status 1
    UnsavableValueError        a value that would not come back equal, by its key path  status 1
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable
from typing import Any

import distributed_utils


class CheckpointError(Exception):
    """What is wrong with the checkpoint at `path`; `rank` is the rank that found it, None where there is only one."""

    exit_status = 2
    is_user_error = True

    def __init__(self, path: str, problem: str, record: str | None = None, rank: int | None = None) -> None:
        super().__init__(path, problem, record, rank)
        self.path, self.problem, self.record, self.rank = str(path), problem, record, rank

    def __str__(self) -> str:
        found_by = f" (found by rank {self.rank})" if self.rank is not None else ""
        return f"{self.path}: {printable(self.problem)}{found_by}"


def printable(text: str, length: int = 4000) -> str:
    """Words from a file may hold control characters, which a terminal would obey, and be of any length."""
    text = text if len(text) <= length else text[:length] + " …"
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    pass


class NotACheckpointError(CheckpointError):
    pass


class CheckpointDamagedError(CheckpointError):
    pass


class CheckpointWriteError(CheckpointError):
    exit_status = 1


class UnsavableValueError(CheckpointError):
    exit_status = 1


def error_kinds(kind: type[CheckpointError] = CheckpointError) -> dict[str, type[CheckpointError]]:
    """The classes of checkpoint errors by name, also those of the modules above."""
    kinds = {kind.__name__: kind}
    for narrower in kind.__subclasses__():
        kinds.update(error_kinds(narrower))
    return kinds


def agree_on_error(error: BaseException | None, group: Any = None) -> None:
    """Collective. If any rank has an error, all raise: a CheckpointError as itself on every rank, naming the rank.

    Other errors go through `distributed_utils.agree`: the failing rank raises its own, the others a PeerError.
    """
    gather_agreed(error, None, group)


def gather_agreed(error: BaseException | None, data: Any, group: Any = None) -> list[Any]:
    """Collective. Every rank's `data`, plain values, in the order of ranks; raises as `agree_on_error` does."""
    if distributed_utils.get_world_size(group) == 1:
        if error is not None:
            raise error
        return [data]
    own = described(error)
    found = distributed_utils.all_gather_list((own, error is not None, data if error is None else None), group=group)
    if any(failed and fields is None for fields, failed, _ in found):
        distributed_utils.agree(error, group)
    for rank, (fields, failed, _) in enumerate(found):
        if failed:
            raise found_by(rank, fields) from error
    return [data for _, _, data in found]


def told_by_rank_0(error: BaseException | None, data: Any, group: Any = None) -> Any:
    """Collective. Rank 0's `data`, plain values, or its error, raised as by `agree_on_error`.

    One broadcast, a fraction of a gathering: for what rank 0 alone has done. It does not wait for the others.
    """
    if distributed_utils.get_world_size(group) == 1:
        if error is not None:
            raise error
        return data
    told = (described(error), failure_of(error), data if error is None else None)
    root = distributed_utils.get_global_rank(group, 0)
    fields, failure, data = distributed_utils.broadcast_object(told, root, group)
    raise_told(0, fields, failure, error)
    return data


def decided_by_rank_0(
    error: BaseException | None, data: Any, decide: Callable[[list[Any]], Any], group: Any = None
) -> Any:
    """Collective. What rank 0's `decide` makes of every rank's `data`, plain values, in the order of ranks.

    One gathering and one broadcast. Raises as `agree_on_error` does, also what `decide` raises, which is called only if
    no rank has an error. What it could not write is rank 0's error, any other CheckpointError has the rank it names.
    """
    if distributed_utils.get_world_size(group) == 1:
        if error is not None:
            raise error
        return decide([data])
    raised: list[BaseException | None] = [error]

    def answer(told: list[Any]) -> tuple:
        failed = [(rank, fields, failure) for rank, (fields, failure, _) in enumerate(told) if failure is not None]
        if failed:  # of some other kind before those that every rank can raise as they are
            return (*next((one for one in failed if one[1] is None), failed[0]), None)
        try:
            return None, None, None, decide([data for _, _, data in told])
        except Exception as problem:  # the other ranks wait for the answer
            raised[0] = problem
            rank = 0 if isinstance(problem, CheckpointWriteError) else getattr(problem, "rank", None)
            return rank, described(problem), failure_of(problem), None

    own = (described(error), failure_of(error), data if error is None else None)
    rank, fields, failure, decided = distributed_utils.answer_of_rank_0(own, answer, group)
    raise_told(rank, fields, failure, raised[0])
    return decided


def raise_told(rank: int | None, fields: tuple | None, failure: tuple | None, error: BaseException | None) -> None:
    """Raise what the ranks have agreed on, if it is an error: `fields` as `described`, `failure` as `failure_of`."""
    if fields is not None:
        raise found_by(rank, fields) from error
    if failure is not None:
        raise distributed_utils.agreed(error or distributed_utils.PeerError(*failure))


def failure_of(error: BaseException | None) -> tuple | None:
    return None if error is None else dataclasses.astuple(distributed_utils.Failure.of(error))


def described(error: BaseException | None) -> tuple | None:
    """What another rank needs to raise the same CheckpointError; None for anything else."""
    if not isinstance(error, CheckpointError):
        return None
    return type(error).__name__, error.path, error.problem, error.record


def found_by(rank: int | None, fields: tuple) -> BaseException:
    kind, path, problem, record = fields
    return distributed_utils.agreed(error_kinds()[kind](path, problem, record, rank))


def cannot_read(path: str, error: OSError) -> CheckpointError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        folder = os.path.dirname(os.path.abspath(path))
        no_folder = "" if os.path.isdir(folder) else f", nor the folder {folder}"
        return CheckpointNotFoundError(path, f"no such file or folder{no_folder}")
    if error.errno == errno.EIO:
        return CheckpointDamagedError(path, "the disk fails to read it (input/output error)")
    return CheckpointError(path, f"cannot be read: {error.strerror or error}")
