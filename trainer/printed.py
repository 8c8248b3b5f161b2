"""What people and programs are shown: tables, numbers with their units, JSON. Must not know: checkpoints, configs."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

WIDEST = 60  # characters of a cell


def table(rows: Sequence[Sequence[Any]], header: Sequence[str], indent: str = "  ") -> list[str]:
    """Lines with aligned columns; numbers stand right."""
    cells = [[_short(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [
        all(isinstance(row[i], (int, float)) or _is_number(str(row[i])) for row in rows) for i in range(len(header))
    ]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in zip(row, widths, right)
        ]
        lines.append((indent + "  ".join(padded)).rstrip())
    return lines


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _is_number(text: str) -> bool:
    return bool(text) and text[0] in "-+.0123456789" and not text.startswith("--")


def size(nbytes: int) -> str:
    """1234567 to '1.2 MB'."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{nbytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def as_json(value: Any) -> str:
    """Standard JSON: what is not finite is text, as in log.jsonl; what has no place in JSON is its own text."""
    return json.dumps(plain(value), indent=1)


def plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def first(names: Iterable[str], count: int = 10) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:count]) + (f", and {len(names) - count} more" if len(names) > count else "")


def as_long_as_it_is_read(main: Callable[..., int]) -> Callable[..., int]:
    """A console script whose reader may leave early, as `| head` does: what is left is thrown away, the status stays."""

    @functools.wraps(main)
    def command(*args: Any, **kwargs: Any) -> int:
        try:
            return main(*args, **kwargs)
        except BrokenPipeError:
            return 0
        finally:
            _drop_what_nobody_reads()

    return command


def show(text: str) -> None:
    """Print to stdout; without a reader, nothing."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _drop_what_nobody_reads()


def _drop_what_nobody_reads() -> None:
    """Flush stdout; if nobody reads it, let the flush at the end of Python go nowhere instead of failing."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
