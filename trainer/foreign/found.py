"""What a checkpoint of another program holds, said in one way for all of them.

Owns: the description that each kind's reader fills in, in the names of the file. Must not know: any kind, any model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoint_file import TensorRef

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "weights", "params")
EMA_KEYS = ("ema", "model_ema", "ema_state_dict", "state_dict_ema", "ema_model", "ema_model_state_dict", "ema_weights")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "opt", "optimizer_state", "optimizer_states")


@dataclass
class Found:
    """What a file holds.

    kind: what wrote it, for people. models: name -> tensor by the key under which they stand, the usual one first.
    averages: moving averages, in the same way. criterion: its tensors. optimizer: torch's layout, None if there is none;
        `by_name` where its state is by parameter name, `flat` where all parameters are one vector.
    optimizer_names: the classes of this run that take the state as it is, the first one usual; () where any may.
    position: what a data position can tell, see position.py. num_updates, best, …: None where the file does not say.
        best, training_time: numbers, or references to tensors of one element.
    is_ordered: whether names stand in the model's order, so that parameters can be counted.
    notes: what was taken for what. left: what of the file nobody takes.
    """

    kind: str
    models: dict[str, dict[str, TensorRef]] = field(default_factory=dict)
    averages: dict[str, dict[str, TensorRef]] = field(default_factory=dict)
    criterion: dict[str, TensorRef] = field(default_factory=dict)
    criterion_name: str | None = None
    optimizer: dict[str, Any] | None = None
    optimizer_class: str | None = None
    optimizer_names: tuple[str, ...] = ()
    lr_scheduler_name: str | None = None
    lr_scheduler_state: dict[str, Any] = field(default_factory=dict)
    num_updates: int | None = None
    position: dict[str, Any] | None = None
    best: Any = None
    training_time: Any = 0.0
    loss_scale: float | None = None
    cfg: Any = None
    tied: tuple[tuple[str, str], ...] = ()
    is_ordered: bool = True
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def is_state_dict(value: Any) -> bool:
    """Whether it is tensors by their names (and perhaps a few plain values beside them)."""
    if not isinstance(value, Mapping) or not value:
        return False
    tensors = sum(isinstance(one, TensorRef) for one in value.values())
    return tensors > 0 and all(isinstance(key, str) for key in value) and not is_optimizer(value)


def is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("param_groups"), list)
        and isinstance(value.get("state"), Mapping)
    )


def tensors_of(value: Mapping[str, Any]) -> dict[str, TensorRef]:
    return {name: one for name, one in value.items() if isinstance(one, TensorRef)}


def scalar(value: Any) -> Any:
    """A number of the file, or the reference to a tensor that holds one (`counters.read` fetches it); else None."""
    if isinstance(value, TensorRef):
        return value if value.shape.numel() == 1 else None
    return number(value)


def number(value: Any) -> float | None:
    """A number of the file; None for what is none (a tensor's bytes are not read here)."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
