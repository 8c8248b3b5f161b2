"""Which file a run starts from."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import checkpoint_file
from checkpoint_file import CheckpointDamagedError, CheckpointError
from checkpoint_utils.config import RESET_FLAGS, SAVED_SETTINGS, TWO_WISHES, expand, restore_wish
from checkpoint_utils.errors import CheckpointWishError, NoUsableCheckpointError
from checkpoint_utils.facts import FileFacts, doubts_of_last, gather_facts, last_paths, read_facts
from checkpoint_utils.names import CheckpointName
from checkpoint_utils.object_store import fetch
from checkpoint_utils.urls import is_url

logger = logging.getLogger(__name__)


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


def carries(checkpoint_cfg: Mapping[str, Any], wish: str) -> bool:
    """Whether a checkpoint of the run was saved with this restore_file, so that the wish has been fulfilled."""
    carried = checkpoint_cfg.get("restore_file")
    return bool(carried) and (expand(carried) == wish or os.path.abspath(expand(carried)) == os.path.abspath(wish))


def resets_to_apply(cfg: Any, choice: Choice, saved: Mapping[str, Any]) -> tuple[dict[str, bool], list[str]]:
    """The reset flags that this load applies, and those that the run's own checkpoint says were applied already."""
    typed = [flag for flag in RESET_FLAGS if getattr(cfg, flag)]
    done = [flag for flag in typed if choice.source == "own" and saved.get(flag) is True]
    return {flag: flag in typed and flag not in done for flag in RESET_FLAGS}, done


def decide_what_to_load(cfg: Any, known: Mapping[str, str]) -> tuple[Choice, dict[str, Any]]:
    """Look into save_dir and choose. Returns the choice and what its file's config says of SAVED_SETTINGS."""
    save_dir, wish = expand(cfg.save_dir), restore_wish(cfg)
    if wish and not os.path.exists(wish) and os.path.exists(os.path.join(save_dir, wish)):
        wish = os.path.join(save_dir, wish)  # restore_file=checkpoint_best.pt
    default = os.path.join(save_dir, str(CheckpointName("last")))
    same_file = bool(wish) and os.path.realpath(wish) in map(os.path.realpath, [default, *last_paths(save_dir)])
    last, others = (None, []) if same_file else gather_facts(save_dir, known)
    if last is not None and last.problem is None and (doubt := doubts_of_last(last, save_dir)):
        logger.error("%s: %s. THE RUN GOES ON FROM IT; FOR ANOTHER ONE ADD checkpoint.restore_file=FILE", last.path, doubt)
    choice = choose(cfg, last, others, same_file)
    if choice.asked_for:
        if choice.source != "finetune_from_model":
            choice = dataclasses.replace(choice, path=wish)
        if is_url(choice.path):
            choice = dataclasses.replace(choice, path=fetch(choice.path, save_dir))
        facts = facts_of_wish(choice)
    else:
        facts = next((facts for facts in (last, *others) if facts and facts.path == choice.path), None)
    saved = facts.checkpoint_cfg if facts else {}
    return choice, {name: saved[name] for name in SAVED_SETTINGS if isinstance(saved.get(name), (bool, str, int))}


def facts_of_wish(choice: Choice) -> FileFacts:
    """Raise, naming the override that asked for the file, unless its structure is that of a checkpoint."""
    try:
        with checkpoint_file.open_local_checkpoint(choice.path, own_format=False) as reader:
            own = checkpoint_file.is_own_format(reader.skeleton)
            if own:
                checkpoint_file.require_own_format(reader.skeleton, choice.path)
    except CheckpointError as error:
        raise asked_for_error(choice, error) from error
    facts = read_facts(choice.path) if own else FileFacts(choice.path)
    if facts.problem is not None:
        raise asked_for_error(choice, CheckpointDamagedError(choice.path, facts.problem))
    return facts


def asked_for_error(choice: Choice, error: CheckpointError) -> CheckpointError:
    key = "finetune_from_model" if choice.source == "finetune_from_model" else "restore_file"
    hint = f". It was asked for by checkpoint.{key}={choice.path}: give another path, or leave the setting out"
    return type(error)(error.path, error.problem + hint, error.record, error.rank)
