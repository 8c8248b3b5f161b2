"""`fairtrain-checkpoint diff A B`: where two checkpoints differ, and by how much.

Optimizer state is compared by parameter name. Values are equal if their bits are.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoint_file import TensorRef
from trainer.config import config_differences
from trainer.errors import ConfigError
from trainer.printed import as_json, table
from trainer.tools.opened import Checkpoint, leaves_by_name, mapping, open_any
from trainer.tools.statistics import Distance

HELP = "what was added, removed, reshaped, changed between two checkpoints, and by how much"
SHOWN = 20
# What differs between two runs that computed the same: who they are, where they lie, how long they took.
PRIVATE = r"^(run_id|cfg[.].*|extra_state[.]previous_training_time)$"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("one", metavar="A")
    command.add_argument("other", metavar="B")
    command.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="REGEX",
        help="leave out what this finds in its name; may be repeated",
    )
    command.add_argument(
        "--numbers",
        action="store_true",
        help="what training computed alone: not who the run is, its config and its time",
    )
    command.add_argument("--all", action="store_true", help=f"every difference, not the first {SHOWN} of each kind")


def run(arguments: argparse.Namespace) -> int:
    if (
        os.path.exists(arguments.one)
        and os.path.exists(arguments.other)
        and os.path.samefile(arguments.one, arguments.other)
    ):
        found = Differences()  # two names of one content
    else:
        ignored = [*arguments.ignore, *([PRIVATE] if arguments.numbers else [])]
        with open_any(arguments.one) as one, open_any(arguments.other) as other:
            found = differences(one, other, ignored)
    if arguments.json:
        print(as_json(found.as_dict()))
    else:
        print("\n".join(found.lines(arguments.one, arguments.other, None if arguments.all else SHOWN)))
    return 0 if found.none else 1


@dataclass
class Differences:
    """Of two checkpoints. tensors: (name, how far apart), in the order of the first. values, config: (name, A's, B's)."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    reshaped: list[tuple[str, str, str]] = field(default_factory=list)
    tensors: list[tuple[str, Distance]] = field(default_factory=list)
    values: list[tuple[str, Any, Any]] = field(default_factory=list)
    config: list[tuple[str, Any, Any]] = field(default_factory=list)
    num_equal: int = 0

    @property
    def none(self) -> bool:
        return not (self.added or self.removed or self.reshaped or self.tensors or self.values or self.config)

    @property
    def first_tensor(self) -> str | None:
        return self.tensors[0][0] if self.tensors else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "identical": self.none,
            "equal_tensors": self.num_equal,
            "first_differing_tensor": self.first_tensor,
            "added": self.added,
            "removed": self.removed,
            "reshaped": [{"name": name, "a": a, "b": b} for name, a, b in self.reshaped],
            "changed": [
                {
                    "name": name,
                    "relative_norm": gap.relative_norm,
                    "max": gap.max_difference,
                    "different": gap.num_different,
                    "elements": gap.count,
                }
                for name, gap in self.tensors
            ],
            "values": [{"name": name, "a": a, "b": b} for name, a, b in self.values],
            "config": [{"name": name, "a": a, "b": b} for name, a, b in self.config],
        }

    def lines(self, one: str, other: str, most: int | None = SHOWN) -> list[str]:
        if self.none:
            return [f"{one} and {other} are identical: every tensor bit for bit, every value, the config"]
        lines = [f"A = {one}", f"B = {other}"]
        kinds = (("only in B", self.added), ("only in A", self.removed))
        for title, names in kinds:
            lines += _section(title, [[name] for name in names], ["name"], most)
        lines += _section("other shape or type", self.reshaped, ["name", "A", "B"], most)
        rows = [
            [name, f"{gap.relative_norm:.3g}", f"{gap.max_difference:.3g}", f"{gap.num_different:,} of {gap.count:,}"]
            for name, gap in self.tensors
        ]
        lines += _section("changed tensors", rows, ["name", "relative norm", "max", "elements"], most)
        lines += _section(
            "changed values", [[n, repr(a), repr(b)] for n, a, b in self.values], ["name", "A", "B"], most
        )
        lines += _section("config", [[n, repr(a), repr(b)] for n, a, b in self.config], ["name", "A", "B"], most)
        if self.first_tensor:
            lines.append(f"first tensor that differs: {self.first_tensor}")
        return [*lines, f"{self.num_equal} tensors are equal bit for bit"]


def _section(title: str, rows: list, header: list[str], most: int | None) -> list[str]:
    if not rows:
        return []
    more = [f"  … and {len(rows) - most} more (--all)"] if most is not None and len(rows) > most else []
    return [f"{title} ({len(rows)}):", *table(rows[:most], header), *more]


def differences(one: Checkpoint, other: Checkpoint, ignore: Iterable[str] = ()) -> Differences:
    """Compare two open checkpoints, without what one of the patterns finds in its name. Raises: ConfigError."""
    ignored = [_compiled(pattern) for pattern in ignore]

    def taken(name: str) -> bool:
        return not any(pattern.search(name) for pattern in ignored)

    states = [{key: value for key, value in side.state.items() if key != "cfg"} for side in (one, other)]
    a, b = ({name: value for name, value in leaves_by_name(state).items() if taken(name)} for state in states)
    found = Differences(
        added=[name for name in b if name not in a],
        removed=[name for name in a if name not in b],
        config=[
            row
            for row in config_differences(*(mapping(c.state.get("cfg")) for c in (one, other)))
            if taken(f"cfg.{row[0]}")
        ],
    )
    for name in (name for name in a if name in b):
        _compare(name, a[name], b[name], one, other, found)
    return found


def _compare(name: str, a: Any, b: Any, one: Checkpoint, other: Checkpoint, found: Differences) -> None:
    if isinstance(a, TensorRef) and isinstance(b, TensorRef):
        if (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)):
            found.reshaped.append((name, _shape(a), _shape(b)))
            if tuple(a.shape) != tuple(b.shape):
                return
        gap = distance(one, a, other, b)
        if gap.num_different:
            found.tensors.append((name, gap))
        else:
            found.num_equal += 1
    elif isinstance(a, TensorRef) or isinstance(b, TensorRef):
        found.reshaped.append((name, _shape(a), _shape(b)))
    elif not same_value(a, b):
        found.values.append((name, a, b))


def distance(one: Checkpoint, a: TensorRef, other: Checkpoint, b: TensorRef) -> Distance:
    """How far two tensors of one shape are apart; read once, a few MiB at a time."""
    gap, position = Distance(), 0
    for piece in one.pieces(a):
        end = position + piece.numel()
        for of_b in other.pieces(b, position, end):
            gap.add(piece[: of_b.numel()], of_b)
            piece = piece[of_b.numel() :]
        position = end
    return gap


def _shape(value: Any) -> str:
    if isinstance(value, TensorRef):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def same_value(a: Any, b: Any) -> bool:
    """Equal in type and value; NaN equals NaN, for here it stands for itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    return a == b or (a != a and b != b)


def _compiled(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--ignore {pattern!r} is no regular expression: {error}") from error
