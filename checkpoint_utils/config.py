"""The section `checkpoint`, and what its words mean."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

import checkpoint_file
from checkpoint_utils.urls import is_url, url_problem

DEFAULT_RESTORE_FILE = "checkpoint_last.pt"
RESET_FLAGS = ("reset_optimizer", "reset_lr_scheduler", "reset_dataloader", "reset_meters")
KEEP = ("keep_interval_updates", "keep_last_epochs", "keep_best_checkpoints")
SAVED_SETTINGS = (*RESET_FLAGS, "best_checkpoint_metric", "maximize_best_checkpoint_metric", *KEEP)
PART_SETTINGS = ("load_include", "load_exclude", "load_rename", "load_shape_mismatch", "load_expected_count")


@dataclass
class CheckpointConfig:
    """Section `checkpoint`."""

    save_dir: str = field(default="${run_dir}/checkpoints", metadata={"help": "folder of the run's checkpoints, or s3://bucket/prefix, to which they are uploaded"})
    restore_file: str = field(
        default=DEFAULT_RESTORE_FILE,
        metadata={
            "help": "checkpoint to start from, a path or s3://…; the default is the run's own newest, or a fresh start without one"
        },
    )
    finetune_from_model: str | None = field(
        default=None,
        metadata={"help": "checkpoint of which a new run takes the parameters and nothing else; null: none"},
    )
    reset_optimizer: bool = field(
        default=False, metadata={"help": "drop the optimizer's moments at the load, once per run"}
    )
    reset_lr_scheduler: bool = field(
        default=False, metadata={"help": "drop the state of the learning-rate scheduler at the load, once per run"}
    )
    reset_dataloader: bool = field(
        default=False, metadata={"help": "start the data order again from epoch 1 at the load, once per run"}
    )
    reset_meters: bool = field(
        default=False, metadata={"help": "empty the meters, the best score and patience at the load, once per run"}
    )
    optimizer_overrides: Any = field(
        default_factory=dict,
        metadata={"help": "optimizer settings that replace this config's at a load, a mapping or its text; {}: none"},
    )
    save_interval: int = field(
        default=1,
        metadata={"help": "save checkpoint{E}.pt every this many epochs, >= 0; 0: no save for an epoch's end"},
    )
    save_interval_updates: int = field(
        default=0, metadata={"help": "save checkpoint_{E}_{U}.pt every this many updates, >= 0; 0: no such saves"}
    )
    keep_interval_updates: int = field(
        default=-1, metadata={"help": "newest checkpoint_{E}_{U}.pt that are kept, >= -1; -1: all, 0: none is written"}
    )
    keep_last_epochs: int = field(
        default=-1, metadata={"help": "newest checkpoint{E}.pt that are kept, >= -1; -1: all, 0: none is written"}
    )
    keep_best_checkpoints: int = field(
        default=0,
        metadata={
            "help": "checkpoint.best_{metric}_{value}.pt that are kept, by score, >= -1; -1: all, 0: none beside "
            "checkpoint_best.pt"
        },
    )
    no_save: bool = field(default=False, metadata={"help": "write no checkpoint at all"})
    no_epoch_checkpoints: bool = field(default=False, metadata={"help": "write no checkpoint{E}.pt"})
    no_last_checkpoints: bool = field(
        default=False, metadata={"help": "write no checkpoint_last.pt; a stop then saves checkpoint_{E}_{U}.pt"}
    )
    write_checkpoints_asynchronously: bool = field(
        default=False,
        metadata={"help": "train on while a copy of each rank's share is written; it counts when it is on the disk"},
    )
    max_failed_saves: int = field(
        default=2,
        metadata={"help": "saves that fail in a row until the run ends with status 1, >= 1; 1: the first one ends it"},
    )
    no_save_optimizer_state: bool = field(
        default=False, metadata={"help": "leave the optimizer's moments out of the files"}
    )
    best_checkpoint_metric: str = field(default="loss", metadata={"help": "validation metric that ranks checkpoints"})
    maximize_best_checkpoint_metric: bool = field(
        default=False, metadata={"help": "the largest value of it is the best"}
    )
    patience: int = field(
        default=-1, metadata={"help": "stop after this many validations in a row without a new best; -1 or 0: never"}
    )
    load_checkpoint_on_all_dp_ranks: bool = field(
        default=False, metadata={"help": "every rank reads the file; otherwise rank 0 reads and the others receive"}
    )
    read_method: str = field(
        default="auto",
        metadata={
            "help": "auto, mmap or pread: how bytes come from the file; auto reads by offset, which is the fastest"
        },
    )
    load_include: Any = field(
        default_factory=list,
        metadata={
            "help": "of restore_file and finetune_from_model take only tensors whose name one of these patterns finds; []: all"
        },
    )
    load_exclude: Any = field(
        default_factory=list,
        metadata={"help": "… and leave out those whose name one of these patterns finds; []: none"},
    )
    load_rename: Any = field(
        default_factory=list,
        metadata={"help": "… after renaming them, each by every `pattern -> replacement` in turn; []: no other names"},
    )
    load_shape_mismatch: Literal["error", "skip", "slice"] = field(
        default="error",
        metadata={"help": "a tensor of another shape: error, skip (it starts fresh), slice (the common part is taken)"},
    )
    load_expected_count: int = field(
        default=0,
        metadata={"help": "tensors of model and criterion that must be taken, or the run is refused; 0: any number"},
    )

    def problems(self) -> list[str]:
        """Sentences on values that cannot work."""
        found = []
        for name in ("save_interval", "save_interval_updates"):
            if getattr(self, name) < 0:
                found.append(f"checkpoint.{name}={getattr(self, name)}: must be 0 (off) or above")
        for name in (*KEEP, "patience"):
            if getattr(self, name) < -1:
                found.append(f"checkpoint.{name}={getattr(self, name)}: must be -1 or above")
        if self.read_method not in checkpoint_file.READ_METHODS:
            found.append(
                f"checkpoint.read_method={self.read_method}: must be {', '.join(checkpoint_file.READ_METHODS)}"
            )
        if self.max_failed_saves < 1:
            found.append(f"checkpoint.max_failed_saves={self.max_failed_saves}: must be 1 or above")
        if not self.best_checkpoint_metric:
            found.append("checkpoint.best_checkpoint_metric is empty: name a metric, such as loss")
        if not self.save_dir:
            found.append("checkpoint.save_dir is empty: name a folder, or write nothing with checkpoint.no_save=true")
        for name in ("save_dir", "restore_file", "finetune_from_model"):
            if is_url(getattr(self, name)) and (problem := url_problem(getattr(self, name))):
                found.append(f"checkpoint.{name}: {problem}")
        if restore_wish(self) and self.finetune_from_model:
            found.append(TWO_WISHES)
        if self.load_expected_count < 0:
            found.append(f"checkpoint.load_expected_count={self.load_expected_count}: must be 0 (any) or above")
        return found


TWO_WISHES = (
    "checkpoint.restore_file and checkpoint.finetune_from_model are both set: the first continues a run, the second "
    "takes parameters for a new one. Leave one of them out"
)


def restore_wish(cfg: Any) -> str | None:
    """The path that restore_file asks for, None where it only says "the run's own"."""
    wish = cfg.restore_file
    return None if not wish or wish == DEFAULT_RESTORE_FILE else expand(wish)


def expand(path: str | os.PathLike) -> str:
    return os.path.expanduser(os.fspath(path))


def takes_a_part(cfg: Any) -> bool:
    """Whether the config leaves something of a checkpoint out, or takes it under other names."""
    return any(getattr(cfg, name) != getattr(CheckpointConfig(), name) for name in PART_SETTINGS)
