"""`fairtrain-checkpoint prune DIR`: apply a retention rule to the checkpoints of a run. Says what it would delete;
deletes with --apply. The rule is the run's own (keep_* of its newest checkpoint's config), where nothing else is typed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from types import SimpleNamespace
from typing import Any

import checkpoint_utils
from trainer import run_folder
from trainer.errors import ConfigError
from trainer.printed import as_json, size, table
from trainer.tools.average import save_dir_of
from trainer.tools.inspect import bytes_on_disk
from trainer.tools.opened import mapping, open_any

HELP = "apply a retention rule to a folder: says what it would delete, and with --apply deletes it"
KEEP = ("keep_interval_updates", "keep_last_epochs", "keep_best_checkpoints")
RANKING = ("best_checkpoint_metric", "maximize_best_checkpoint_metric")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="DIR", help="the folder of a run, or of its checkpoints")
    for name, what in zip(KEEP, ("checkpoint_{E}_{U}.pt", "checkpoint{E}.pt", "checkpoint.best_{metric}_{value}.pt")):
        command.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"{what} that stay, -1: all (default: as the run's config)",
        )
    command.add_argument("--apply", action="store_true", help="delete; without it nothing is")
    command.add_argument("--dry-run", action="store_true", help="the default: only say what would be deleted")


def run(arguments: argparse.Namespace) -> int:
    folder = os.path.expanduser(arguments.folder)
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder}: there is no such folder")
    if arguments.apply and arguments.dry_run:
        raise ConfigError("--apply deletes and --dry-run does not: leave one of them out")
    save_dir = save_dir_of(folder)
    run_id, rule = rule_for(save_dir, {name: getattr(arguments, name) for name in KEEP})
    with held(folder) if arguments.apply else contextlib.nullcontext():
        stale = checkpoint_utils.stale_paths(save_dir, rule, run_id)
        sizes = {path: bytes_on_disk(path) for path in stale}
        deleted = checkpoint_utils.prune_checkpoints(save_dir, rule, run_id) if arguments.apply else []
    left = [path for path in stale if path not in deleted]
    report = {"rule": vars(rule), "applied": arguments.apply, "stale": stale, "deleted": deleted, "bytes": sizes}
    if arguments.json:
        print(as_json(report))
    else:
        print("\n".join(lines_of(save_dir, rule, sizes, arguments.apply)))
    return 1 if arguments.apply and left else 0


def rule_for(save_dir: str, typed: dict[str, int | None]) -> tuple[str | None, Any]:
    """(the run whose files are counted, the rule). Raises ConfigError where no checkpoint of a run is there."""
    paths = checkpoint_utils.checkpoint_paths(save_dir)
    lasts = [path for path in paths if os.path.basename(path).startswith("checkpoint_last")]
    if not paths:
        raise ConfigError(f"{save_dir}: there is no checkpoint in this folder")
    with open_any((lasts or paths)[0]) as checkpoint:
        saved = mapping(mapping(checkpoint.state.get("cfg")).get("checkpoint"))
        run_id = checkpoint.state.get("run_id")
    default = checkpoint_utils.CheckpointConfig()
    rule = {name: saved.get(name, getattr(default, name)) for name in (*KEEP, *RANKING)}
    rule |= {name: value for name, value in typed.items() if value is not None}
    low = [name for name in KEEP if not isinstance(rule[name], int) or rule[name] < -1]
    if low:
        raise ConfigError(f"--{low[0].replace('_', '-')} {rule[low[0]]}: -1 keeps all, N the newest N, 0 none")
    return run_id, SimpleNamespace(**rule)


@contextlib.contextmanager
def held(folder: str) -> Any:
    """Hold the folder of a run, so that none is alive in it. A folder of checkpoints alone has nothing to hold."""
    if not os.path.exists(os.path.join(folder, ".lock")):
        yield
        return
    holding = run_folder.prepare(folder, None, is_master=True)
    try:
        yield
    finally:
        holding.close()


def lines_of(save_dir: str, rule: Any, sizes: dict[str, int], applied: bool) -> list[str]:
    kept = ", ".join(f"{name}={getattr(rule, name)}" for name in KEEP)
    lines = [f"{save_dir}: {kept}"]
    if not sizes:
        return [*lines, "nothing to delete"]
    lines += table([[os.path.basename(path), size(nbytes)] for path, nbytes in sizes.items()], ["name", "bytes"])
    if applied:
        return [*lines, f"deleted {len(sizes)} names"]
    return [
        *lines,
        f"{len(sizes)} names would be deleted; add --apply to do it (bytes are freed with a file's last name)",
    ]
