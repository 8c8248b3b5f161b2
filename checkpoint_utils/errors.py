"""What is wrong with the checkpoints of a run.

CheckpointError (checkpoint_file)
  NoUsableCheckpointError    a run's own checkpoints are all damaged                   status 2
  CheckpointWishError        two wishes that exclude each other                        status 2
"""

from __future__ import annotations

import errno
import os

from checkpoint_file import CheckpointError, CheckpointWriteError


class NoUsableCheckpointError(CheckpointError):
    pass


class CheckpointWishError(CheckpointError):
    pass


def write_error(path: str, error: OSError) -> CheckpointError:
    problem = f"cannot be written: {error.strerror or error}"
    return CheckpointWriteError(path, problem + hint_for(problem))


def hint_for(problem: str) -> str:
    """The way out of a problem, known by the system's words for it: what one rank met, all ranks must answer alike."""
    if any(os.strerror(code) in problem for code in (errno.ENOSPC, errno.EDQUOT)):
        return ". Make room, keep fewer files (checkpoint.keep_interval_updates=N), or set checkpoint.save_dir=FOLDER"
    if any(os.strerror(code) in problem for code in (errno.EACCES, errno.EPERM, errno.EROFS)):
        return ". Choose a folder that can be written with checkpoint.save_dir=FOLDER"
    return ""
