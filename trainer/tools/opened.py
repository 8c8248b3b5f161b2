"""One checkpoint, open for a tool: what is in it by name, its values in bounded pieces.

Owns: the names by which tools speak of a checkpoint's contents, such as `optimizer.head.weight.exp_avg`.
Must not know: what a tool does with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import checkpoint_file
from checkpoint_file import ElementReader, TensorRef
from trainer.foreign import read_foreign

OWN_KEYS = ("cfg", "model", "criterion", "optimizer_history", "last_optimizer_state", "task_state", "extra_state")


@dataclass
class Checkpoint:
    """An open checkpoint. `state` has the keys of our files, as far as there is something for them.

    program: who wrote it. Of another program's file, notes: what was taken for what; left: what was not taken over.
    """

    path: str
    program: str
    state: dict[str, Any]
    reader: Any
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._elements = ElementReader(self.reader)

    def pieces(self, ref: TensorRef, begin: int = 0, end: int | None = None) -> Iterator[Tensor]:
        """The elements [begin, end) of a tensor, flat, a few MiB at a time, checked; each valid until the next."""
        return self._elements.pieces(ref, begin, end)

    @property
    def last_entry(self) -> Mapping[str, Any]:
        """The last entry of optimizer_history: classes, state of the schedule, number of updates."""
        history = self.state.get("optimizer_history")
        return history[-1] if isinstance(history, list) and history and isinstance(history[-1], dict) else {}

    @property
    def extra_state(self) -> Mapping[str, Any]:
        return mapping(self.state.get("extra_state"))

    @property
    def num_updates(self) -> int | None:
        return self.last_entry.get("num_updates")

    def parameter_names(self) -> list[str]:
        """The names of trained parameters, as far as the optimizer's state gives them."""
        groups = mapping(self.state.get("last_optimizer_state")).get("param_groups") or []
        return [name for group in groups for name in mapping(group).get("param_names", [])]

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def open_any(path: str | os.PathLike) -> Checkpoint:
    """Open a file or folder, of ours or of another program. Raises: CheckpointError."""
    path = os.path.expanduser(os.fspath(path))
    reader = checkpoint_file.open_local_checkpoint(path, own_format=False)
    if checkpoint_file.is_own_format(reader.skeleton):
        return Checkpoint(path, "fairtrain", reader.skeleton, reader)
    reader.close()
    foreign = read_foreign(path)
    return Checkpoint(path, foreign.kind, foreign.state, foreign.reader, foreign.notes, foreign.left)


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one: what a file holds may be of any type."""
    return value if isinstance(value, Mapping) else {}


def leaves_by_name(state: Mapping[str, Any]) -> dict[str, Any]:
    """Each tensor and plain value of a state under its keys, joined by dots; optimizer state by parameter name.

    `last_optimizer_state.state.0.exp_avg` stands under `optimizer.head.weight.exp_avg`, extra_state's `ema` under `ema`.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "last_optimizer_state" and isinstance(value, Mapping):
            found |= _optimizer_leaves(value)
        elif key == "extra_state" and isinstance(value, Mapping):
            found |= dict(_flat({k: v for k, v in value.items() if k != "ema"}, key))
            found |= dict(_flat(value["ema"], "ema")) if "ema" in value else {}
        else:
            found |= dict(_flat(value, str(key)))
    return found


def _optimizer_leaves(saved: Mapping[str, Any]) -> dict[str, Any]:
    names: dict[Any, str] = {}
    for group in saved.get("param_groups") or []:
        group = mapping(group)
        names |= dict(zip(group.get("params") or [], group.get("param_names") or []))
    by_name = {names.get(index, str(index)): value for index, value in mapping(saved.get("state")).items()}
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    groups = [
        {k: v for k, v in mapping(group).items() if k not in ("params", "param_names")}
        for group in saved.get("param_groups") or []
    ]
    order = {
        "param_names": [list(mapping(group).get("param_names") or []) for group in saved.get("param_groups") or []]
    }
    return dict(_flat({**by_name, **rest}, "optimizer")) | dict(_flat({"groups": groups, **order}, "optimizer"))


def _flat(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{where}.{key}")
    elif type(value) in (list, tuple) and any(isinstance(item, (Mapping, list, tuple, TensorRef)) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{where}.{index}")
    else:
        yield where, value


def tensors_of(state: Mapping[str, Any]) -> dict[str, TensorRef]:
    """The tensors of a state by the names of `leaves_by_name`."""
    return {name: value for name, value in leaves_by_name(state).items() if isinstance(value, TensorRef)}
