"""What a run that continues says at its start: what was restored, reset, skipped, and each setting that differs.

Owns: the words and the columns (saved, now, where from). Must not know: the Trainer, files, how a log is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer.config import ABSENT, SECTIONS, config_differences, section_classes, typed_keys
from trainer.printed import table
from trainer.state import LoadReport

NEW, GONE, UNREADABLE = "new setting", "no longer a setting", "the saved config cannot be read"
WORLD_SIZE = "distributed_training.distributed_world_size"


def changed_settings(saved: Any, now: Mapping[str, Any], typed: Iterable[str]) -> list[dict[str, Any]]:
    """A row for each setting that differs: key, saved, now, from.

    from: "typed"; the typed option that brought it, such as "lr_scheduler=fixed"; "default"; "new setting", which the
    version that saved did not have; "no longer a setting"; else "config", a file or a dictionary.
    """
    saved = saved if isinstance(saved, Mapping) else {}
    typed = list(typed)
    options = {next(iter(typed_keys([text]))): text for text in typed}
    defaults = {name: cls() for name, cls in section_classes().items()}
    return [
        {"key": key, "saved": old, "now": new, "from": _source(key, old, new, options, defaults)}
        for key, old, new in config_differences(saved, now)
    ]


def with_real_ranks(rows: list[dict[str, Any]], saved: int | None, now: int) -> list[dict[str, Any]]:
    """The rows with the ranks that trained, whoever started them, for what our launcher was told; none if they are equal.

    saved: None where the file does not tell it; then the rows stay. from: "launch" where torchrun or srun decided.
    """
    found = []
    for row in rows:
        if row["key"] == WORLD_SIZE and saved is not None:
            if saved == now:
                continue
            row = {**row, "saved": saved, "now": now, "from": row["from"] if row["now"] == now else "launch"}
        found.append(row)
    return found


def _source(key: str, old: Any, new: Any, options: Mapping[str, str], defaults: Mapping[str, Any]) -> str:
    if key in options:
        return "typed"
    brought = next((text for name, text in options.items() if key.startswith(name + ".")), None)
    if brought is not None:
        return brought.lstrip("+~") if "{" not in brought else "typed"
    section, _, field = key.partition(".")
    if old == ABSENT:
        return NEW if section in SECTIONS else "config"
    if new == ABSENT:
        return GONE
    if section in SECTIONS and getattr(defaults[section], field, ABSENT) == new:
        return "default"
    return "config"


def lines_of(report: LoadReport, kind: str, epoch: int, changed: list[dict[str, Any]]) -> list[str]:
    """The report of a start, for the terminal. kind: "continue" or "finetune"."""
    lines = [f"{kind} from {report.path} (update {report.num_updates}, epoch {epoch})"]
    for title, names in fields_of(report).items():
        if names:
            lines.append(f"  {title}: {', '.join(names)}")
    if not isinstance(report.saved_cfg, Mapping) or not report.saved_cfg:
        lines.append("  settings: the file has none to compare with")
    elif changed:
        columns = ("setting", "saved", "now", "from")
        lines += table([[row["key"], shown(row["saved"]), shown(row["now"]), row["from"]] for row in changed], columns)
    else:
        lines.append("  settings: as they were saved")
    return lines


def fields_of(report: LoadReport) -> dict[str, list[str]]:
    """What the event `resume` says of a load."""
    return {name: getattr(report, name) for name in ("restored", "reset", "fresh", "dropped", "skipped")}


def shown(value: Any) -> str:
    """As it would be typed."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
