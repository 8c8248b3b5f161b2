"""How a saved state and the objects that were built are compared, and what a load reports.

Owns: the errors of a state that does not fit, the plan of which saved tensor goes where.
Must not know: files (tensors of a saved state have shape and dtype, their bytes come by the `copy` that is given).
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any, Mapping

import torch
from torch import Tensor, nn

import distributed_utils
from trainer.partial_state import WHOLE, Selection
from trainer.sharding import described, local_of, placement_of

logger = logging.getLogger(__name__)

# Keys of extra_state that are the Trainer's; all others are the caller's and come back from a load.
OWN_EXTRA_STATE = frozenset(
    {
        "train_iterator",
        "metrics",
        "best",
        "val_loss",
        "patience",
        "validated_at",
        "scaler",
        "nonfinite",
        "num_threads",
        "ranks",
        "previous_training_time",
        "ema",
    }
)


class StateError(RuntimeError):
    """A checkpoint is readable, but it is not of what this run builds. Bad input: status 2."""

    is_user_error = True
    exit_status = 2


class ModelMismatchError(StateError):
    """Names or shapes of the saved `part` ("model", "criterion") differ from those that were built."""

    def __init__(
        self, path: str, part: str, missing: list[str], unexpected: list[str], shapes: list[str], hint: str = ""
    ) -> None:
        self.path, self.part, self.missing, self.unexpected, self.shapes = path, part, missing, unexpected, shapes
        lines = [f"{path}: its {part} does not fit the {part} of this run"]
        for title, names in (("missing in the file", missing), ("unexpected", unexpected), ("other shape", shapes)):
            if names:
                lines.append(f"  {title} ({len(names)}): {_first(names)}")
        super().__init__("\n".join(lines + ([f"  {hint}"] if hint else [])))


class ClassMismatchError(StateError):
    """The checkpoint was saved with another class of `kind` than this run builds."""

    def __init__(self, path: str, num_updates: int, kind: str, saved: str, built: str, override: str) -> None:
        self.path, self.num_updates, self.kind, self.saved, self.built, self.override = (
            path,
            num_updates,
            kind,
            saved,
            built,
            override,
        )
        super().__init__(
            f"{path} (update {num_updates}): saved with {kind} {saved}, this run builds {built}. "
            f"To go on without what was saved of it, add: {override}"
        )


class TaskStateError(RuntimeError):
    """`task_state_dict()` differs between ranks, so no file can hold it."""

    is_user_error = True


@dataclass
class LoadReport:
    """What a load did, for the table that a resume prints."""

    path: str
    num_updates: int = 0
    restored: list[str] = field(default_factory=list)
    reset: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    saved_cfg: dict = field(default_factory=dict)

    def add_module(self, plan: ModulePlan) -> None:
        """Take over what was taken of the model, what starts fresh and what the file has besides."""
        self.restored.append(f"model ({len(plan.taken)} tensors)")
        if plan.slices:
            self.restored.append(f"a part of {len(plan.slices)} tensors of another shape")
        if plan.fresh:
            self.fresh.append(f"{len(plan.fresh)} tensors of the model ({_first(plan.fresh)})")
        if plan.left:
            self.dropped.append(f"{len(plan.left)} tensors of the file ({_first(plan.left)})")

    def add_optimizer(self, report: Any) -> None:
        """Take over what optim.restore_optimizer_state says of parameters without a match."""
        self.restored.append("optimizer")
        self.fresh += [f"optimizer state of {name}" for name in report.fresh]
        self.dropped += [f"optimizer state of {name}" for name in report.dropped]


def _first(names: list[str], count: int = 10) -> str:
    return ", ".join(names[:count]) + (f", and {len(names) - count} more" if len(names) > count else "")


# ---- classes ----


def class_names(criterion: Any, optimizer: Any, lr_scheduler: Any) -> dict[str, str | None]:
    """The names by which a checkpoint remembers its classes; a task without a criterion has None."""
    return {
        "criterion_name": type(criterion).__name__ if criterion is not None else None,
        "optimizer_name": type(optimizer).__name__,
        "lr_scheduler_name": _scheduler_name(lr_scheduler),
    }


def _scheduler_name(lr_scheduler: Any) -> str:
    return getattr(lr_scheduler, "name", None) or type(lr_scheduler).__name__


def same_classes(one: Mapping, other: Mapping) -> bool:
    return all(one.get(key) == other.get(key) for key in ("criterion_name", "optimizer_name", "lr_scheduler_name"))


def check_classes(
    entry: Mapping,
    criterion: Any,
    optimizer: Any,
    lr_scheduler: Any,
    path: str,
    reset_optimizer: bool,
    reset_lr_scheduler: bool,
) -> None:
    """Raise ClassMismatchError if the last entry of optimizer_history names other classes than were built."""
    built = class_names(criterion, optimizer, lr_scheduler)
    checks = [
        ("criterion", "criterion_name", reset_optimizer, "checkpoint.reset_optimizer=true"),
        ("optimizer", "optimizer_name", reset_optimizer, "checkpoint.reset_optimizer=true"),
        ("lr scheduler", "lr_scheduler_name", reset_lr_scheduler, "checkpoint.reset_lr_scheduler=true"),
    ]
    for kind, key, is_reset, override in checks:
        saved = entry.get(key)
        if saved is None or built[key] is None or saved == built[key] or is_reset:
            continue
        raise ClassMismatchError(path, int(entry.get("num_updates", 0)), kind, saved, built[key], override)


# ---- modules ----


@dataclass
class ModulePlan:
    """What a module takes from a saved state: pairs (saved tensor, own tensor), whole ones and ones of another shape.

    taken, sliced, fresh: names of the module, each in one of them. left: names that the file has and nobody takes.
    grown: "name [shape in the file], here [shape]" of buffers that took the shape of the file.
    """

    pairs: list[tuple[Any, Tensor]] = field(default_factory=list)
    slices: list[tuple[Any, Tensor]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    sliced: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)


def plan_module(
    module: nn.Module,
    saved: Mapping[str, Any],
    path: str,
    part: str,
    selection: Selection = WHOLE,
    prefix: str = "",
    continues: bool = True,
) -> ModulePlan:
    """What fills `module`, or the part of it that `selection` asks for.

    Buffers take the shape that was saved where the run `continues` and `selection` says nothing of other shapes, since
    training may have made them grow; else they are treated as parameters are.
    Raises: ModelMismatchError with all missing, unexpected and differently shaped names at once.
    """
    tensors = selection.tensors({name: value for name, value in saved.items() if hasattr(value, "shape")}, prefix)
    grown = _make_room_for_buffers(module, tensors, continues and selection.shape_mismatch == "error", prefix)
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    other_shape = [n for n in own if n in tensors and tuple(tensors[n].shape) != tuple(own[n].shape)]
    same_rank = [name for name in other_shape if len(tensors[name].shape) == own[name].dim()]
    sliced = same_rank if selection.shape_mismatch == "slice" else []
    skipped = other_shape if selection.shape_mismatch == "skip" else []
    refused = [name for name in other_shape if name not in sliced and name not in skipped]
    shapes = [f"{name} (file {list(tensors[name].shape)}, here {list(own[name].shape)})" for name in refused]
    missing = [name for name in own if name not in tensors and selection.takes(prefix + name)]
    unexpected = [name for name in tensors if name not in own]
    if missing or unexpected or shapes:
        hint = _hint(missing, unexpected) or _shape_hint(other_shape, prefix)
        raise ModelMismatchError(path, part, missing, unexpected, shapes, hint)
    whole = [name for name in own if name in tensors and name not in other_shape]
    return ModulePlan(
        pairs=[(tensors[name], described(own[name])) for name in whole],
        slices=[(tensors[name], own[name]) for name in sliced],
        taken=whole,
        sliced=sliced,
        fresh=[name for name in own if name not in whole and name not in sliced],
        left=[name for name in saved if selection.name_here(prefix + name)[len(prefix) :] not in tensors] + skipped,
        grown=grown,
    )


def _shape_hint(names: list[str], prefix: str) -> str:
    """How to go on without the tensors that have another shape."""
    if not names:
        return ""
    skip = "checkpoint.load_shape_mismatch=skip (slice takes the part that both have)"
    if len(names) > 10:
        return f"To leave them out, add: {skip}"
    escaped = [(prefix + name).replace(".", "[.]") for name in names]
    patterns = ", ".join(f'"^{name}$"' for name in escaped)
    return f"To leave them out, add: 'checkpoint.load_exclude=[{patterns}]' or {skip}"


def copy_common_part(source: Tensor, target: Tensor) -> None:
    """Copy what both have, from index 0 on in each dimension; the rest of `target`, whole or sharded, stays."""
    local, placement = local_of(target), placement_of(target)
    if placement is not None:  # rows of the whole
        first = placement.begin // max(1, target.shape[1:].numel())
        source = source[first : first + len(local)]
    part = tuple(slice(0, min(a, b)) for a, b in zip(source.shape, local.shape))
    local[part].copy_(source[part])


def _make_room_for_buffers(module: nn.Module, saved: Mapping[str, Any], may_grow: bool, prefix: str) -> list[str]:
    """Buffers that a fresh module does not have yet, and those of another shape if they `may_grow`, become empty ones of
    the saved shape; returns the latter, as ModulePlan.grown."""
    modules, grown = dict(module.named_modules()), []
    for name, value in saved.items():
        place, _, leaf = name.rpartition(".")
        owner = modules.get(place)
        if owner is None or leaf not in owner._buffers or not hasattr(value, "shape"):
            continue
        buffer = owner._buffers[leaf]
        if buffer is not None and (not may_grow or tuple(buffer.shape) == tuple(value.shape)):
            continue
        if buffer is not None:
            grown.append(f"{prefix}{name} {list(value.shape)}, here {list(buffer.shape)}")
        device = buffer.device if buffer is not None else _device_of(module)
        owner._buffers[leaf] = torch.empty(tuple(value.shape), dtype=value.dtype, device=device)
    return grown


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _hint(missing: list[str], unexpected: list[str]) -> str:
    """The prefix that would make the names fit, if there is one."""
    if not missing or not unexpected:
        return ""
    for name in unexpected[:5]:
        for wanted in missing:
            if name.endswith("." + wanted):
                prefix = name[: -len(wanted)]
                if all(prefix + other in set(unexpected) for other in missing):
                    return f"Without the prefix {prefix!r} the names of the file would fit: remove it in upgrade_state_dict()."
            if wanted.endswith("." + name):
                prefix = wanted[: -len(name)]
                if all(prefix + other in set(missing) for other in unexpected):
                    return f"With the prefix {prefix!r} the names of the file would fit: add it in upgrade_state_dict()."
    return ""


def load_module_extras(module: nn.Module, saved: Mapping[str, Any], materialize: Any) -> None:
    """Hand non-tensor state (torch's `set_extra_state`) back to the submodules that gave it."""
    for name, submodule in module.named_modules():
        key = f"{name}._extra_state" if name else "_extra_state"
        if key in saved and not hasattr(saved[key], "shape"):
            submodule.set_extra_state(materialize(saved[key]))


# ---- what must be equal on all ranks ----


def check_equal_on_ranks(task_state: Any, group: Any) -> None:
    """Collective. The file holds task state once, so every rank must have the same. Raises: TaskStateError on all."""
    different = distributed_utils.first_difference(lambda: _digests(task_state), group)
    if different is not None:
        rank, key, *_ = different
        raise TaskStateError(
            f"task_state_dict() of rank {rank} differs from rank 0's at {key}: it must be equal on all ranks"
        )


def _digests(value: Any, path: str = "task_state") -> dict[str, str]:
    if isinstance(value, Mapping):
        return {k: d for key, item in value.items() for k, d in _digests(item, f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: d for i, item in enumerate(value) for k, d in _digests(item, f"{path}[{i}]").items()}
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        content = repr((data.dtype, data.shape)).encode() + data.reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        content = f"{type(value).__name__}:{value!r}".encode()
    return {path: _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
