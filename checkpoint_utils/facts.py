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
    """Read every byte; return what is wrong with the file, a sentence each, [] when all is well."""
    return checkpoint_file.verify_checkpoint(expand(path))
