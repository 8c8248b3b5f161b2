"""What is wrong with the checkpoints of a run.

CheckpointError (checkpoint_file)
  NoUsableCheckpointError    a run's own checkpoints are all damaged                   status 2
  CheckpointWishError        two wishes that exclude each other                        status 2
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from checkpoint_file import CheckpointError, CheckpointWriteError


class NoUsableCheckpointError(CheckpointError):
    pass


class CheckpointWishError(CheckpointError):
    pass


def write_error(path: str, error: OSError) -> CheckpointError:
    problem = f"cannot be written: {error.strerror or error}"
    return CheckpointWriteError(path, problem + hint_for(problem))


@contextlib.contextmanager
def named_in_errors(path: str) -> Iterator[None]:
    """What the system refuses here is a CheckpointWriteError that names the checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise write_error(path, error) from error


WAYS_OUT = (
    (
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        ". Make room, keep fewer files (checkpoint.keep_interval_updates=N), or set checkpoint.save_dir=FOLDER",
    ),
    ((errno.EACCES, errno.EPERM, errno.EROFS), ". Choose a folder that can be written with checkpoint.save_dir=FOLDER"),
)


def hint_for(problem: str) -> str:
    """The way out of a problem, known by the system's words for it: what one rank met, all ranks must answer alike."""
    for codes, hint in WAYS_OUT:
        if any(os.strerror(code) in problem for code in codes):
            return hint if hint not in problem else ""  # told already
    return ""
