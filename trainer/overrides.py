"""What is typed after `fairtrain`: overrides taken apart, and the values among them put into a config.

Owns: the meaning of one override (Hydra's grammar, but a text field holds what was typed, letter by letter).
Must not know: where the config came from, launching.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import NODES, SECTIONS, TEXTS, known_keys, node_types, section_classes
from trainer.errors import ConfigError
from trainer.fields import is_text, takes_null
from trainer.targets import get_target, nearest, target_fields

OVERRIDE = re.compile(r"(?P<prefix>\+\+|\+|~|)(?P<key>[^=\s~+][^=]*)(?P<value>=.*)?", re.DOTALL)
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
SEVERAL = re.compile(r"(choice|range|interval|glob|sort|shuffle|extend_list)\(.*\)|.*,.*", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """One override: `prefix` is '', '+', '++' or '~'; `raw` is the text behind '=', None where there is no '='."""

    text: str
    prefix: str
    key: str
    raw: str | None


def parse(text: str) -> Override:
    """Take an override apart. Raises ConfigError where it is none."""
    match = OVERRIDE.fullmatch(text)
    if match is None or (match["value"] is None and match["prefix"] != "~"):
        raise ConfigError(f"{text!r} is not an override: write key=value, such as optimization.lr=1e-3")
    return Override(text, match["prefix"], match["key"], match["value"] and match["value"][1:])


def apply_values(cfg: DictConfig, values: Sequence[Override]) -> None:
    """Put typed values into the config, in the order typed, `_target_`s first since they say what the other keys mean.

    Raises: ConfigError with all keys that do not exist and all values that cannot be read.
    """
    problems = []
    for value in sorted(values, key=lambda override: not override.key.endswith("._target_")):
        try:
            _apply(cfg, value)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _apply(cfg: DictConfig, override: Override) -> None:
    section, _, rest = override.key.partition(".")
    if override.prefix == "~":
        return _delete(cfg, override)
    if not override.prefix and not _exists(cfg, section, rest):
        raise ConfigError(_no_such_key(cfg, override))
    if not rest and section in (*SECTIONS, *NODES) and not _is_container(override.raw):
        raise ConfigError(f"{section} is a section: write {section}.<field>=..., got {override.text}")
    value = read_value(override, field_type(cfg, override.key))
    _store(cfg, override.key, value)


def _is_container(raw: str | None) -> bool:
    return (raw or "").strip()[:1] == "{" or raw in ("null", "Null", "NULL")


def _store(cfg: DictConfig, key: str, value: Any) -> None:
    section = key.partition(".")[0]
    if section in NODES and section in cfg and cfg[section] is None:
        cfg[section] = {}
    OmegaConf.set_struct(cfg, False)
    try:
        OmegaConf.update(cfg, key, value, merge=False)
    except (OmegaConfBaseException, AssertionError, ValueError) as error:
        raise ConfigError(f"{key}={value!r}: {str(error).splitlines()[0]}") from error


def _delete(cfg: DictConfig, override: Override) -> None:
    parent, _, last = override.key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    if not isinstance(node, DictConfig) or last not in node.keys():
        raise ConfigError(_no_such_key(cfg, override))
    OmegaConf.set_struct(node, False)
    del node[last]


def _exists(cfg: DictConfig, section: str, rest: str) -> bool:
    """Whether a key is there, or is one that the class of its node takes (or may take)."""
    if not rest:
        return section in (*TEXTS, *SECTIONS, *NODES)
    if section in NODES:
        if rest == "_target_":
            return True
        head, _, deeper = rest.partition(".")
        there = isinstance(cfg[section], DictConfig) and head in cfg[section].keys()  # a key whose value is ??? too
        return there or head in _types_of_node(cfg, section)
    return section in SECTIONS and rest.partition(".")[0] in cfg[section].keys()


def _no_such_key(cfg: DictConfig, override: Override) -> str:
    keys = known_keys() + [f"{name}.{key}" for name in NODES for key in _keys_of_node(cfg, name)]
    section = override.key.partition(".")[0]
    hint = nearest(override.key, keys)
    add = f" To add it all the same: +{override.text}" if section in NODES and "." in override.key and not hint else ""
    return f"there is no {override.key} ({override.text}).{hint}{add}"


def _keys_of_node(cfg: DictConfig, name: str) -> list[str]:
    node = cfg.get(name)
    return [*(key for key in node or {} if key != "_target_"), *_types_of_node(cfg, name)]


def _types_of_node(cfg: DictConfig, name: str) -> dict[str, Any]:
    """Keys and types that the class of a node says, {} where it says nothing or is not there."""
    node = cfg.get(name)
    if not node or "_target_" not in node:
        return {}
    try:
        return node_types(name, target_fields(get_target(node)))
    except ConfigError:
        return {}  # complete_config tells it, with all other mistakes


# Values


def field_type(cfg: DictConfig, key: str) -> Any:
    """The type of a key's field as far as it is known, else Any."""
    section, _, rest = key.partition(".")
    if key in TEXTS or rest == "_target_":
        return str
    if section in SECTIONS and rest:
        return typing.get_type_hints(section_classes()[section]).get(rest, Any)
    return _types_of_node(cfg, section).get(rest, Any) if section in NODES else Any


def read_value(override: Override, expected: Any) -> Any:
    """The value of an override: text fields as typed (quotes around the whole taken off), others by Hydra's grammar."""
    raw = override.raw or ""
    if is_text(expected):
        if QUOTED.fullmatch(raw):
            return _by_grammar(override)
        if raw in ("null", "NULL", "Null") and not takes_null(expected):
            raise ConfigError(f"{override.key} is text and cannot be null; for that word: {override.key}='\"{raw}\"'")
        return None if raw in ("null", "NULL", "Null") else raw
    try:
        return _by_grammar(override)
    except ConfigError:
        if expected is Any and not SEVERAL.fullmatch(raw):
            return raw  # such as ~/data: text, although the grammar has no place for it
        if str in typing.get_args(expected):
            return raw
        raise


def _by_grammar(override: Override) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{override.key}={override.raw}")
        several = parsed.is_sweep_override()
        value = None if several else parsed.value()
    except HydraException as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"{override.text}: {first}. Text with such letters goes in quotes: {override.key}='\"...\"'"
        ) from error
    if several:
        raise ConfigError(f"{override.text}: several values need --multirun; a list is written {override.key}=[a,b]")
    return value
