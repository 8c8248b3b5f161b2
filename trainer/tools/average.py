"""`fairtrain-checkpoint average FILE… -o OUT`: the mean of several checkpoints' parameters.

As fairseq's scripts/average_checkpoints.py: sums in the order given, in float32 (float64 in float64), half precision
becomes float32, whole numbers are divided without remainder; the rest is the newest file's. Beyond it: weights, the
average of averages (ema), criterion. Moments are left out, for no run has had this state.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import checkpoint_utils
from checkpoint_file import TensorRef
from checkpoint_file.nests import map_leaves
from trainer.errors import ConfigError
from trainer.printed import as_json, first, size
from trainer.tools.copied import copied
from trainer.tools.opened import Checkpoint, mapping, open_any
from trainer.tools.streamed import Computed, write_streamed

HELP = "the mean of the parameters of several checkpoints, as a checkpoint"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "inputs", nargs="+", metavar="FILE", help="checkpoints; with --last and --best the folder of a run"
    )
    command.add_argument("-o", "--output", required=True, metavar="OUT", help="the file that is written")
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--last", type=int, metavar="N", help="of the folder, the newest N that are numbered by updates, else by epochs"
    )
    which.add_argument("--best", type=int, metavar="N", help="of the folder, the N with the best scores in their names")
    command.add_argument(
        "--weights", metavar="W,W,…", help="a weight for each file, in the order given; they need not add up to 1"
    )


def run(arguments: argparse.Namespace) -> int:
    paths = chosen(arguments.inputs, arguments.last, arguments.best)
    weights = parse_weights(arguments.weights, len(paths))
    with contextlib.ExitStack() as stack:
        checkpoints = [stack.enter_context(open_any(path)) for path in paths]
        nbytes = write_streamed(average_of(checkpoints, weights), arguments.output)
    report = {"output": arguments.output, "bytes": nbytes, "inputs": paths, "weights": weights}
    if arguments.json:
        print(as_json(report))
    else:
        print(f"{arguments.output}: the mean of {len(paths)} checkpoints ({size(nbytes)})")
        for path, weight in zip(paths, weights or [None] * len(paths)):
            print(f"  {path}" + (f" weight {weight:g}" if weight is not None else ""))
    return 0


# ---- which


def chosen(inputs: Sequence[str], last: int | None, best: int | None) -> list[str]:
    """The files to average. Raises ConfigError where there are fewer than were asked for."""
    if last is None and best is None:
        return [os.path.expanduser(path) for path in inputs]
    count = last if last is not None else best
    if len(inputs) != 1 or not os.path.isdir(os.path.expanduser(inputs[0])):
        raise ConfigError("--last and --best choose among the checkpoints of one folder: give that folder alone")
    if count < 1:
        raise ConfigError(f"--last and --best take a number from 1 on, got {count}")
    folder = save_dir_of(os.path.expanduser(inputs[0]))
    names = [name for name in map(checkpoint_utils.CheckpointName.parse, os.listdir(folder)) if name is not None]
    found = newest(names) if last is not None else best_ranked(names, folder)
    if len(found) < count:
        raise ConfigError(
            f"{folder}: {count} checkpoints are asked for, and there are {len(found)}: {first(map(str, found)) or 'none'}"
        )
    return [os.path.join(folder, str(name)) for name in found[:count]]


def save_dir_of(folder: str) -> str:
    """The folder of checkpoints: that of a run has it under this name."""
    inner = os.path.join(folder, "checkpoints")
    return inner if os.path.isdir(inner) else folder


def newest(names: list[Any]) -> list[Any]:
    """Those numbered by updates, else those numbered by epochs, the newest first, as fairseq's two options."""
    updates = [name for name in names if name.kind == "update"]
    epochs = [name for name in names if name.kind == "epoch"]
    by_update = sorted(updates, key=lambda name: (name.num_updates, name.epoch), reverse=True)
    return by_update or sorted(epochs, key=lambda name: name.epoch, reverse=True)


def best_ranked(names: list[Any], folder: str) -> list[Any]:
    """Those with a score in their name, the best first; the newest of them knows whether a larger one is better."""
    ranked = [name for name in names if name.kind == "ranked"]
    metrics = sorted({name.metric for name in ranked})
    if len(metrics) > 1:
        raise ConfigError(
            f"{folder}: checkpoints are ranked by several metrics ({', '.join(metrics)}): give the files themselves"
        )
    if not ranked:
        return []
    with open_any(os.path.join(folder, str(ranked[0]))) as checkpoint:
        settings = mapping(mapping(checkpoint.state.get("cfg")).get("checkpoint"))
    return sorted(ranked, key=lambda name: name.value, reverse=bool(settings.get("maximize_best_checkpoint_metric")))


