"""`fairtrain-checkpoint import FILE -o OUT`: another program's checkpoint, or a folder of ours, as one file of ours.

What has no place in ours is listed. A run takes it by checkpoint.finetune_from_model, or where it holds an optimizer
and a position by checkpoint.restore_file.
"""

from __future__ import annotations

import argparse
import os
import uuid
from typing import Any

from checkpoint_file import FORMAT_VERSION
from trainer.errors import ConfigError
from trainer.printed import as_json, size
from trainer.tools.copied import copied
from trainer.tools.inspect import resumable
from trainer.tools.opened import OWN_KEYS, Checkpoint, mapping, open_any
from trainer.tools.streamed import write_streamed

HELP = "another program's checkpoint as one of fairtrain; a folder of ours as one file"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="what is read: a file or a folder")
    command.add_argument("-o", "--output", required=True, metavar="OUT", help="the file that is written")


def run(arguments: argparse.Namespace) -> int:
    output = os.path.expanduser(arguments.output)
    with open_any(arguments.file) as checkpoint:
        state, left = own_state(checkpoint)
        nbytes = write_streamed(state, output)
        report = {
            "output": output,
            "bytes": nbytes,
            "program": checkpoint.program,
            "resumable": resumable(checkpoint),
            "left_out": left,
            "notes": checkpoint.notes,
        }
    if arguments.json:
        print(as_json(report))
        return 0
    print(f"{output}: of {report['program']}, {size(nbytes)}; a run can take {', '.join(report['resumable'])}")
    for note in [*report["notes"], *(f"left out: {key}" for key in left)]:
        print(f"  {note}")
    return 0


def own_state(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """(a state with all keys of our files, keys of the other file that have no place in it). Raises ConfigError."""
    state = checkpoint.state
    if not mapping(state.get("model")):
        keys = ", ".join(map(str, list(state)[:6])) or "nothing"
        raise ConfigError(f"{checkpoint.path} has no model to take over: it holds {keys}")
    empty = {"optimizer_history": [], "last_optimizer_state": None}
    taken = {key: state.get(key) or empty.get(key, {}) for key in OWN_KEYS}
    head = {"format_version": FORMAT_VERSION, "run_id": state.get("run_id") or uuid.uuid4().hex}
    left = [*checkpoint.left, *(str(key) for key in state if key not in (*OWN_KEYS, *head))]
    return {**head, **copied(checkpoint, taken)}, left
