"""The errors that a person at the terminal meets, and the exit status each stands for.

    ValueError
      ConfigError         bad input, found before the first update                 status 2
    ArithmeticError
      NonFiniteError      a loss, gradient or parameter that is not finite         status 1
    RuntimeError
      NothingSavedError   stopped by request, and checkpoints are off              status 1
      FolderLostError     another start has taken the folder over                  status 1

Checkpoint errors are checkpoint_file's, errors of peers are distributed_utils', dataset errors are data's.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """Settings or input that cannot work. The message says what is wrong and which override mends it."""


class NonFiniteError(ArithmeticError):
    """Training met a number that is not finite, at `num_updates`, on `rank`; `what` names the loss or parameter."""

    def __init__(self, what: str, num_updates: int, rank: int, micro_batch: int | None = None, hint: str = "") -> None:
        self.what, self.num_updates, self.rank, self.micro_batch = what, num_updates, rank, micro_batch
        place = f"update {num_updates}, rank {rank}"
        if micro_batch is not None:
            place += f", micro-batch {micro_batch}"
        super().__init__(f"{what} is not finite ({place}).{' ' + hint if hint else ''}")


class NothingSavedError(RuntimeError):
    """The run was told to stop and had to lose what it had trained."""

    is_user_error = True

    def __init__(self, num_updates: int) -> None:
        super().__init__(f"stopped by request at update {num_updates}; nothing was saved (checkpoint.no_save=true)")


class FolderLostError(RuntimeError):
    """This process stood still, or its machine was out of reach, for so long that another start took the folder over."""

    is_user_error = True
    must_not_write = True  # not even what was begun: the folder is another run's

    def __init__(self, folder: str, owner: str) -> None:
        self.folder, self.owner = folder, owner
        super().__init__(
            f"{folder} was taken over by another start ({owner}), since this process gave no sign of life. It ends here "
            "and writes nothing more; the other one goes on from the newest checkpoint"
        )
