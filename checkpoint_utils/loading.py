"""Continue a run, or begin it from what the config asks for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import distributed_utils
from checkpoint_file import CheckpointDamagedError
from checkpoint_utils.agreement import on_rank_0
from checkpoint_utils.best_score import is_score
from checkpoint_utils.choosing import Choice, asked_for_error, decide_what_to_load, resets_to_apply
from checkpoint_utils.config import KEEP, expand, takes_a_part
from checkpoint_utils.facts import own_checkpoints
from checkpoint_utils.retention import prune_checkpoints, put_aside, remove_stale_temporaries

logger = logging.getLogger(__name__)


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
                raise distributed_utils.agreed(asked_for_error(choice, error)) from error
            tell(logging.ERROR, "%s", error)
            known[choice.path] = error.problem


def load_own_checkpoint(cfg: Any, trainer: Any, at_most: int) -> tuple[str, dict[str, Any]] | None:
    """Load the run's own checkpoint of update `at_most`, or the newest before it that is sound. Collective.

    Returns (path, extra_state), None where there is none. The data position is left to the caller.
    """
    group = trainer.data_parallel_process_group
    told = on_rank_0(lambda: own_checkpoints(expand(cfg.save_dir), trainer.run_id, at_most), group)
    for path, num_updates in told:
        if num_updates != at_most:
            missing = "the checkpoint of update %d is not there (any more): %s (update %d)"
            tell(logging.WARNING, missing, at_most, path, num_updates)
        try:
            return path, trainer.load_checkpoint(path, whole=True)
        except CheckpointDamagedError as error:  # raised on all ranks; the next load overwrites everything
            tell(logging.ERROR, "DAMAGED CHECKPOINT PASSED OVER: %s", error)
    return None


def choice_to_tell(decided: tuple[Choice, dict]) -> tuple[dict, dict]:
    choice, saved = decided
    return {**vars(choice), "passed_over": [list(pair) for pair in choice.passed_over]}, saved


def tell(level: int, message: str, *args: Any) -> None:
    """What every rank knows is told once, by rank 0."""
    if distributed_utils.is_master():
        logger.log(level, message, *args)


def say(choice: Choice, cfg: Any) -> None:
    for path, problem in choice.passed_over:
        tell(logging.ERROR, "DAMAGED CHECKPOINT PASSED OVER: %s: %s", path, problem)
    if choice.passed_over and not choice.new_wish:
        tell(logging.ERROR, "GOING BACK TO AN OLDER CHECKPOINT: %s", choice.path)
    elif choice.new_wish:
        tell(
            logging.WARNING,
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
    report = getattr(trainer, "load_report", None)
    if report is not None:
        report.skipped += [f"checkpoint.{flag} (applied in this run already)" for flag in done]
        to_begin = resets["reset_dataloader"] or not extra_state.get("train_iterator")
        (report.reset if to_begin else report.restored).append("position in the data")
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
    if choice.source == "own" and not choice.passed_over and not cfg.no_save:
        has_score = is_score(extra_state.get("val_loss"))
        on_rank_0(lambda: prune_as_the_save_would(cfg, choice.path, trainer.run_id, saved, has_score), group)
    return extra_state, epoch_itr


def prune_as_the_save_would(cfg: Any, path: str, run_id: str, saved: Mapping[str, Any], has_score: bool) -> None:
    """Whoever saved `path` may have been killed before it pruned, and a run that has ended saves no more."""
    if all(saved.get(name) == getattr(cfg, name) for name in KEEP):
        prune_checkpoints(cfg.save_dir, cfg, run_id, has_score, but=[os.path.basename(path)])


def forget_other_metric(cfg: Any, trainer: Any, saved: Mapping[str, Any]) -> None:
    """A best score of another metric says nothing about this one."""
    for name in ("best_checkpoint_metric", "maximize_best_checkpoint_metric"):
        was, now = saved.get(name), getattr(cfg, name)
        if was is not None and was != now:
            changed = "checkpoint.%s was %s and is %s: best score and patience start anew"
            tell(logging.WARNING, changed, name, was, now)
            trainer.best.reset()
