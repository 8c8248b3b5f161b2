"""`fairtrain-checkpoint verify FILE|DIR…`: whether checkpoints are as they were written, and whether they make sense.

Every byte against its checksum, then the structure (what a run would need to go on), then the values: finite numbers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import checkpoint_file
from checkpoint_file import CheckpointError, CheckpointNotFoundError, NotACheckpointError, TensorRef
from trainer.errors import ConfigError
from trainer.printed import as_json, first, size
from trainer.tools.inspect import bytes_on_disk
from trainer.tools.opened import OWN_KEYS, Checkpoint, mapping, open_any, tensors_of
from trainer.tools.statistics import statistics_of

HELP = "every checksum, the structure, finite values; of a whole run at once"
UNINITIALISED = "_float_tensor"  # of old fairseq files: memory that nobody has ever set


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "paths", nargs="+", metavar="FILE|DIR", help="checkpoints, or folders of runs: all that is in them"
    )


def run(arguments: argparse.Namespace) -> int:
    results = [verified(paths) for path in arguments.paths for paths in found_under(os.path.expanduser(path))]
    bad = [result for result in results if result["problems"]]
    if arguments.json:
        print(as_json({"ok": not bad, "checkpoints": results}))
        return 1 if bad else 0
    for result in results:
        names = ", ".join(result["paths"])
        print(f"{names}: {'damaged' if result['problems'] else 'sound'}, {size(result['bytes'])}")
        for problem in result["problems"]:
            print(f"  {problem}")
    print(f"{len(results) - len(bad)} sound, {len(bad)} damaged")
    return 1 if bad else 0


def found_under(path: str) -> list[list[str]]:
    """The checkpoints under a path, each with all of its names: one file may have several."""
    if not os.path.isdir(path) or is_checkpoint_folder(path):
        if not os.path.lexists(path):
            raise CheckpointNotFoundError(path, "no such file or folder")
        return [[path]]
    by_content: dict[tuple, list[str]] = {}
    for folder in (path, os.path.join(path, "checkpoints")):
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            one = os.path.join(folder, name)
            if name.endswith(".pt") or (os.path.isdir(one) and is_checkpoint_folder(one)) or _is_broken_link(one):
                stat = os.stat(one) if os.path.exists(one) else os.lstat(one)
                by_content.setdefault((stat.st_dev, stat.st_ino), []).append(one)
    if not by_content:
        raise ConfigError(f"{path}: there is no checkpoint in this folder, nor in {os.path.join(path, 'checkpoints')}")
    return list(by_content.values())


def is_checkpoint_folder(path: str) -> bool:
    names = os.listdir(path)
    return ".metadata" in names or any(name.endswith(".distcp") for name in names)


def _is_broken_link(path: str) -> bool:
    return os.path.islink(path) and not os.path.exists(path)


def verified(paths: list[str]) -> dict:
    path = paths[0]
    if _is_broken_link(path):
        return {
            "paths": paths,
            "bytes": 0,
            "problems": [f"{path}: is a link to {os.readlink(path)}, which is not there"],
        }
    return {"paths": paths, "bytes": bytes_on_disk(path), "problems": problems_of(path)}


def problems_of(path: str) -> list[str]:
    """Sentences on what is wrong with a checkpoint. Raises: NotACheckpointError where it is no checkpoint at all."""
    problems = checkpoint_file.verify_checkpoint(path)
    if problems:
        return problems
    try:
        with open_any(path) as checkpoint:
            return [*structure_problems(checkpoint), *value_problems(checkpoint)]
    except NotACheckpointError:
        raise
    except CheckpointError as error:
        return [str(error)]


def structure_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """What keeps a run from going on with it; of other programs' files only what is said of shapes."""
    state = checkpoint.state
    if checkpoint.program == "fairtrain":
        missing = [key for key in OWN_KEYS if key not in state]
        if missing:
            yield f"{checkpoint.path}: lacks {', '.join(missing)}, so that no run can go on from it"
        elif not checkpoint.last_entry and state["optimizer_history"]:
            yield f"{checkpoint.path}: its optimizer_history is no list of entries"
    model = mapping(state.get("model"))
    shapes = {name: tuple(ref.shape) for name, ref in model.items() if isinstance(ref, TensorRef)}
    shapes |= {
        f"criterion.{name}": tuple(ref.shape)
        for name, ref in mapping(state.get("criterion")).items()
        if isinstance(ref, TensorRef)
    }
    unknown = [name for name in checkpoint.parameter_names() if name not in shapes]
    if unknown:
        yield f"{checkpoint.path}: the optimizer speaks of parameters that the model has not: {first(unknown)}"
    average = mapping(checkpoint.extra_state.get("ema"))
    odd = [name for name, ref in average.items() if isinstance(ref, TensorRef) and shapes.get(name) != tuple(ref.shape)]
    if odd:
        yield f"{checkpoint.path}: the average has tensors that the model has not, or of another shape: {first(odd)}"


def value_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Numbers that are not finite, in what is trained, its moments and its average; a mask may hold infinities."""
    trained = set(checkpoint.parameter_names())
    for name, ref in tensors_of(checkpoint.state).items():
        part, _, inner = name.partition(".")
        if part not in ("model", "criterion", "ema", "optimizer") or inner.endswith(UNINITIALISED):
            continue
        if not (ref.dtype.is_floating_point or ref.dtype.is_complex):
            continue
        found = statistics_of(checkpoint.pieces(ref))
        is_buffer = bool(trained) and part != "optimizer" and inner not in trained and name not in trained
        if found.num_nan or (found.num_infinite and not is_buffer):
            yield f"{checkpoint.path}: {name} is not finite ({found.num_nan} NaN, {found.num_infinite} infinite of {found.count})"
