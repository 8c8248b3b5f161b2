"""Counters of a file that are tensors: the steps of an optimizer, a score, a time.

Owns: which of them a load needs as numbers, and the number of updates where only the optimizer has counted them.
Must not know: the kinds of files; how bytes are fetched (`materialize` is given).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from checkpoint_file import TensorRef
from trainer.foreign.position import ELSEWHERE

COUNTERS = ("best", "previous_training_time")


def read(state: dict[str, Any], optimizer: Mapping[str, Any] | None, materialize: Callable[[Any], Any]) -> None:
    """Put numbers in the place of counters that are tensors, and the number of updates where it is None.

    optimizer: as the file has it, whether or not its moments can be taken over.
    materialize: gives a nest with tensors in the place of its references; collective where the file is read so.
    """
    extra, entry = state["extra_state"], state["optimizer_history"][-1]
    steps = steps_of(optimizer) if entry["num_updates"] is None else []
    refs = {key: extra[key] for key in COUNTERS if isinstance(extra[key], TensorRef)}
    refs |= {number: step for number, step in enumerate(steps) if isinstance(step, TensorRef)}
    numbers = {key: float(tensor) for key, tensor in materialize(refs).items()} if refs else {}
    extra.update({key: value for key, value in numbers.items() if key in COUNTERS})
    extra["patience"] = {"best": extra["best"]}
    if entry["num_updates"] is None:
        counted = [numbers.get(number, step) for number, step in enumerate(steps)]
        entry["num_updates"] = int(max((float(step) for step in counted), default=0))
    position = extra["train_iterator"]
    if position is not None:
        position[ELSEWHERE]["num_updates"] = entry["num_updates"]


def steps_of(optimizer: Mapping[str, Any] | None) -> list[Any]:
    """The counters of all parameters: numbers, or references to tensors of one element."""
    if optimizer is None:
        return []
    entries = [entry for entry in optimizer["state"].values() if isinstance(entry, Mapping)]
    steps = [entry["step"] for entry in entries if "step" in entry]
    return steps or [group["step"] for group in optimizer["param_groups"] if "step" in group]
