"""What is in the folder: the facts of one file, of the files of a run, and which run wrote them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import checkpoint_file
from checkpoint_file import CheckpointDamagedError, CheckpointError
from checkpoint_utils.config import expand
from checkpoint_utils.names import CheckpointName, plain_word


def ranked_scores(save_dir: str, metric: str) -> list[float]:
    names = map(CheckpointName.parse, os.listdir(save_dir) if os.path.isdir(save_dir) else [])
    return [name.value for name in names if name and name.kind == "ranked" and name.metric == plain_word(metric)]


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


@dataclass(frozen=True)
class FileFacts:
    """What a choice needs to know of one file. `problem` is a sentence on its damage, None where it can be opened."""

    path: str
    problem: str | None = None
    num_updates: int = -1
    run_id: str | None = None
    checkpoint_cfg: Mapping[str, Any] = field(default_factory=dict)


def read_facts(path: str, whole: bool = False) -> FileFacts:
    """Facts of a file that exists; `whole` reads and checks every byte.

    Raises: CheckpointError where the file may be fine but the system does not let us read it.
    """
    try:
        with checkpoint_file.open_local_checkpoint(path) as reader:
            saved = reader.skeleton
        history = saved.get("optimizer_history") or [{}]
        num_updates = int(history[-1].get("num_updates") or 0)
        problem = (checkpoint_file.verify_checkpoint(path) or [None])[0] if whole else None
        checkpoint_cfg = dict((saved.get("cfg") or {}).get("checkpoint") or {})
        facts = FileFacts(path, problem or name_problem(path, saved), num_updates, saved.get("run_id"), checkpoint_cfg)
    except (CheckpointDamagedError, checkpoint_file.NotACheckpointError) as error:
        return FileFacts(path, error.problem)
    except checkpoint_file.CheckpointNotFoundError:
        if not os.path.islink(path):
            raise
        return FileFacts(path, f"is a link to {os.readlink(path)}, which is not there")
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        return FileFacts(path, f"its contents are not those of a checkpoint ({type(error).__name__}: {error})")
    return facts


def name_problem(path: str, saved: Mapping[str, Any]) -> str | None:
    """What a checkpoint's name says otherwise than its content: another one was put in its place. None: nothing."""
    name = CheckpointName.parse(os.path.basename(path))
    history, extra_state = saved.get("optimizer_history") or [{}], saved.get("extra_state") or {}
    num_updates, position = history[-1].get("num_updates"), extra_state.get("train_iterator") or {}
    if name is None or num_updates is None:
        return None
    if name.kind == "update" and name.num_updates != num_updates:
        return f"is named for update {name.num_updates}, but holds update {num_updates}: another file was put in its place"
    epoch = position.get("epoch")
    if name.kind == "epoch" and epoch is not None and name.epoch not in (epoch, epoch - 1):
        return f"is named for epoch {name.epoch}, but holds epoch {epoch}: another file was put in its place"
    return None


def doubts_of_last(last: FileFacts, save_dir: str) -> str | None:
    """What speaks against checkpoint_last being what the run saved last: newer names, another run. None: nothing.

    Neither proves anything: a save that was cut off leaves newer names, and a folder may have been used before.
    """
    paths = [path for path in checkpoint_paths(save_dir) if CheckpointName.parse(os.path.basename(path)).kind == "update"]
    if not paths:
        return None
    newest = CheckpointName.parse(os.path.basename(paths[0]))
    if newest.num_updates > last.num_updates:
        return f"IT HOLDS UPDATE {last.num_updates}, AND {os.path.basename(paths[0])} IS THERE: A SAVE WAS CUT OFF, OR IT WAS REPLACED"
    run_id = written_by(paths[0])
    if run_id is not None and run_id != last.run_id:
        return f"IT IS OF ANOTHER RUN THAN {os.path.basename(paths[0])}"
    return None


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


def own_checkpoints(save_dir: str, run_id: str, at_most: int) -> list[tuple[str, int]]:
    """(path, num_updates) of what the run has saved up to an update, the newest first, each content once."""
    paths = {os.path.realpath(path): path for path in [*checkpoint_paths(save_dir), *last_paths(save_dir)]}
    facts = [read_facts(path) for path in paths.values()]
    own = [one for one in facts if one.problem is None and one.run_id == run_id and 0 <= one.num_updates <= at_most]
    return [(one.path, one.num_updates) for one in sorted(own, key=lambda one: one.num_updates, reverse=True)]


def last_paths(save_dir: str) -> list[str]:
    """checkpoint_last as a folder and checkpoint_last.pt, as far as they are there."""
    paths = [os.path.join(save_dir, str(CheckpointName("last", folder=folder))) for folder in (True, False)]
    return [path for path in paths if os.path.lexists(path)]


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
    """Read every byte; return what is wrong with the file, a sentence each, [] when all is well.

    A file of one of a run's names must also hold the update or epoch that it is named for.
    """
    problems = checkpoint_file.verify_checkpoint(expand(path))
    if not problems and CheckpointName.parse(os.path.basename(expand(path))) is not None:
        facts = read_facts(expand(path))
        is_ours = os.path.isdir(expand(path)) or "put in its place" in (facts.problem or "")  # files of others may be called so
        problems = [f"{path}: {facts.problem}"] if facts.problem is not None and is_ours else []
    return problems
