"""One value of the config and the type of its field: the value that fits, or a sentence on why none does.

Owns: what counts as a number, a truth value, text. A text field holds the text that was written: a number that a
YAML reader made of it is refused, since `2024_10` and `202410` cannot be told apart afterwards. Numbers written as
text ("1e-4" of a plain dictionary) are numbers. Must not know: sections, Hydra, files.
"""

from __future__ import annotations

import enum
import math
import pathlib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from trainer.targets import nearest

NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


class FieldError(ValueError):
    """A value does not fit its field. The message is the end of a sentence that begins with the key."""


def fit(value: Any, expected: Any) -> Any:
    """`value` as the type `expected` wants it; FieldError where it cannot be that."""
    if expected is Any:
        return value
    if expected in SIMPLE:
        return SIMPLE[expected](value)
    origin = typing.get_origin(expected)
    if origin in (Union, types.UnionType):
        return _fit_union(value, typing.get_args(expected))
    if origin is Literal:
        return _fit_choice(value, typing.get_args(expected))
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return _fit_choice(value.name if isinstance(value, enum.Enum) else value, [member.name for member in expected])
    return _fit_container(value, expected, origin)


def is_text(expected: Any) -> bool:
    """Whether a field takes text and nothing else, null apart."""
    if typing.get_origin(expected) in (Union, types.UnionType):
        return all(member in (str, pathlib.Path, type(None)) for member in typing.get_args(expected))
    if typing.get_origin(expected) is Literal:
        return all(isinstance(choice, str) for choice in typing.get_args(expected))
    return expected in (str, pathlib.Path)


def takes_null(expected: Any) -> bool:
    return expected is Any or expected is type(None) or type(None) in typing.get_args(expected)


def _int(value: Any) -> int:
    number = _float(value, "a whole number")
    if isinstance(value, int):
        return value
    if not number.is_integer():
        raise FieldError(f"takes a whole number, got {value!r}")
    return int(number)


def _float(value: Any, wanted: str = "a number") -> float:
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FieldError(f"takes {wanted}, got {_described(value)}")
    if not math.isfinite(value):
        raise FieldError(f"takes {wanted} that is finite, got {value!r}")
    return float(value)


def _bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in TRUTH:
        return TRUTH[value.lower()]
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise FieldError(f"takes true or false, got {_described(value)}")


def _str(value: Any) -> str:
    if isinstance(value, pathlib.Path):
        return str(value)
    if not isinstance(value, str):
        raise FieldError(
            f'takes text, got {_described(value)}. For that text put it in quotes where you wrote it: "..."'
        )
    return value


def _none(value: Any) -> None:
    if value is not None:
        raise FieldError(f"takes null, got {_described(value)}")


SIMPLE = {int: _int, float: _float, bool: _bool, str: _str, pathlib.Path: _str, type(None): _none}


def _fit_union(value: Any, members: tuple) -> Any:
    if value is None and (type(None) in members or Any in members):
        return None
    exact = [member for member in members if _is_exactly(value, member)]
    for member in exact or members:
        try:
            return fit(value, member)
        except FieldError as error:
            problem = error
    if len([member for member in members if member is not type(None)]) == 1:
        raise problem
    raise FieldError(f"takes {' or '.join(_name(member) for member in members)}, got {_described(value)}")


def _is_exactly(value: Any, member: Any) -> bool:
    """A union prefers the member whose own value this is: 1 of int | float stays int, "1" of str | int stays text."""
    plain = typing.get_origin(member) or member
    return isinstance(plain, type) and type(value) is plain


def _fit_choice(value: Any, choices: Any) -> Any:
    if value in choices and type(value) in {type(choice) for choice in choices}:
        return value
    hint = nearest(value, [choice for choice in choices if isinstance(choice, str)]) if isinstance(value, str) else ""
    raise FieldError(f"takes {' | '.join(map(str, choices))}, got {_described(value)}.{hint}")


def _fit_container(value: Any, expected: Any, origin: Any) -> Any:
    kind = origin or expected
    arguments = typing.get_args(expected)
    if not isinstance(kind, type):
        return value
    if issubclass(kind, Mapping):
        if not isinstance(value, Mapping):
            raise FieldError(f"takes a mapping {{key: value}}, got {_described(value)}")
        return {key: fit(item, arguments[1]) for key, item in value.items()} if len(arguments) == 2 else value
    if issubclass(kind, (list, tuple, set, frozenset)) or kind.__module__ == "collections.abc":
        if not isinstance(value, (list, tuple)):
            raise FieldError(f"takes a list [a, b], got {_described(value)}")
        inner = [argument for argument in arguments if argument is not Ellipsis]
        same = len(inner) == 1
        return [fit(item, inner[0]) for item in value] if same else list(value)
    return value  # a class of the user's own: the constructor will know


def _described(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, (int, float)):
        return f"the number {value!r}"
    return f"the text {value!r}" if isinstance(value, str) else f"the {type(value).__name__} {value!r}"


def _name(expected: Any) -> str:
    return NAMES.get(expected) or getattr(expected, "__name__", str(expected))
