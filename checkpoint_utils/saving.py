"""A save: under which names, by all ranks, and at which instant it counts."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import checkpoint_file
from checkpoint_utils.agreement import on_rank_0
from checkpoint_utils.best_score import is_score
from checkpoint_utils.config import expand
from checkpoint_utils.errors import named_in_errors
from checkpoint_utils.facts import ranked_scores
from checkpoint_utils.file_system import bytes_of
from checkpoint_utils.folders import name_folder, place_of_folder
from checkpoint_utils.names import checkpoint_names
from checkpoint_utils.publishing import Publication, link_names
from checkpoint_utils.retention import prune_checkpoints

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """One save: the paths of its names (the same on all ranks), the update it holds, bytes of its one file.

    blocked_s: seconds for which training stood still.
    """

    paths: list[str]
    num_updates: int
    bytes: int
    blocked_s: float


def save_checkpoint(
    cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None, stopping: bool = False
) -> SavedCheckpoint | None:
    """Save the run under all names that its position has, one content, and prune. All ranks call it.

    Args:    cfg: the section `checkpoint`. val_loss: the fresh score, None where nothing was validated since the last.
             stopping: the run ends here, so that some file must be written whatever the intervals say.
    Returns: what was written, None if nothing was to be.
    Raises:  on all ranks what failed on one; then nothing is deleted and all earlier files are as they were.
    """
    save = decide_save(cfg, trainer, epoch_itr, val_loss, stopping)
    if save is None:
        return None
    trainer.save_checkpoint(save.content, save.extra_state)
    return save.complete()


def begin_save(
    cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None, buffer: checkpoint_file.HostBuffer
) -> Save | None:
    """As `save_checkpoint` up to the moment when the state may change again: the rank's share is copied into `buffer`.

    A thread writes it. The save counts when all ranks have called `Save.finish`; `Save.is_written` says when that no
    longer waits. Returns None if nothing was to be saved.
    """
    save = decide_save(cfg, trainer, epoch_itr, val_loss)
    if save is None:
        return None
    save.publication, error = trainer.begin_checkpoint(save.content, save.extra_state), None
    try:
        save.publication.write_in_background(buffer)
    except Exception as problem:  # no memory for the copy; agreed by all ranks right below
        error = problem
    try:
        checkpoint_file.agree_on_error(error, save.group)
    except BaseException:
        save.abandon()
        raise
    save.blocked_s = time.perf_counter() - save.begun
    return save


@dataclass
class Save:
    """A save that was decided: its names, what else its file holds, what is to be kept beside it.

    content: where the bytes are written, the first name or, of a folder, the one that the names are links to.
    """

    cfg: Any
    run_id: str | None
    group: Any
    paths: list[str]
    content: str
    num_updates: int
    extra_state: dict[str, Any]
    has_score: bool
    begun: float = field(default_factory=time.perf_counter)
    blocked_s: float = 0.0
    publication: Publication | None = None

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write, well or not."""
        return self.publication.background.is_done

    @property
    def has_failed(self) -> bool:
        return self.publication.background.has_failed

    def finish(self, any_failed: bool = False) -> SavedCheckpoint:
        """Collective: wait for the writing of all ranks, then do what is left. Raises: as `save_checkpoint`.

        any_failed: some rank's writing has; then no other is waited for.
        """
        self.begun = time.perf_counter()
        with self.publication as publication:
            if any_failed:
                publication.background.cancel()
            publication.finish()
        return self.complete()

    def complete(self) -> SavedCheckpoint:
        """The content is there: give it its names, prune."""
        give_names = link_names if self.paths[0].endswith(".pt") else functools.partial(name_folder, self.content)
        on_rank_0(named(self.paths[-1], lambda: give_names(self.paths)), self.group)
        nbytes = on_rank_0(self._tidy, self.group)
        return SavedCheckpoint(self.paths, self.num_updates, nbytes, self.blocked_s + time.perf_counter() - self.begun)

    def _tidy(self) -> int:
        """Prune; the save counts already, so nothing that happens here undoes it. Returns the bytes of the checkpoint."""
        names, save_dir = [os.path.basename(path) for path in self.paths], expand(self.cfg.save_dir)
        try:
            prune_checkpoints(save_dir, self.cfg, self.run_id, self.has_score, but=names)
            return bytes_of(self.paths[0])
        except (OSError, checkpoint_file.CheckpointError) as error:
            logger.warning("%s: what is no longer kept cannot be deleted now: %s", save_dir, error)
            return 0

    def abandon(self) -> None:
        """Stop writing and leave no trace. Not collective."""
        self.publication.close()


def decide_save(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None, stopping: bool = False) -> Save | None:
    """Which names this position has, None if none. Collective: rank 0 looks into the folder."""
    if cfg.no_save:
        return None
    begun = time.perf_counter()
    num_updates = trainer.get_num_updates()
    improved = trainer.best.update(val_loss, num_updates)
    epoch, end_of_epoch = epoch_of(epoch_itr)
    save_dir, group = expand(cfg.save_dir), trainer.data_parallel_process_group
    folders = getattr(trainer, "use_sharded_state", False)

    def decide() -> list[str]:
        ranked = ranked_scores(save_dir, cfg.best_checkpoint_metric)
        return checkpoint_names(cfg, epoch, num_updates, end_of_epoch, improved, val_loss, ranked, stopping, folders)

    paths = [os.path.join(save_dir, name) for name in on_rank_0(named(save_dir, decide), group)]
    if not paths:
        return None
    extra_state = {"train_iterator": epoch_itr.state_dict(), "val_loss": val_loss, "best": trainer.best.best}
    place = named(paths[0], lambda: place_of_folder(paths[0], epoch, num_updates))
    content = on_rank_0(place, group) if folders else paths[0]
    return Save(cfg, trainer.run_id, group, paths, content, num_updates, extra_state, is_score(val_loss), begun)


def named(path: str, do: Callable[[], Any]) -> Callable[[], Any]:
    """`do`, whatever the system refuses in it being a failure to write `path`."""

    def done() -> Any:
        with named_in_errors(path):
            return do()

    return done


def epoch_of(epoch_itr: Any) -> tuple[int, bool]:
    """The epoch that a state belongs to, and whether it ends there: the start of epoch E + 1 is the end of epoch E."""
    if epoch_itr.end_of_epoch():
        return epoch_itr.epoch, True
    if epoch_itr.epoch > 1 and getattr(epoch_itr, "samples_in_epoch", None) == 0:
        return epoch_itr.epoch - 1, True
    return epoch_itr.epoch, False