def parse_weights(text: str | None, count: int) -> list[float] | None:
    if text is None:
        return None
    try:
        weights = [float(one) for one in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text}: numbers with commas between them, such as 2,1,1") from None
    if len(weights) != count:
        raise ConfigError(f"--weights {text}: {len(weights)} weights for {count} checkpoints")
    if not all(map(torch.isfinite, torch.tensor(weights))) or sum(weights) == 0:
        raise ConfigError(f"--weights {text}: their sum is what is divided by, it cannot be 0 or not finite")
    return weights


# ---- the mean


def average_of(checkpoints: Sequence[Checkpoint], weights: Sequence[float] | None = None) -> dict[str, Any]:
    """The state that is written: parameters computed when they are asked for, all else the newest file's.

    Raises: ConfigError with all tensors that not all files have, or have in another shape.
    """
    newest_one = max(checkpoints, key=lambda checkpoint: checkpoint.num_updates or 0)
    state = newest_one.state
    made = {part: _mean_of_part(checkpoints, weights, part) for part in ("model", "criterion")}
    extra = {key: value for key, value in newest_one.extra_state.items() if key != "ema"}
    result = {
        **{key: copied(newest_one, value) for key, value in state.items() if key not in (*made, "extra_state")},
        **made,
    }
    if "format_version" in state:
        result["run_id"] = uuid.uuid4().hex  # no run has had this state: none counts or deletes it as its own
        result["last_optimizer_state"] = None
    if "extra_state" in state:
        result["extra_state"] = copied(newest_one, extra)
        if all(mapping(checkpoint.extra_state.get("ema")) for checkpoint in checkpoints):
            result["extra_state"]["ema"] = _mean_of_part(checkpoints, weights, "ema")
    return {key: result[key] for key in (*state, *result)}


def _part(checkpoint: Checkpoint, part: str) -> Mapping[str, Any]:
    return mapping(checkpoint.extra_state.get("ema") if part == "ema" else checkpoint.state.get(part))


def _mean_of_part(checkpoints: Sequence[Checkpoint], weights: Sequence[float] | None, part: str) -> dict[str, Any]:
    parts = [_part(checkpoint, part) for checkpoint in checkpoints]
    _check_same(checkpoints, parts)
    made: dict[tuple, Computed] = {}  # tied tensors stay tied
    mean: dict[str, Any] = {}
    for name, value in parts[0].items():
        if not isinstance(value, TensorRef):
            mean[name] = map_leaves(value, (TensorRef,), lambda ref: copied(checkpoints[0], ref))
            continue
        refs = [one[name] for one in parts]
        key = (value._record, value._offset, tuple(value.shape), value._stride)
        if key not in made:
            made[key] = mean_of_tensor(list(zip(checkpoints, refs)), weights)
        mean[name] = made[key]
    return mean


def _check_same(checkpoints: Sequence[Checkpoint], parts: Sequence[Mapping[str, Any]]) -> None:
    for checkpoint, part in zip(checkpoints[1:], parts[1:]):
        missing = [name for name in parts[0] if name not in part]
        more = [name for name in part if name not in parts[0]]
        shapes = [
            name
            for name in parts[0]
            if name in part and getattr(parts[0][name], "shape", None) != getattr(part[name], "shape", None)
        ]
        if missing or more or shapes:
            told = (("it lacks", missing), ("it alone has", more), ("of another shape are", shapes))
            problem = "; ".join(f"{word} {first(names)}" for word, names in told if names)
            raise ConfigError(f"{checkpoint.path} cannot be averaged with {checkpoints[0].path}: {problem}")


def mean_of_tensor(sources: list[tuple[Checkpoint, TensorRef]], weights: Sequence[float] | None) -> Computed:
    dtype = sources[0][1].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else dtype

    def elements(begin: int, end: int) -> Iterator[Tensor]:
        step = 1 << 18  # elements of each file that are in memory at a time
        for low in range(begin, end, step):
            yield _mean([_read(*source, low, min(low + step, end)) for source in sources], weights, wide)

    return Computed(wide, tuple(sources[0][1].shape), elements)


def _read(checkpoint: Checkpoint, ref: TensorRef, begin: int, end: int) -> Tensor:
    pieces = list(map(torch.clone, checkpoint.pieces(ref, begin, end)))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _mean(values: list[Tensor], weights: Sequence[float] | None, wide: torch.dtype) -> Tensor:
    if not (wide.is_floating_point or wide.is_complex):
        return _mean_of_integers(values, wide)
    total = values[0].to(wide) * weights[0] if weights else values[0].to(wide)
    for i, value in enumerate(values[1:], 1):
        total = total.add(value.to(wide), alpha=weights[i]) if weights else total + value.to(wide)
    return total / (sum(weights) if weights else len(values))


def _mean_of_integers(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    """As fairseq: the sum, divided without remainder; of truth values the first."""
    if dtype == torch.bool:
        return values[0]
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return torch.div(total, len(values), rounding_mode="floor")
