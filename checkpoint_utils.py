"""The checkpoints of a run: choose, publish, prune, save and load.

Owns: the names in the folder, the instant at which a save counts, which file a run continues from, what is deleted.
The bytes are checkpoint_file's. docs/checkpoint.md has the protocol, its invariants and what can still go wrong.
Must not import: trainer, Hydra. The Trainer that it is given is used by its public methods only.

    CheckpointError (checkpoint_file)
      NoUsableCheckpointError    a run's own checkpoints are all damaged                   status 2
      CheckpointWishError        two wishes that exclude each other                        status 2
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator, Literal, Mapping

import checkpoint_file
import distributed_utils
from checkpoint_file import CheckpointDamagedError, CheckpointError, CheckpointWriteError

try:
    import fcntl
except ImportError:  # not on this system: who writes a temporary file cannot be told there
    fcntl = None

logger = logging.getLogger(__name__)

DEFAULT_RESTORE_FILE = "checkpoint_last.pt"
RESET_FLAGS = ("reset_optimizer", "reset_lr_scheduler", "reset_dataloader", "reset_meters")
SAVED_SETTINGS = (*RESET_FLAGS, "best_checkpoint_metric", "maximize_best_checkpoint_metric")
PART_SETTINGS = ("load_include", "load_exclude", "load_rename", "load_shape_mismatch", "load_expected_count")
ABANDONED = "abandoned"
LARGE_FILE_BYTES = 16 << 20


class NoUsableCheckpointError(CheckpointError):
    pass


class CheckpointWishError(CheckpointError):
    pass


@dataclass
class CheckpointConfig:
    """Section `checkpoint`."""

    save_dir: str = field(default="${run_dir}/checkpoints", metadata={"help": "folder of the run's checkpoints"})
    restore_file: str = field(
        default=DEFAULT_RESTORE_FILE,
        metadata={
            "help": "checkpoint to start from; the default is the run's own newest, or a fresh start without one"
        },
    )
    finetune_from_model: str | None = field(
        default=None,
        metadata={"help": "checkpoint of which a new run takes the parameters and nothing else; null: none"},
    )
    reset_optimizer: bool = field(
        default=False, metadata={"help": "drop the optimizer's moments at the load, once per run"}
    )
    reset_lr_scheduler: bool = field(
        default=False, metadata={"help": "drop the state of the learning-rate scheduler at the load, once per run"}
    )
    reset_dataloader: bool = field(
        default=False, metadata={"help": "start the data order again from epoch 1 at the load, once per run"}
    )
    reset_meters: bool = field(
        default=False, metadata={"help": "empty the meters, the best score and patience at the load, once per run"}
    )
    optimizer_overrides: Any = field(
        default_factory=dict,
        metadata={"help": "optimizer settings that replace this config's at a load, a mapping or its text; {}: none"},
    )
    save_interval: int = field(
        default=1,
        metadata={"help": "save checkpoint{E}.pt every this many epochs, >= 0; 0: no save for an epoch's end"},
    )
    save_interval_updates: int = field(
        default=0, metadata={"help": "save checkpoint_{E}_{U}.pt every this many updates, >= 0; 0: no such saves"}
    )
    keep_interval_updates: int = field(
        default=-1, metadata={"help": "newest checkpoint_{E}_{U}.pt that are kept, >= -1; -1: all, 0: none is written"}
    )
    keep_last_epochs: int = field(
        default=-1, metadata={"help": "newest checkpoint{E}.pt that are kept, >= -1; -1: all, 0: none is written"}
    )
    keep_best_checkpoints: int = field(
        default=0,
        metadata={
            "help": "checkpoint.best_{metric}_{value}.pt that are kept, by score, >= -1; -1: all, 0: none beside "
            "checkpoint_best.pt"
        },
    )
    no_save: bool = field(default=False, metadata={"help": "write no checkpoint at all"})
    no_epoch_checkpoints: bool = field(default=False, metadata={"help": "write no checkpoint{E}.pt"})
    no_last_checkpoints: bool = field(
        default=False, metadata={"help": "write no checkpoint_last.pt; a stop then saves checkpoint_{E}_{U}.pt"}
    )
    write_checkpoints_asynchronously: bool = field(
        default=False,
        metadata={"help": "train on while a copy of each rank's share is written; it counts when it is on the disk"},
    )
    max_failed_saves: int = field(
        default=2,
        metadata={"help": "asynchronous saves that fail in a row until the run ends, >= 1; 1: the first one ends it"},
    )
    no_save_optimizer_state: bool = field(
        default=False, metadata={"help": "leave the optimizer's moments out of the files"}
    )
    best_checkpoint_metric: str = field(default="loss", metadata={"help": "validation metric that ranks checkpoints"})
    maximize_best_checkpoint_metric: bool = field(
        default=False, metadata={"help": "the largest value of it is the best"}
    )
    patience: int = field(
        default=-1, metadata={"help": "stop after this many validations in a row without a new best; -1 or 0: never"}
    )
    load_checkpoint_on_all_dp_ranks: bool = field(
        default=False, metadata={"help": "every rank reads the file; otherwise rank 0 reads and the others receive"}
    )
    read_method: str = field(
        default="auto",
        metadata={
            "help": "auto, mmap or pread: how bytes come from the file; auto reads by offset, which is the fastest"
        },
    )
    load_include: Any = field(
        default_factory=list,
        metadata={"help": "of restore_file and finetune_from_model take only tensors whose name one of these patterns finds; []: all"},
    )
    load_exclude: Any = field(
        default_factory=list, metadata={"help": "… and leave out those whose name one of these patterns finds; []: none"}
    )
    load_rename: Any = field(
        default_factory=list,
        metadata={"help": "… after renaming them, each by every `pattern -> replacement` in turn; []: no other names"},
    )
    load_shape_mismatch: Literal["error", "skip", "slice"] = field(
        default="error",
        metadata={"help": "a tensor of another shape: error, skip (it starts fresh), slice (the common part is taken)"},
    )
    load_expected_count: int = field(
        default=0, metadata={"help": "tensors of model and criterion that must be taken, or the run is refused; 0: any number"}
    )

    def problems(self) -> list[str]:
        """Sentences on values that cannot work."""
        found = []
        for name in ("save_interval", "save_interval_updates"):
            if getattr(self, name) < 0:
                found.append(f"checkpoint.{name}={getattr(self, name)}: must be 0 (off) or above")
        for name in ("keep_interval_updates", "keep_last_epochs", "keep_best_checkpoints", "patience"):
            if getattr(self, name) < -1:
                found.append(f"checkpoint.{name}={getattr(self, name)}: must be -1 or above")
        if self.read_method not in checkpoint_file.READ_METHODS:
            found.append(f"checkpoint.read_method={self.read_method}: must be {', '.join(checkpoint_file.READ_METHODS)}")
        if self.max_failed_saves < 1:
            found.append(f"checkpoint.max_failed_saves={self.max_failed_saves}: must be 1 or above")
        if not self.best_checkpoint_metric:
            found.append("checkpoint.best_checkpoint_metric is empty: name a metric, such as loss")
        if not self.save_dir:
            found.append("checkpoint.save_dir is empty: name a folder, or write nothing with checkpoint.no_save=true")
        if restore_wish(self) and self.finetune_from_model:
            found.append(TWO_WISHES)
        if self.load_expected_count < 0:
            found.append(f"checkpoint.load_expected_count={self.load_expected_count}: must be 0 (any) or above")
        return found


TWO_WISHES = (
    "checkpoint.restore_file and checkpoint.finetune_from_model are both set: the first continues a run, the second "
    "takes parameters for a new one. Leave one of them out"
)


# ---------------------------------------------------------------------------------------------------------- names


@dataclass(frozen=True)
class CheckpointName:
    """The name of a checkpoint: the only place that writes one and reads one.

    kind: "last", "best", "epoch" (epoch), "update" (epoch, num_updates), "ranked" (metric, value).
    folder: whether it is that of a folder (distributed_training.use_sharded_state), which has no suffix.
    """

    kind: str
    epoch: int | None = None
    num_updates: int | None = None
    metric: str | None = None
    value: float | None = None
    folder: bool = False

    def __str__(self) -> str:
        suffix = "" if self.folder else ".pt"
        if self.kind == "epoch":
            return f"checkpoint{self.epoch}{suffix}"
        if self.kind == "update":
            return f"checkpoint_{self.epoch}_{self.num_updates}{suffix}"
        if self.kind == "ranked":  # repr has the fewest digits that tell this float from every other
            return f"checkpoint.best_{self.metric}_{float(self.value)!r}{suffix}"
        return f"checkpoint_{self.kind}{suffix}"

    @staticmethod
    def ranked(metric: str, value: float) -> CheckpointName:
        return CheckpointName("ranked", metric=plain_word(metric), value=float(value) + 0.0)  # -0.0 is 0.0

    @staticmethod
    def parse(filename: str) -> CheckpointName | None:
        """The name that `filename` is, None for any text that `str` of a CheckpointName does not give."""
        name, stem, folder = None, filename.removesuffix(".pt"), not filename.endswith(".pt")
        if match := re.fullmatch(r"checkpoint_(last|best)", stem):
            name = CheckpointName(match[1], folder=folder)
        elif match := re.fullmatch(r"checkpoint([0-9]+)", stem):
            name = CheckpointName("epoch", epoch=int(match[1]), folder=folder)
        elif match := re.fullmatch(r"checkpoint_([0-9]+)_([0-9]+)", stem):
            name = CheckpointName("update", epoch=int(match[1]), num_updates=int(match[2]), folder=folder)
        elif match := re.fullmatch(r"checkpoint\.best_(.+)_(-?[0-9.]+(?:e[+-][0-9]+)?)", stem):
            try:
                name = CheckpointName("ranked", metric=match[1], value=float(match[2]), folder=folder)
            except ValueError:
                return None
        return name if name is not None and str(name) == filename else None


def plain_word(text: str) -> str:
    """The text with "-" for all that a file name or a Hydra override would have to quote."""
    return re.sub(r"[^A-Za-z0-9_.]", "-", text) or "-"


def temporary_name(filename: str) -> str:
    """A name that no other process has, also none of another machine that writes here."""
    return f".{filename}.{os.getpid()}{time.time_ns():020}.tmp"


def is_temporary_name(filename: str) -> bool:
    match = re.fullmatch(r"\.(.+)\.[0-9]+\.tmp", filename)
    return match is not None and is_name_of_content(match[1])


def is_name_of_content(filename: str) -> bool:
    return CheckpointName.parse(filename) is not None or is_linked_name(filename)


# ----------------------------------------------------------------------------------------------------- best score


class BestScore:
    """The best validation score so far, and for how many validations it has stood.

    A score counts once per update, however often it is given. None, NaN and infinities are no scores. Of equal scores
    the earlier stays the best.

    best: None until there is one. best_num_updates: its update. num_updates: that of the last score, None before it.
    """

    def __init__(self, maximize: bool = False) -> None:
        self.maximize = maximize
        self.reset()

    def reset(self) -> None:
        self.best: float | None = None
        self.best_num_updates: int | None = None
        self.num_updates: int | None = None
        self.runs_without_improvement = 0

    def update(self, score: float | None, num_updates: int) -> bool:
        """Take the score of this update. Returns whether it is the best so far."""
        if not is_score(score):
            return False
        if self.num_updates == num_updates:
            return self.best_num_updates == num_updates
        self.num_updates = num_updates
        if self.best is None or is_better(float(score), self.best, self.maximize):
            self.best, self.best_num_updates, self.runs_without_improvement = float(score), num_updates, 0
            return True
        self.runs_without_improvement += 1
        return False

    def out_of_patience(self, patience: int) -> bool:
        return 0 < patience <= self.runs_without_improvement

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_num_updates": self.best_num_updates,
            "num_updates": self.num_updates,
            "runs_without_improvement": self.runs_without_improvement,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        if state.get("best") is not None:
            self.best = float(state["best"])
            self.best_num_updates = state.get("best_num_updates")
            self.num_updates = state.get("num_updates")
            self.runs_without_improvement = int(state.get("runs_without_improvement") or 0)


def is_score(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def is_better(score: float, other: float, maximize: bool) -> bool:
    return score > other if maximize else score < other


# ------------------------------------------------------------------------------------------- which names a save has


def checkpoint_names(
    cfg: Any,
    epoch: int,
    num_updates: int,
    end_of_epoch: bool,
    improved: bool = False,
    score: float | None = None,
    ranked: Iterable[float] = (),
    stopping: bool = False,
    folders: bool = False,
) -> list[str]:
    """The names under which this state is saved; checkpoint_last.pt, with which the save counts, comes last.

    Args:    epoch: the epoch that ends here (end_of_epoch) or is being trained. improved: `score` is the best so far.
             score: the fresh value of best_checkpoint_metric, None where there is none.
             ranked: scores of the best checkpoints in the folder. stopping: the run ends here and must find a file.
             folders: the names are those of folders.
    """
    if cfg.no_save:
        return []
    names: list[CheckpointName] = []
    interval, epochs = cfg.save_interval_updates, cfg.save_interval
    if interval > 0 and num_updates > 0 and num_updates % interval == 0 and cfg.keep_interval_updates != 0:
        names.append(CheckpointName("update", epoch=epoch, num_updates=num_updates))
    if end_of_epoch and epochs > 0 and epoch % epochs == 0:
        if not cfg.no_epoch_checkpoints and cfg.keep_last_epochs != 0:
            names.append(CheckpointName("epoch", epoch=epoch))
    if is_score(score):
        if deserves_a_rank(score, list(ranked), cfg.keep_best_checkpoints, cfg.maximize_best_checkpoint_metric):
            names.append(CheckpointName.ranked(cfg.best_checkpoint_metric, score))
        if improved:
            names.append(CheckpointName("best"))
    if not cfg.no_last_checkpoints:
        names.append(CheckpointName("last"))
    elif stopping and not any(name.kind in ("update", "epoch") for name in names):
        names.append(CheckpointName("update", epoch=epoch, num_updates=num_updates))
    return [str(dataclasses.replace(name, folder=folders)) for name in names]


def deserves_a_rank(score: float, ranked: list[float], keep: int, maximize: bool) -> bool:
    """Whether a score is among the `keep` best (-1: any is); of equal scores the earlier is kept."""
    if keep == 0 or score in ranked:
        return False
    return keep < 0 or sum(not is_better(score, other, maximize) for other in ranked) < keep


def stale_checkpoints(names: Iterable[str], cfg: Any, rank_too: bool = True) -> list[str]:
    """Those of `names`, all written by this run, that retention no longer keeps. Decides by numbers, never by text.

    rank_too: False where no fresh score was saved: then no best checkpoint is touched.
    """
    parsed = [name for name in map(CheckpointName.parse, names) if name is not None]
    updates = sorted((n for n in parsed if n.kind == "update"), key=lambda n: (n.num_updates, n.epoch), reverse=True)
    epochs = sorted((n for n in parsed if n.kind == "epoch"), key=lambda n: n.epoch, reverse=True)
    metric, sign = plain_word(cfg.best_checkpoint_metric), -1 if cfg.maximize_best_checkpoint_metric else 1
    ranked = sorted((n for n in parsed if n.kind == "ranked" and n.metric == metric), key=lambda n: sign * n.value)
    stale: list[CheckpointName] = []
    for group, keep in (
        (updates, cfg.keep_interval_updates),
        (epochs, cfg.keep_last_epochs),
        (ranked if rank_too else [], cfg.keep_best_checkpoints),
    ):
        stale += group[keep:] if keep >= 0 else []
    return [str(name) for name in stale]


# ---------------------------------------------------------------------------------------------------------- saving


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
        names, save_dir = [os.path.basename(path) for path in self.paths], expand(self.cfg.save_dir)
        give_names = link_names if self.paths[0].endswith(".pt") else functools.partial(name_folder, self.content)
        on_rank_0(lambda: give_names(self.paths), self.group)
        on_rank_0(lambda: prune_checkpoints(save_dir, self.cfg, self.run_id, self.has_score, but=names), self.group)
        nbytes = bytes_of(self.paths[0]) if distributed_utils.get_rank(self.group) == 0 else 0
        return SavedCheckpoint(self.paths, self.num_updates, nbytes, self.blocked_s + time.perf_counter() - self.begun)

    def abandon(self) -> None:
        """Stop writing and leave no trace. Not collective."""
        self.publication.close()


def decide_save(
    cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None, stopping: bool = False
) -> Save | None:
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

    paths = [os.path.join(save_dir, name) for name in on_rank_0(decide, group)]
    if not paths:
        return None
    extra_state = {"train_iterator": epoch_itr.state_dict(), "val_loss": val_loss, "best": trainer.best.best}
    content = on_rank_0(lambda: place_of_folder(paths[0], epoch, num_updates), group) if folders else paths[0]
    return Save(cfg, trainer.run_id, group, paths, content, num_updates, extra_state, is_score(val_loss), begun)


def epoch_of(epoch_itr: Any) -> tuple[int, bool]:
    """The epoch that a state belongs to, and whether it ends there: the start of epoch E + 1 is the end of epoch E."""
    if epoch_itr.end_of_epoch():
        return epoch_itr.epoch, True
    if epoch_itr.epoch > 1 and getattr(epoch_itr, "samples_in_epoch", None) == 0:
        return epoch_itr.epoch - 1, True
    return epoch_itr.epoch, False


def ranked_scores(save_dir: str, metric: str) -> list[float]:
    names = map(CheckpointName.parse, os.listdir(save_dir) if os.path.isdir(save_dir) else [])
    return [name.value for name in names if name and name.kind == "ranked" and name.metric == plain_word(metric)]


def publish_checkpoint(state: dict[str, Any], filename: str | os.PathLike, group: Any = None) -> int:
    """Write `state` under `filename`: complete, checksummed and on the disk, or not at all. All ranks call it.

    Every rank gives its own state and writes its share of the bytes (checkpoint_file.write_checkpoint_file says what
    must be equal). Returns the bytes of the file.
    Raises: on all ranks UnsavableValueError, CheckpointWriteError; `filename` is then what it was before.
    """
    with Publication(state, filename, group) as publication:
        publication.write()
        return publication.finish()


class Publication:
    """One checkpoint between its first byte and its name: the steps of docs/checkpoint.md, by all ranks.

    Making one is collective and lays the file down under a temporary name, that rank 0 chooses and holds. `write` is
    this rank's own, `finish` collective: it gives the file its name. `close` leaves no trace of what was not finished.
    """

    def __init__(self, state: dict[str, Any], filename: str | os.PathLike, group: Any = None) -> None:
        self.path, self._group = expand(filename), group
        self._folder, name = os.path.split(self.path)
        self._open, self._temporary = contextlib.ExitStack(), ""
        self.background: checkpoint_file.BackgroundWrite | None = None
        try:
            self._temporary = os.path.join(self._folder, on_rank_0(lambda: self._hold(name), group))
            with self._errors_under_its_name():
                self._writer = checkpoint_file.open_writer(state, self._temporary, group)
                self._open.push(self._writer)
        except BaseException:
            self.close()
            raise

    def _hold(self, name: str) -> str:
        temporary = temporary_name(name)
        self._temporary = os.path.join(self._folder, temporary)
        try:
            os.makedirs(self._folder or ".", exist_ok=True)
            self._open.enter_context(held(self._temporary))
        except OSError as error:
            raise write_error(self.path, error) from error
        return temporary

    def write(self) -> None:
        """Write this rank's share; talks to nobody. What goes wrong is raised by `finish`, on all ranks."""
        self._writer.write()

    def write_in_background(self, buffer: checkpoint_file.HostBuffer) -> None:
        """Copy this rank's share into the buffer, and have a thread write it."""
        self.background = checkpoint_file.BackgroundWrite(self._writer, buffer)

    def finish(self) -> int:
        """Collective: make the file whole and durable, and give it its name. Returns its bytes."""
        if self.background is not None:
            self.background.wait()
        with self._errors_under_its_name():
            nbytes = self._writer.finish()
        self._open.close()  # before the rename: some mounts want it so
        on_rank_0(self._rename, self._group, share=False)
        return nbytes

    def _rename(self) -> None:
        try:
            with freed_later(self.path):
                os.replace(self._temporary, self.path)
            sync_folder(self._folder)
        except OSError as error:
            raise write_error(self.path, error) from error

    @contextlib.contextmanager
    def _errors_under_its_name(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            problem = error.problem + hint_for(error.problem)
            raise type(error)(self.path, problem, error.record, error.rank) from error

    def close(self) -> None:
        if self.background is not None:
            self.background.cancel()
        self._open.close()
        if distributed_utils.get_rank(self._group) == 0 and self._temporary:
            unlink(self._temporary)  # where the rename was reached there is none

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


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


class held:
    """While open, marks a temporary file as being written by a living process (see `remove_stale_temporaries`)."""

    def __init__(self, path: str) -> None:
        self.path, self.fd = path, -1

    def __enter__(self) -> None:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        lock(self.fd)

    def __exit__(self, *_: Any) -> None:
        os.close(self.fd)


def lock(fd: int) -> bool:
    """Take the file's lock. False: another process holds it."""
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks on this mount
    return True


def link_names(paths: list[str]) -> None:
    """Give the file at `paths[0]` its other names, each replaced in one instant, in the order given."""
    first, *others = paths
    folder = os.path.dirname(first)
    for other in others:
        temporary = os.path.join(folder, temporary_name(os.path.basename(other)))
        try:
            unlink(temporary)
            link_or_copy(first, temporary)
            with freed_later(other):
                os.replace(temporary, other)
            if other == others[-1]:
                sync_folder(folder)
        except OSError as error:
            raise write_error(other, error) from error
        finally:
            unlink(temporary)


@contextlib.contextmanager
def freed_later(path: str) -> Iterator[None]:
    """While open, a large file at `path` may lose its name; its bytes are freed by a thread, for nobody to wait for.

    Freeing a gigabyte takes a quarter of a second, which was most of the time that an asynchronous save blocked.
    """
    fd = None
    with contextlib.suppress(OSError):
        if os.stat(path).st_size >= LARGE_FILE_BYTES:
            fd = os.open(path, os.O_RDONLY)
    try:
        yield
    finally:
        if fd is not None:
            threading.Thread(target=os.close, args=(fd,), name="freeing a file", daemon=True).start()


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        notice(f"{os.path.dirname(source)}: no hard links here ({error.strerror}); further names of a save are copies")
        shutil.copyfile(source, target)
        with open(target, "rb+") as copy:
            os.fsync(copy.fileno())


def sync_folder(folder: str) -> None:
    """Until its folder is on the disk, a power cut undoes a rename."""
    fd = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise
        notice(f"{folder}: this mount does not sync folders ({error.strerror}); a power cut may undo the newest save")
    finally:
        os.close(fd)


@functools.cache
def notice(text: str) -> None:
    """Log a warning once in the life of the process."""
    logger.warning("%s", text)


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass


def prune_checkpoints(
    save_dir: str, cfg: Any, run_id: str | None, rank_too: bool = True, but: Iterable[str] = ()
) -> list[str]:
    """Delete what retention (keep_* of `cfg`) no longer keeps; returns the paths. One process.

    Only files of our names that the run `run_id` wrote are counted or deleted (None: whichever run wrote them), and
    none of the names in `but`. A file that cannot be deleted stays, with a warning.
    """
    save_dir = expand(save_dir)
    names = os.listdir(save_dir) if os.path.isdir(save_dir) else []
    if run_id is not None and stale_checkpoints(names, cfg, rank_too):  # ask the files only where it matters
        prunable = [
            n for n in names if (name := CheckpointName.parse(n)) and name.kind in ("update", "epoch", "ranked")
        ]
        names = [name for name in prunable if written_by(os.path.join(save_dir, name)) == run_id]
    removed = []
    stale = [name for name in stale_checkpoints(names, cfg, rank_too) if name not in but]
    for path in [os.path.join(save_dir, name) for name in stale] + replaced_in_the_other_form(save_dir, but, run_id):
        try:
            keep_what_links_name(path)
            remove(path)
            removed.append(path)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: no longer kept, but cannot be deleted: %s", path, error)
    remove_folders_without_link(save_dir)
    return removed


def replaced_in_the_other_form(save_dir: str, saved: Iterable[str], run_id: str | None) -> list[str]:
    """checkpoint_last.pt where the run has just saved the folder checkpoint_last, or the other way round; and best."""
    names = [name for name in map(CheckpointName.parse, saved) if name is not None and name.kind in ("last", "best")]
    others = [os.path.join(save_dir, str(dataclasses.replace(name, folder=not name.folder))) for name in names]
    return [path for path in others if run_id is not None and os.path.lexists(path) and written_by(path) == run_id]


def written_by(path: str) -> str | None:
    """The id of the run that wrote the file, None if it cannot be read."""
    try:
        stat = os.stat(path)
        return _written_by(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    except (OSError, CheckpointError):
        return None


@functools.lru_cache(maxsize=4096)
def _written_by(path: str, *_identity: int) -> str | None:
    facts = read_facts(path)
    return facts.run_id if facts.problem is None else None


# ---------------------------------------------------------------------------------------------------------- folders


def publish_checkpoint_folder(state: dict[str, Any], foldername: str | os.PathLike, group: Any = None) -> int:
    """Write `state` as the folder `foldername`: complete, checksummed and on the disk, or not at all. Collective.

    Every rank writes its part of it. Returns the bytes of all its files.
    Raises: on all ranks UnsavableValueError, CheckpointWriteError; `foldername` is then what it was before.
    """
    path = expand(foldername).rstrip("/")
    temporary, hold = (
        os.path.join(os.path.dirname(path), on_rank_0(lambda: temporary_name(os.path.basename(path)), group)),
        None,
    )
    try:
        hold = on_rank_0(lambda: hold_folder(temporary, path), group, share=False)
        nbytes = checkpoint_file.write_checkpoint_folder(state, temporary, group)
        on_rank_0(lambda: put_in_place(temporary, path), group)
        return nbytes
    except CheckpointError as error:
        raise type(error)(path, error.problem + hint_for(error.problem), error.record, error.rank) from error
    finally:
        if hold is not None:
            os.close(hold)
        if distributed_utils.get_rank(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # where it was put in place there is none


def hold_folder(temporary: str, path: str) -> int:
    """Make the folder and mark it as being written by a living process. Returns the descriptor that holds it."""
    try:
        os.makedirs(temporary)
        fd = os.open(temporary, os.O_RDONLY)
    except OSError as error:
        raise write_error(path, error) from error
    lock(fd)
    return fd


def put_in_place(temporary: str, path: str) -> None:
    """Give a folder its name. What has the name steps aside for an instant, and back if that was the last one."""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, temporary_name(name).removesuffix(".tmp") + ".old")
    try:
        sync_folder(temporary)
        if os.path.lexists(path):
            os.rename(path, aside)
        try:
            os.rename(temporary, path)
        except OSError:
            put_back(aside)
            raise
        sync_folder(folder)
        remove(aside)
    except OSError as error:
        raise write_error(path, error) from error


def put_back(aside: str) -> bool:
    """Undo the first half of `put_in_place`. False: there is nothing to undo."""
    folder, name = os.path.split(aside)
    path = os.path.join(folder, re.fullmatch(r"\.(.+)\.[0-9]+\.old", name)[1])
    if not os.path.lexists(aside) or os.path.lexists(path):
        return False
    os.rename(aside, path)
    return True


def place_of_folder(path: str, epoch: int, num_updates: int) -> str:
    """Where a save whose first name is `path` has its folder: there, unless that is a link, checkpoint_last or _best.

    What links alone name is hidden, so that retention does not count it, and new each time: a link changes over in
    one instant.
    """
    if CheckpointName.parse(os.path.basename(path)).kind not in ("last", "best"):
        keep_what_links_name(path)
        return path
    return free_name(os.path.join(os.path.dirname(path), linked_name(epoch, num_updates)))


def linked_name(epoch: int, num_updates: int) -> str:
    return f".checkpoint_{epoch}_{num_updates}"


def is_linked_name(filename: str) -> bool:
    return re.fullmatch(r"\.checkpoint_[0-9]+_[0-9]+(-[0-9]+)?", filename) is not None


def name_folder(content: str, paths: list[str]) -> None:
    """Give the folder `content` all names of the save, in the order given: last and best are links to it."""
    for path in paths:
        if path != content and CheckpointName.parse(os.path.basename(path)).kind in ("last", "best"):
            replace_link(path, os.path.basename(content))
        elif path != content:
            keep_what_links_name(path)
            clone_folder(content, path)
    try:
        sync_folder(os.path.dirname(content))
    except OSError as error:
        raise write_error(paths[-1], error) from error


def replace_link(path: str, target: str) -> None:
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, temporary_name(name))
    try:
        unlink(temporary)
        os.symlink(target, temporary)
        if os.path.isdir(path) and not os.path.islink(path):  # saved under this name itself, not by a run
            put_in_place(temporary, path)
        else:
            os.replace(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        unlink(temporary)


def clone_folder(source: str, path: str) -> None:
    """A folder with the same files, linked and not copied, under another name."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, temporary_name(name))
    try:
        os.makedirs(temporary)
        for entry in os.listdir(source):
            link_or_copy(os.path.join(source, entry), os.path.join(temporary, entry))
        put_in_place(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def links_to(path: str) -> list[str]:
    """checkpoint_last and checkpoint_best, as far as they are links to the folder `path` beside them."""
    folder, name = os.path.split(path)
    links = [os.path.join(folder, str(CheckpointName(kind, folder=True))) for kind in ("best", "last")]
    return [link for link in links if os.path.islink(link) and os.readlink(link) == name]


def keep_what_links_name(path: str) -> None:
    """Before the folder `path` is deleted or replaced: what a link names stays, under a hidden name."""
    links, name = links_to(path), CheckpointName.parse(os.path.basename(path))
    if not links:
        return
    facts = read_facts(path)
    hidden = free_name(os.path.join(os.path.dirname(path), linked_name(name.epoch or 0, max(facts.num_updates, 0))))
    clone_folder(path, hidden)
    for link in links:
        replace_link(link, os.path.basename(hidden))


def remove_folders_without_link(save_dir: str) -> list[str]:
    """Remove the hidden folders that no link names any more."""
    hidden = [name for name in os.listdir(save_dir) if is_linked_name(name)] if os.path.isdir(save_dir) else []
    removed = [path for name in hidden if not links_to(path := os.path.join(save_dir, name))]
    for path in removed:
        try:
            remove(path)
        except OSError as error:
            logger.warning("%s: no longer needed, but cannot be deleted: %s", path, error)
    return removed


def remove(path: str) -> None:
    """Remove a file, a link, or a folder, whose name is free before the first of its files is gone."""
    if os.path.islink(path) or not os.path.isdir(path):
        with freed_later(path):
            return unlink(path)
    folder, name = os.path.split(path)
    if not is_temporary_name(name) and not name.endswith(".old"):
        temporary = os.path.join(folder, temporary_name(name))
        os.rename(path, temporary)
        path = temporary
    shutil.rmtree(path)


def free_name(path: str) -> str:
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = f"{path}-{number}"
    return free


def bytes_of(path: str) -> int:
    """The bytes of a file, or of all files of a folder."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(entry.stat().st_size for entry in os.scandir(path))


# ------------------------------------------------------------------------------------------------- choosing a file


@dataclass(frozen=True)
class FileFacts:
    """What a choice needs to know of one file. `problem` is a sentence on its damage, None where it can be opened."""

    path: str
    problem: str | None = None
    num_updates: int = -1
    run_id: str | None = None
    checkpoint_cfg: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """Which file a run starts from.

    source: "own", "restore_file", "finetune_from_model" or "scratch". asked_for: the user named it, nothing replaces it.
    new_wish: a restore_file that the run's own checkpoints do not carry. passed_over: (path, problem) of damaged files.
    """

    source: str
    path: str | None = None
    asked_for: bool = False
    new_wish: bool = False
    passed_over: tuple[tuple[str, str], ...] = ()


def choose(cfg: Any, last: FileFacts | None, others: list[FileFacts], same_file: bool = False) -> Choice:
    """Decide what to start from; looks at nothing but its arguments.

    Args:    last: of checkpoint_last.pt in save_dir, None where it does not exist.
             others: of the other checkpoints there; only asked where `last` is missing or has a problem.
             same_file: restore_file is the run's own checkpoint_last.pt by another way of writing.
    Raises:  CheckpointWishError, NoUsableCheckpointError.
    """
    wish = restore_wish(cfg)
    if wish and cfg.finetune_from_model:
        raise CheckpointWishError(wish, TWO_WISHES)
    if same_file:
        return Choice("own", wish, asked_for=True)
    own, passed_over = last, ()
    if last is None or last.problem is not None:
        candidates = ([last] if last else []) + sorted(others, key=lambda facts: facts.num_updates, reverse=True)
        own = next((facts for facts in candidates if facts.problem is None), None)
        passed_over = tuple((facts.path, facts.problem) for facts in candidates if facts.problem is not None)
        if own is None and passed_over:
            raise none_usable(passed_over)
    if own is not None:
        if wish and not carries(own.checkpoint_cfg, wish):
            return Choice("restore_file", wish, asked_for=True, new_wish=True, passed_over=passed_over)
        return Choice("own", own.path, passed_over=passed_over)
    if wish:
        return Choice("restore_file", wish, asked_for=True)
    if cfg.finetune_from_model:
        return Choice("finetune_from_model", expand(cfg.finetune_from_model), asked_for=True)
    return Choice("scratch")


def none_usable(passed_over: Iterable[tuple[str, str]]) -> NoUsableCheckpointError:
    passed_over = list(passed_over)
    listed = "".join(f"\n  {os.path.basename(path)}: {problem}" for path, problem in passed_over)
    problem = (
        f"none of the run's own checkpoints can be used:{listed}\nA fresh start here would hide that. Move these files "
        "away to start over or from checkpoint.restore_file=FILE, or use another run_dir"
    )
    return NoUsableCheckpointError(os.path.dirname(passed_over[0][0]), problem)


def restore_wish(cfg: Any) -> str | None:
    """The path that restore_file asks for, None where it only says "the run's own"."""
    wish = cfg.restore_file
    return None if not wish or wish == DEFAULT_RESTORE_FILE else expand(wish)


def carries(checkpoint_cfg: Mapping[str, Any], wish: str) -> bool:
    """Whether a checkpoint of the run was saved with this restore_file, so that the wish has been fulfilled."""
    carried = checkpoint_cfg.get("restore_file")
    return bool(carried) and (expand(carried) == wish or os.path.abspath(expand(carried)) == os.path.abspath(wish))


def resets_to_apply(cfg: Any, choice: Choice, saved: Mapping[str, Any]) -> tuple[dict[str, bool], list[str]]:
    """The reset flags that this load applies, and those that the run's own checkpoint says were applied already."""
    typed = [flag for flag in RESET_FLAGS if getattr(cfg, flag)]
    done = [flag for flag in typed if choice.source == "own" and saved.get(flag) is True]
    return {flag: flag in typed and flag not in done for flag in RESET_FLAGS}, done


def expand(path: str | os.PathLike) -> str:
    return os.path.expanduser(os.fspath(path))


def read_facts(path: str, whole: bool = False) -> FileFacts:
    """Facts of a file that exists; `whole` reads and checks every byte.

    Raises: CheckpointError where the file may be fine but the system does not let us read it.
    """
    try:
        with checkpoint_file.open_local_checkpoint(path) as reader:
            saved = reader.skeleton
        history = saved.get("optimizer_history") or [{}]
        facts = FileFacts(
            path,
            (checkpoint_file.verify_checkpoint(path) or [None])[0] if whole else None,
            int(history[-1].get("num_updates") or 0),
            saved.get("run_id"),
            (saved.get("cfg") or {}).get("checkpoint") or {},
        )
    except (CheckpointDamagedError, checkpoint_file.NotACheckpointError) as error:
        return FileFacts(path, error.problem)
    except checkpoint_file.CheckpointNotFoundError:
        if not os.path.islink(path):
            raise
        return FileFacts(path, f"is a link to {os.readlink(path)}, which is not there")
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        return FileFacts(path, f"its contents are not those of a checkpoint ({type(error).__name__}: {error})")
    return facts


def gather_facts(save_dir: str, known: Mapping[str, str]) -> tuple[FileFacts | None, list[FileFacts]]:
    """Facts of the run's last checkpoint, and of the others where it is missing or damaged.

    Where the run changed between files and folders there may be two, checkpoint_last.pt and checkpoint_last; the one
    with more updates is the last. known: damage found by loading.
    """

    def facts_of(path: str, whole: bool) -> FileFacts:
        return FileFacts(path, known[path]) if path in known else read_facts(path, whole)

    lasts = [facts_of(path, whole=False) for path in last_paths(save_dir)]
    last = next((facts for facts in lasts if facts.problem is not None), None)
    if lasts and last is None:
        return max(lasts, key=lambda facts: facts.num_updates), []
    seen = last.path if last is not None else None
    return last, [facts_of(path, whole=True) for path in checkpoint_paths(save_dir) if path != seen]


def last_paths(save_dir: str) -> list[str]:
    """checkpoint_last as a folder and checkpoint_last.pt, as far as they are there."""
    paths = [os.path.join(save_dir, str(CheckpointName("last", folder=folder))) for folder in (True, False)]
    return [path for path in paths if os.path.lexists(path)]


def decide_what_to_load(cfg: Any, known: Mapping[str, str]) -> tuple[Choice, dict[str, Any]]:
    """Look into save_dir and choose. Returns the choice and what its file's config says of SAVED_SETTINGS."""
    save_dir, wish = expand(cfg.save_dir), restore_wish(cfg)
    if wish and not os.path.exists(wish) and os.path.exists(os.path.join(save_dir, wish)):
        wish = os.path.join(save_dir, wish)  # restore_file=checkpoint_best.pt
    default = os.path.join(save_dir, str(CheckpointName("last")))
    same_file = bool(wish) and os.path.realpath(wish) in map(os.path.realpath, [default, *last_paths(save_dir)])
    last, others = (None, []) if same_file else gather_facts(save_dir, known)
    choice = choose(cfg, last, others, same_file)
    if choice.asked_for:
        if choice.source != "finetune_from_model":
            choice = dataclasses.replace(choice, path=wish)
        facts = facts_of_wish(choice)
    else:
        facts = next((facts for facts in (last, *others) if facts and facts.path == choice.path), None)
    saved = facts.checkpoint_cfg if facts else {}
    return choice, {name: saved[name] for name in SAVED_SETTINGS if isinstance(saved.get(name), (bool, str))}


def facts_of_wish(choice: Choice) -> FileFacts:
    """Raise, naming the override that asked for the file, unless its structure is that of a checkpoint."""
    any_folder = choice.source == "finetune_from_model" and os.path.isdir(choice.path)  # also of another program
    try:
        checkpoint_file.open_local_checkpoint(choice.path, own_format=not any_folder).close()
    except CheckpointError as error:
        raise asked_for_error(choice, error) from error
    facts = FileFacts(choice.path) if any_folder else read_facts(choice.path)
    if facts.problem is not None:
        raise asked_for_error(choice, CheckpointDamagedError(choice.path, facts.problem))
    return facts


def asked_for_error(choice: Choice, error: CheckpointError) -> CheckpointError:
    key = "finetune_from_model" if choice.source == "finetune_from_model" else "restore_file"
    hint = f". It was asked for by checkpoint.{key}={choice.path}: give another path, or leave the setting out"
    return type(error)(error.path, error.problem + hint, error.record, error.rank)


# --------------------------------------------------------------------------------------------------------- loading


def load_checkpoint(cfg: Any, trainer: Any) -> tuple[dict[str, Any] | None, Any]:
    """Continue the run, or begin it from what the config asks for. All ranks call it; rank 0 chooses, all follow.

    Returns: (extra_state, epoch_itr); extra_state is None where the run starts at update 0.
    Raises:  on all ranks, before the first update, whatever one of them met. Nobody trains on a half-loaded state.
    """
    group = trainer.data_parallel_process_group
    known: dict[str, str] = {}  # damage found while loading
    on_rank_0(lambda: remove_stale_temporaries(expand(cfg.save_dir)), group)
    while True:
        told, saved = on_rank_0(lambda: choice_to_tell(decide_what_to_load(cfg, known)), group)
        choice = Choice(**{**told, "passed_over": tuple(map(tuple, told["passed_over"]))})
        say(choice, cfg)
        try:
            if choice.source in ("own", "restore_file"):
                return continue_from(cfg, trainer, choice, saved)
            if choice.source == "finetune_from_model":
                trainer.load_model(choice.path)
            return None, trainer.get_train_iterator(epoch=1)
        except CheckpointDamagedError as error:  # raised on all ranks
            if choice.asked_for:
                raise asked_for_error(choice, error) from error
            logger.error("%s", error)
            known[choice.path] = error.problem


def choice_to_tell(decided: tuple[Choice, dict]) -> tuple[dict, dict]:
    choice, saved = decided
    return {**vars(choice), "passed_over": [list(pair) for pair in choice.passed_over]}, saved


def say(choice: Choice, cfg: Any) -> None:
    for path, problem in choice.passed_over:
        logger.error("DAMAGED CHECKPOINT PASSED OVER: %s: %s", path, problem)
    if choice.passed_over and not choice.new_wish:
        logger.error("GOING BACK TO AN OLDER CHECKPOINT: %s", choice.path)
    elif choice.new_wish:
        logger.warning(
            "NEW RESTORE_FILE: THE RUN IS TAKEN TO %s, which its own checkpoints in %s do not carry",
            choice.path,
            cfg.save_dir,
        )
    elif choice.source == "scratch":
        logger.info("no checkpoint in %s: a fresh start", cfg.save_dir)
    else:
        logger.info("starting from %s (%s)", choice.path, choice.source)


def continue_from(cfg: Any, trainer: Any, choice: Choice, saved: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    group = trainer.data_parallel_process_group
    resets, done = resets_to_apply(cfg, choice, saved)
    for flag in done:
        logger.info("checkpoint.%s: already applied in this run, so not again", flag)
    # What was left out when the run began is in its own checkpoints since.
    whole = {"whole": True} if choice.source == "own" and takes_a_part(cfg) else {}
    extra_state = trainer.load_checkpoint(
        choice.path,
        reset_optimizer=resets["reset_optimizer"],
        reset_lr_scheduler=resets["reset_lr_scheduler"],
        optimizer_overrides=cfg.optimizer_overrides or None,
        reset_meters=resets["reset_meters"],
        **whole,
    )
    forget_other_metric(cfg, trainer, saved)
    epoch_itr, error = None, None
    try:
        position = extra_state.get("train_iterator")
        if resets["reset_dataloader"] or not position:
            epoch_itr = trainer.get_train_iterator(epoch=1)
        else:
            epoch_itr = trainer.get_train_iterator(epoch=position["epoch"])
            epoch_itr.load_state_dict(position)
    except Exception as problem:  # the other ranks wait for the agreement
        error = problem
    distributed_utils.agree(error, group)
    num_updates = trainer.get_num_updates()
    on_rank_0(lambda: put_aside(cfg, choice, num_updates), group)
    return extra_state, epoch_itr


def takes_a_part(cfg: Any) -> bool:
    """Whether the config leaves something of a checkpoint out, or takes it under other names."""
    return any(getattr(cfg, name) != getattr(CheckpointConfig(), name) for name in PART_SETTINGS)


def forget_other_metric(cfg: Any, trainer: Any, saved: Mapping[str, Any]) -> None:
    """A best score of another metric says nothing about this one."""
    for name in ("best_checkpoint_metric", "maximize_best_checkpoint_metric"):
        was, now = saved.get(name), getattr(cfg, name)
        if was is not None and was != now:
            logger.warning("checkpoint.%s was %s and is %s: best score and patience start anew", name, was, now)
            trainer.best.reset()


def put_aside(cfg: Any, choice: Choice, num_updates: int) -> list[str]:
    """After a load: keep damaged files under another name, and those that a new wish leaves behind in a folder."""
    moved = [move_aside(path, f"{path}.damaged") for path, _ in choice.passed_over]
    if choice.new_wish:
        save_dir = expand(cfg.save_dir)
        for path in checkpoint_paths(save_dir):
            if os.path.realpath(path) != os.path.realpath(choice.path) and read_facts(path).num_updates > num_updates:
                os.makedirs(os.path.join(save_dir, ABANDONED), exist_ok=True)
                moved.append(move_aside(path, os.path.join(save_dir, ABANDONED, os.path.basename(path))))
    for path in filter(None, moved):
        logger.warning("KEPT AS %s", path)
    if moved:
        sync_folder(expand(cfg.save_dir))
    return moved


def move_aside(path: str, target: str) -> str | None:
    """Move a checkpoint; of a link what it alone names. Returns where it is now, None: under another name's."""
    if not os.path.islink(path):
        return move_to_free_name(path, target)
    content = os.path.join(os.path.dirname(path), os.readlink(path))
    others = [link for link in links_to(content) if link != path]
    hidden = is_linked_name(os.path.basename(content)) and os.path.isdir(content) and not others
    moved = move_to_free_name(content, target) if hidden else None
    os.unlink(path)
    return moved


def move_to_free_name(path: str, target: str) -> str:
    stem, dot, suffix = target.rpartition(".pt") if ".pt" in os.path.basename(target) else (target, "", "")
    number = 1
    while os.path.lexists(target):
        number += 1
        target = f"{stem}-{number}{dot}{suffix}"
    os.rename(path, target)
    return target


def remove_stale_temporaries(save_dir: str) -> list[str]:
    """Remove what a killed save left behind: temporary files of our names that no living process is writing."""
    removed = []
    for name in os.listdir(save_dir) if os.path.isdir(save_dir) else []:
        path = os.path.join(save_dir, name)
        try:
            if is_name_aside(name):
                removed += [] if put_back(path) else [path]
                remove(path)
            elif is_temporary_name(name) and not is_held(path):
                remove(path)
                removed.append(path)
        except OSError as error:
            logger.warning("%s: left by a killed save, but cannot be removed: %s", path, error)
    removed += remove_folders_without_link(save_dir)
    for path in removed:
        logger.info("%s: removed, a killed save had left it", path)
    return removed


def is_name_aside(filename: str) -> bool:
    match = re.fullmatch(r"\.(.+)\.[0-9]+\.old", filename)
    return match is not None and is_name_of_content(match[1])


def is_held(path: str) -> bool:
    """Whether a living process writes the temporary file or folder."""
    if os.path.islink(path):
        return False
    fd = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR)
    try:
        return not lock(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------------------ small tools


def load_checkpoint_to_cpu(path: str | os.PathLike) -> dict[str, Any]:
    """The whole checkpoint with tensors on the CPU, checked against its checksums. One process; nothing is executed."""
    with checkpoint_file.open_local_checkpoint(expand(path), own_format=False) as reader:
        return reader.materialize(reader.skeleton)


def checkpoint_paths(folder: str | os.PathLike, pattern: str | None = None) -> list[str]:
    """The checkpoints in a folder, the newest first: by update, else epoch, in the name; those without come last.

    pattern: a regular expression for the whole file name, as in fairseq (its first group, a number, orders the files).
    """
    folder = expand(folder)
    found: list[tuple[tuple[float, ...], str]] = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if pattern is not None:
            match = re.fullmatch(pattern, name)
            if match:
                found.append(((float(match[1]) if match.re.groups else 0.0,), name))
        elif (parsed := CheckpointName.parse(name)) is not None:
            found.append(((parsed.num_updates or -1, parsed.epoch or -1), name))
    return [os.path.join(folder, name) for _, name in sorted(found, key=lambda item: item[0], reverse=True)]


def verify_checkpoint(path: str | os.PathLike) -> list[str]:
    """Read every byte; return what is wrong with the file, a sentence each, [] when all is well."""
    return checkpoint_file.verify_checkpoint(expand(path))


def on_rank_0(do: Any, group: Any, share: bool = True) -> Any:
    """Let rank 0 do it; all ranks get its result (share) and all raise if it failed. Results are plain values."""
    result, error = None, None
    if distributed_utils.get_rank(group) == 0:
        try:
            result = do()
        except Exception as problem:  # raised on all ranks right below
            error = problem
    told = checkpoint_file.told_by_rank_0(error, result if share else None, group)
    return told if share else result
