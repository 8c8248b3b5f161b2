"""The saves of a run: waited for, or one on its way to the disk while training goes on.

Owns: when that one is finished (by all ranks, between two updates), and what a failed save means. Must not know: when a
save is due, what is in it.
"""

from __future__ import annotations

import logging
from typing import Any, Callable

import checkpoint_file
import checkpoint_utils
import distributed_utils
from checkpoint_file import CheckpointWriteError
from checkpoint_utils import SavedCheckpoint

logger = logging.getLogger(__name__)


class BackgroundSaves:
    """Saves, one at a time. `on_saved` is called on all ranks for each one that counts.

    Every rank writes its share in a thread. The ranks tell each other with the message of an update when they are done
    (`is_written`, `has_failed`), and then finish the save together.
    """

    def __init__(self, max_failed_saves: int, on_saved: Callable[[SavedCheckpoint], Any]) -> None:
        self._max_failed_saves, self._on_saved = max_failed_saves, on_saved
        self._buffer = checkpoint_file.HostBuffer()
        self._save: checkpoint_utils.Save | None = None
        self._failed_in_a_row = 0

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write; True where there is no save."""
        return self._save is None or self._save.is_written

    @property
    def has_failed(self) -> bool:
        return self._save is not None and self._save.has_failed

    def begin(self, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None) -> bool:
        """Collective: finish the last save and begin one. Returns whether one was begun or counted as failed."""
        self.finish()
        try:
            self._save = checkpoint_utils.begin_save(cfg, trainer, epoch_itr, val_loss, self._buffer)
        except CheckpointWriteError as error:
            self._count_failure(error, trainer.get_num_updates())
            return True
        return self._save is not None

    def save(self, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None, last: bool, stopping: bool) -> bool:
        """Collective: save and wait for it. Returns whether there was something to save.

        last: nothing is trained after it, so that a failure cannot be made good later. stopping: somebody asked for it.
        Raises: CheckpointWriteError as `finish`, and if the last one fails.
        """
        self.flush()
        try:
            saved = checkpoint_utils.save_checkpoint(cfg, trainer, epoch_itr, val_loss, stopping=stopping)
        except CheckpointWriteError as error:
            if last:
                raise
            self._count_failure(error, trainer.get_num_updates())
            return True
        if saved is None:
            return False
        self._failed_in_a_row = 0
        self._on_saved(saved)
        return True

    def settle(self, all_written: bool, any_failed: bool) -> None:
        """Collective, after each update: finish the save if that waits for no disk. The arguments are all ranks'."""
        if self._save is not None and (all_written or any_failed):
            self.finish(any_failed)

    def finish(self, any_failed: bool = False) -> None:
        """Collective: wait until the save, if there is one, counts or has failed.

        Raises: CheckpointWriteError if it is the last failure in a row that `checkpoint.max_failed_saves` allows.
        """
        save, self._save = self._save, None
        if save is None:
            return
        try:
            saved = save.finish(any_failed)
        except CheckpointWriteError as error:
            self._count_failure(error, save.num_updates)
            return
        self._failed_in_a_row = 0
        self._on_saved(saved)

    def flush(self) -> None:
        """Collective: as `finish` where the run ends, so that a failure is told but ends nothing: what follows decides."""
        try:
            self.finish()
        except CheckpointWriteError as error:
            logger.error("the save before this one FAILED and is lost: %s", error)

    def _count_failure(self, error: CheckpointWriteError, num_updates: int) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self._max_failed_saves:
            raise error
        if distributed_utils.is_master():
            logger.error(
                "the save of update %d FAILED and is lost: %s. Training goes on; the run ends when %d saves in a row have "
                "failed (checkpoint.max_failed_saves), this was number %d",
                num_updates,
                error,
                self._max_failed_saves,
                self._failed_in_a_row,
            )

    def leave(self, error: BaseException) -> None:
        """The run ends by `error`. If all ranks raise it they finish the save together, else it is given up."""
        save, self._save = self._save, None
        if save is None:
            return
        if getattr(error, "must_not_write", False) or not distributed_utils.is_agreed(error):
            save.abandon()  # the folder is another run's; or the others stand in an update, and nobody can ask them
            return
        try:
            self._on_saved(save.finish())
        except Exception as problem:  # the run has an error of its own to end by
            logger.error("the save of update %d failed too: %s", save.num_updates, problem)
