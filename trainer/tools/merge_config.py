"""`fairtrain-checkpoint merge-config DIR [overrides]`: what `fairtrain resume=DIR` with these overrides would run, in
three columns: saved, typed, result.
"""

from __future__ import annotations

import argparse
from typing import Any

from trainer import run_folder
from trainer.compose import compose, parse_flags
from trainer.config import ABSENT, complete_config, config_differences, flat, to_plain, typed_keys
from trainer.overrides import parse
from trainer.printed import as_json, table

HELP = "what resume=DIR with these overrides would run: saved, typed, result"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="DIR", help="the folder of a run")
    command.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="what would be typed: key=value, task=…, model=…"
    )
    command.add_argument("--config-dir", metavar="DIR", help="as of fairtrain: a folder with options of your own")
    command.add_argument("--all", action="store_true", help="every key, not only those that change or are typed")


def run(arguments: argparse.Namespace) -> int:
    flags = parse_flags([f"resume={arguments.folder}", *arguments.overrides])
    flags.config_dir = arguments.config_dir
    composed = compose(flags)
    cfg = complete_config(composed.cfg)
    saved, source = run_folder.saved_config(arguments.folder)
    rows = merged(saved, to_plain(cfg), composed.typed, arguments.all)
    if arguments.json:
        print(as_json({"saved_in": source, "notices": composed.notices, "rows": rows}))
        return 0
    print("\n".join(composed.notices))
    columns = ("key", "saved", "typed", "result")
    print(
        "\n".join(
            table(
                [[row[column] if column == "key" else shown(row[column]) for column in columns] for row in rows],
                columns,
            )
        )
    )
    return 0


def merged(saved: dict, result: dict, typed: list[str], all_keys: bool = False) -> list[dict[str, Any]]:
    """A row for each key that changes or is typed; `typed` is the text, or None."""
    texts = {next(iter(typed_keys([text]))): text for text in typed}
    before, after = flat(saved), flat(result)
    changed = {key for key, _, _ in config_differences(saved, result)}
    keys = [key for key in after if all_keys or key in changed or key in texts] + [
        key for key in before if key not in after
    ]
    return [
        {
            "key": key,
            "saved": before.get(key, ABSENT),
            "typed": typed_text(key, texts),
            "result": after.get(key, ABSENT),
        }
        for key in keys
    ]


def typed_text(key: str, texts: dict[str, str]) -> str | None:
    """What was typed for a key: its value, or the option that brought it, such as lr_scheduler=cosine."""
    if key in texts:
        return parse(texts[key]).raw if not texts[key].startswith("~") else texts[key]
    return next((text for name, text in texts.items() if key.startswith(name + ".")), None)


def shown(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
