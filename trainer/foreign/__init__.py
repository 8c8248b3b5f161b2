"""Other people's checkpoints: what each kind holds, and the same in the layout of a checkpoint of ours.

A file is opened by checkpoint_file (names and containers, nothing executed), recognised by its contents (`find`), and laid
out as ours (`in_own_layout`): tensors stay references to the file, so that everything after that, streaming, sharding
and reset flags included, is what happens to a checkpoint of ours.

Owns: the meaning of other people's keys. Must not know: the Trainer, where the bytes go.

    with read_foreign("checkpoint30.pt") as foreign:    # for tools: no model is built, names stay those of the file
        foreign.kind, foreign.state, foreign.notes, foreign.left
        foreign.reader.materialize(foreign.state["model"])
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import checkpoint_file
from checkpoint_file import NotACheckpointError
from trainer.foreign import counters, fairseq, others
from trainer.foreign.found import Found
from trainer.foreign.layout import Here, own_layout
from trainer.partial_state import WHOLE, Selection

__all__ = ["ForeignCheckpoint", "Found", "Here", "find", "in_own_layout", "read_foreign"]


@dataclass
class ForeignCheckpoint:
    """A checkpoint of another program, open.

    kind: who wrote it ("fairseq", "DiT", "Lightning", "Hugging Face", "accelerate", "nanoGPT", "a bare state dict", …).
    state: the keys of our own checkpoints (`model`, `criterion`, `optimizer_history`, `last_optimizer_state` with
        param_names, `extra_state`, `task_state`, `cfg`), a TensorRef in the place of each tensor; `run_id` is None.
    found: the same under the names of the file. notes: what was taken for what. left: what was not taken over.
    reader: fetches the bytes, `materialize(nest)` or `copy(pairs)`.
    """

    kind: str
    state: dict[str, Any]
    found: Found
    notes: list[str]
    left: list[str]
    reader: Any

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> ForeignCheckpoint:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def read_foreign(path: str | os.PathLike, here: Here | None = None, read_method: str = "auto") -> ForeignCheckpoint:
    """Open a checkpoint of another program, in this process alone. Reads names and containers, no bytes of tensors.

    Args:    path: a file (torch.save of any age, safetensors, an index of several) or a folder.
             here: the model that it is for; None leaves the names as the file has them, wrappers of DDP, torch.compile
             and FSDP removed, and for Lightning the attribute that holds the model if there is only one.
    Raises:  CheckpointNotFoundError, CheckpointDamagedError, NotACheckpointError (nothing in it is a model, or it is
             refused since it could run code), AmbiguousNamesError naming the override.
    """
    reader = checkpoint_file.open_local_checkpoint(os.path.expanduser(path), own_format=False, read_method=read_method)
    try:
        state, found = in_own_layout(reader, here)
    except BaseException:
        reader.close()
        raise
    return ForeignCheckpoint(found.kind, state, found, found.notes, found.left, reader)


def find(saved: Any, path: str) -> Found:
    """What the skeleton of another program's checkpoint holds. Raises: NotACheckpointError where there is no model."""
    files = others.files_of(saved)
    if files is not None:
        found = others.found_in_folder(files, path)
    elif not isinstance(saved, Mapping):
        raise NotACheckpointError(path, f"holds a {type(saved).__name__}, no model")
    elif fairseq.is_fairseq(saved):
        found = fairseq.found_in(saved)
    elif others.is_dit(saved):
        found = others.found_in_dit(saved)
    elif others.is_lightning(saved):
        found = others.found_in_lightning(saved)
    elif others.is_nanogpt(saved):
        found = others.found_in_nanogpt(saved)
    else:
        found = others.found_in_dict(saved)
    if not any(found.models.values()):
        keys = ", ".join(map(str, list(files if files is not None else saved)[:8]))
        raise NotACheckpointError(path, f"holds no tensors by their names (it has: {keys or 'nothing'})")
    return found


def in_own_layout(reader: Any, here: Here | None = None, selection: Selection = WHOLE) -> tuple[dict[str, Any], Found]:
    """What an open checkpoint of another program holds in the layout of ours, and what was found in it.

    Fetches counters that are tensors; collective where the reader is.
    Raises: NotACheckpointError, names.AmbiguousNamesError; the same on all ranks, since they have the same skeleton.
    """
    found = find(reader.skeleton, reader.path)
    state = own_layout(found, reader.path, here, selection)
    counters.read(state, found.optimizer, reader.materialize)
    return state, found
