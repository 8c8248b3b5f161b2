"""A part of somebody's checkpoint: which tensors are taken, under which names, and what another shape means.

Owns: the settings `checkpoint.load_*` as an object, and what they make of a saved state before it is compared with what
was built. Must not know: files (tensors of a saved state have shape and dtype), the Trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import ConfigError


@dataclass(frozen=True)
class Selection:
    """What is taken of a saved state. Patterns are regular expressions for `re.search`, names are those of this run.

    Parameters of the criterion are named `criterion.…`, as in the optimizer.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    shape_mismatch: str = "error"
    expected_count: int = 0

    @property
    def is_whole(self) -> bool:
        return self == WHOLE

    def takes(self, name: str) -> bool:
        """Whether the tensor that is called `name` here is taken from the file."""
        included = not self.include or any(re.search(pattern, name) for pattern in self.include)
        return included and not any(re.search(pattern, name) for pattern in self.exclude)

    def name_here(self, name: str) -> str:
        """The name in this run of the tensor that the file calls `name`."""
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return name

    def tensors(self, saved: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """The entries of a saved state_dict that are taken, by their names here (without `prefix`)."""
        taken: dict[str, Any] = {}
        for name, value in saved.items():
            here = self.name_here(prefix + name)
            if not self.takes(here):
                continue
            if not here.startswith(prefix):
                raise ConfigError(f"checkpoint.load_rename takes {prefix}{name} to {here}, out of the criterion")
            if here[len(prefix) :] in taken:
                raise ConfigError(f"checkpoint.load_rename gives two tensors of the file the name {here}")
            taken[here[len(prefix) :]] = value
        return taken

    def optimizer_state(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The saved optimizer state with the parameter names of this run."""
        groups = [
            {**group, "param_names": [self.name_here(name) for name in group["param_names"]]}
            if "param_names" in group
            else group
            for group in saved["param_groups"]
        ]
        return {**saved, "param_groups": groups}

    def idle_patterns(self, saved: Iterable[str]) -> list[str]:
        """The patterns of include and exclude that find no name among those of the file."""
        here = [self.name_here(name) for name in saved]
        return [p for p in (*self.include, *self.exclude) if not any(re.search(p, name) for name in here)]

    def check_count(self, count: int, path: str) -> None:
        """Raise ConfigError unless as many tensors were taken as checkpoint.load_expected_count demands, or any at all."""
        if count == 0 and not self.is_whole:
            raise ConfigError(
                f"{path}: nothing of it would be taken. See checkpoint.load_include, load_exclude and load_rename; to start"
                " from nothing, leave checkpoint.restore_file and checkpoint.finetune_from_model out"
            )
        if self.expected_count and count != self.expected_count:
            raise ConfigError(
                f"{path}: {count} tensors are taken, checkpoint.load_expected_count={self.expected_count}. "
                "See checkpoint.load_include, load_exclude and load_rename"
            )


WHOLE = Selection()


def selection_of(checkpoint_cfg: Any) -> Selection:
    """The settings `checkpoint.load_*`, checked. Raises: ConfigError naming the field and the pattern."""
    return Selection(
        _patterns(checkpoint_cfg.load_include, "load_include"),
        _patterns(checkpoint_cfg.load_exclude, "load_exclude"),
        tuple(_renaming(rule) for rule in _texts(checkpoint_cfg.load_rename, "load_rename")),
        checkpoint_cfg.load_shape_mismatch,
        checkpoint_cfg.load_expected_count,
    )


def _texts(value: Any, field: str) -> tuple[str, ...]:
    if isinstance(value, (int, float, Mapping)):
        raise ConfigError(f"checkpoint.{field} is a pattern or a list of patterns, got {value!r}")
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    wrong = next((text for text in texts if not isinstance(text, str) or not text), None)
    if wrong is not None:
        raise ConfigError(f"checkpoint.{field} is a pattern or a list of patterns, got {wrong!r} in it")
    return texts


def _patterns(value: Any, field: str) -> tuple[str, ...]:
    return tuple(_checked(pattern, field) for pattern in _texts(value, field))


def _checked(pattern: str, field: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"checkpoint.{field}: {pattern!r} is no regular expression: {error}") from error
    return pattern


def _renaming(rule: str) -> tuple[str, str]:
    pattern, arrow, replacement = rule.partition("->")
    if not arrow or not pattern.strip():
        raise ConfigError(f"checkpoint.load_rename: {rule!r} is not of the form 'pattern -> replacement'")
    pattern, replacement = _checked(pattern.strip(), "load_rename"), replacement.strip()
    try:
        re.sub(pattern, replacement, "")
        re.compile(pattern).sub(replacement, pattern)
    except (re.error, IndexError) as error:
        raise ConfigError(f"checkpoint.load_rename: {rule!r}: {error}") from error
    return pattern, replacement
