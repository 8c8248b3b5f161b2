"""What two runs wrote down, compared: the first update and the first thing in it that differs.

Within an update things are compared in the order in which one follows from the other: which samples, their values, loss
and gradient norm, learning rate, then each tensor. Must not know: why two runs differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.tools.diff import PRIVATE, differences
from trainer.tools.opened import open_any

STAGES = ("start", "indices", "batch", "numbers", "state")


@dataclass
class Trace:
    """Of one run, by rank: `updates[rank][u]`, and `before[rank][u]`: what stood before update u."""

    folder: Path
    updates: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    before: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)

    @property
    def has_workers(self) -> bool:
        return any(record["num_workers"] > 0 for of_rank in self.before.values() for record in of_rank.values())


@dataclass(frozen=True)
class Difference:
    """Where two runs first differ. stage: one of STAGES; `start` is the state before an update of equal ones.

    name: the number, tensor or list that differs. one, other: the two values or their digests.
    """

    update: int
    rank: int
    stage: str
    name: str
    one: str
    other: str

    def __str__(self) -> str:
        what = {
            "start": f"{self.name}, before anything of the update was computed",
            "indices": "which samples the update reads",
            "batch": "the values of its samples, which are the same by index",
            "numbers": self.name,
            "state": self.name,
        }[self.stage]
        return f"update {self.update}, rank {self.rank}: {what} ({self.one} without a stop, {self.other} with it)"


def read_trace(folder: Path) -> Trace:
    trace = Trace(folder)
    for path in sorted(folder.glob("trace.*")):
        rank = int(path.suffix[1:])
        updates, before = trace.updates.setdefault(rank, {}), trace.before.setdefault(rank, {})
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if "before" in record:
                before[record["before"]] = record
            else:
                updates[record["update"]] = record
    return trace


def first_difference(one: Trace, other: Trace, last: int | None = None) -> Difference | None:
    """The first thing that differs in the updates that both have, up to `last`."""
    updates = sorted({update for of_rank in one.updates.values() for update in of_rank})
    for update in updates:
        if last is not None and update > last:
            break
        for rank in sorted(one.updates):
            found = next(_differences(one, other, rank, update), None)
            if found is not None:
                return found
    return None


def _differences(one: Trace, other: Trace, rank: int, update: int) -> Iterator[Difference]:
    a, b = (trace.updates.get(rank, {}).get(update) for trace in (one, other))
    if a is None or b is None:
        if a is not b:
            yield Difference(update, rank, "numbers", "the update itself", str(a is not None), str(b is not None))
        return
    starts = [trace.before.get(rank, {}).get(update, {}).get("state", {}) for trace in (one, other)]
    yield from _in_mapping(update, rank, "start", *starts)
    for stage in ("indices", "batch"):
        if a[stage] != b[stage]:
            yield Difference(update, rank, stage, stage, str(a[stage])[:60], str(b[stage])[:60])
    yield from _in_mapping(update, rank, "numbers", a["numbers"], b["numbers"])
    yield from _in_mapping(update, rank, "state", a["state"], b["state"])


def _in_mapping(update: int, rank: int, stage: str, a: Mapping, b: Mapping) -> Iterator[Difference]:
    for name in (*a, *(name for name in b if name not in a)):
        if a.get(name) != b.get(name):
            yield Difference(update, rank, stage, name, str(a.get(name)), str(b.get(name)))


def kept_differences(one: Trace, other: Trace, update: int) -> list[tuple[str, str, str]]:
    """(name, without a stop, with it) of what tasks and datasets kept before an update, beside what is saved.

    Without what differed one update before, such as the id of a process: there both runs were equal.
    """
    if update < 1:
        return []
    noise = {name for name, _, _ in kept_differences(one, other, update - 1)}
    found = []
    for rank in sorted(one.before):
        a, b = (trace.before.get(rank, {}).get(update, {}).get("kept", {}) for trace in (one, other))
        found += [
            (name, a.get(name, "absent"), b.get(name, "absent"))
            for name in {**a, **b}
            if a.get(name) != b.get(name) and name not in noise
        ]
    return list(dict.fromkeys(found))


def saved_differences(one: Path, other: Path) -> list[str]:
    """The first few names of what differs in the last checkpoints of two folders."""
    with open_any(_last(one)) as a, open_any(_last(other)) as b:
        found = differences(a, b, [PRIVATE])
    names = [name for name, *_ in (*found.tensors, *found.values, *found.reshaped)]
    return [*names, *found.added, *found.removed]


def _last(folder: Path) -> str:
    path = folder / "checkpoint_last"
    return str(path if os.path.lexists(path) else folder / "checkpoint_last.pt")
