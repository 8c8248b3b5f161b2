"""The names in the folder: the only place that writes one and reads one, and which of them a save has."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from checkpoint_utils.best_score import is_better, is_score

ABANDONED = "abandoned"
DAMAGED = "damaged"


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


def linked_name(epoch: int, num_updates: int) -> str:
    return f".checkpoint_{epoch}_{num_updates}"


def is_linked_name(filename: str) -> bool:
    return re.fullmatch(r"\.checkpoint_[0-9]+_[0-9]+(-[0-9]+)?", filename) is not None


def is_name_aside(filename: str) -> bool:
    match = re.fullmatch(r"\.(.+)\.[0-9]+\.old", filename)
    return match is not None and is_name_of_content(match[1])
