"""What is deleted, and what is put aside."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from checkpoint_file import CheckpointError
from checkpoint_utils.choosing import Choice
from checkpoint_utils.config import expand
from checkpoint_utils.facts import checkpoint_paths, read_facts, written_by
from checkpoint_utils.file_system import is_held, move_to_free_name, remove, sync_folder
from checkpoint_utils.folders import keep_what_links_name, links_to, put_back, remove_folders_without_link
from checkpoint_utils.names import (
    ABANDONED,
    DAMAGED,
    CheckpointName,
    is_linked_name,
    is_name_aside,
    is_temporary_name,
    stale_checkpoints,
)

logger = logging.getLogger(__name__)


def prune_checkpoints(
    save_dir: str, cfg: Any, run_id: str | None, rank_too: bool = True, but: Iterable[str] = ()
) -> list[str]:
    """Delete what retention (keep_* of `cfg`) no longer keeps; returns the paths. One process.

    Only files of our names that the run `run_id` wrote are counted or deleted (None: whichever run wrote them), and
    none of the names in `but`. A file that cannot be deleted stays, with a warning.
    """
    save_dir = expand(save_dir)
    removed = []
    for path in stale_paths(save_dir, cfg, run_id, rank_too, but) + replaced_in_the_other_form(save_dir, but, run_id):
        try:
            keep_what_links_name(path)
            remove(path)
            removed.append(path)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: no longer kept, but cannot be deleted: %s", path, error)
    remove_folders_without_link(save_dir)
    return removed


def stale_paths(
    save_dir: str, cfg: Any, run_id: str | None, rank_too: bool = True, but: Iterable[str] = ()
) -> list[str]:
    """What retention no longer keeps; nothing is deleted. Arguments as of `prune_checkpoints`."""
    save_dir = expand(save_dir)
    names = os.listdir(save_dir) if os.path.isdir(save_dir) else []
    if run_id is not None and stale_checkpoints(names, cfg, rank_too):  # ask the files only where it matters
        prunable = [
            n for n in names if (name := CheckpointName.parse(n)) and name.kind in ("update", "epoch", "ranked")
        ]
        names = [name for name in prunable if written_by(os.path.join(save_dir, name)) == run_id]
    return [os.path.join(save_dir, name) for name in stale_checkpoints(names, cfg, rank_too) if name not in but]


def replaced_in_the_other_form(save_dir: str, saved: Iterable[str], run_id: str | None) -> list[str]:
    """checkpoint_last.pt where the run has just saved the folder checkpoint_last, or the other way round; and best."""
    names = [name for name in map(CheckpointName.parse, saved) if name is not None and name.kind in ("last", "best")]
    others = [os.path.join(save_dir, str(dataclasses.replace(name, folder=not name.folder))) for name in names]
    return [path for path in others if run_id is not None and os.path.lexists(path) and written_by(path) == run_id]


def put_aside(cfg: Any, choice: Choice, num_updates: int) -> list[str]:
    """After a load: keep damaged files in a folder where nothing counts or deletes them, and in another one those that a
    new wish leaves behind."""
    save_dir = expand(cfg.save_dir)
    if choice.passed_over:
        os.makedirs(os.path.join(save_dir, DAMAGED), exist_ok=True)
    moved = [move_aside(p, os.path.join(save_dir, DAMAGED, os.path.basename(p))) for p, _ in choice.passed_over]
    if choice.new_wish:
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


def remove_stale_temporaries(save_dir: str, is_written: Callable[[str], bool] = is_held) -> list[str]:
    """Remove what a killed save left behind: temporary files of our names that no living process is writing.

    is_written: whether one does. Who has the folder to himself knows that nobody may.
    """
    removed = []
    for name in os.listdir(save_dir) if os.path.isdir(save_dir) else []:
        path = os.path.join(save_dir, name)
        try:
            if is_name_aside(name):
                removed += [] if put_back(path) else [path]
                remove(path)
            elif is_temporary_name(name) and not is_written(path):
                remove(path)
                removed.append(path)
        except OSError as error:
            logger.warning("%s: left by a killed save, but cannot be removed: %s", path, error)
    removed += remove_folders_without_link(save_dir)
    for path in removed:
        logger.info("%s: removed, a killed save had left it", path)
    return removed
