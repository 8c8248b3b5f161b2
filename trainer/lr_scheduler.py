"""Learning rates: each schedule is a pure function of (config, num_updates), with fairseq's formulas and names.

Owns: the schedules, the adapter for classes of torch.optim.lr_scheduler, and what of them is state. Update u, counted
from 1, uses schedule(u - 1). Only a schedule that listens to validation scores remembers anything.
Must not know: the Trainer, files, epochs as such.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from trainer.errors import ConfigError
from trainer.optim import checked_fields, plain_node
from trainer.targets import get_target

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------- pure functions


def warmup_lr(num_updates: int, start: float, end: float, warmup_updates: int) -> float:
    """On the straight line from `start` at 0 to `end` at `warmup_updates`."""
    return start + num_updates * ((end - start) / warmup_updates)


def fixed_lr(num_updates: int, lr: float, warmup_updates: int) -> float:
    """`lr`, reached in `warmup_updates` equal steps, the first of which is already above zero."""
    if num_updates < warmup_updates:
        return (num_updates + 1) / warmup_updates * lr
    return lr


def inverse_sqrt_lr(num_updates: int, lr: float, warmup_updates: int, warmup_init_lr: float) -> float:
    """Linear warmup to `lr`, then proportional to 1 / sqrt(num_updates)."""
    if num_updates < warmup_updates:
        return warmup_lr(num_updates, warmup_init_lr, lr, warmup_updates)
    return lr * max(warmup_updates, 1) ** 0.5 * max(num_updates, 1) ** -0.5


def cosine_lr(
    num_updates: int,
    lr: float,
    min_lr: float,
    warmup_updates: int,
    warmup_init_lr: float,
    period: float,
    t_mult: float,
    lr_shrink: float,
) -> float:
    """Linear warmup, then half a cosine from `lr` to `min_lr` in each period.

    Period i lasts `period * t_mult ** i` updates, and both ends are multiplied by `lr_shrink ** i`.
    """
    if num_updates < warmup_updates:
        return warmup_lr(num_updates, warmup_init_lr, lr, warmup_updates)
    position, index = num_updates - warmup_updates, 0
    if t_mult == 1:
        index = math.floor(position / period)
        position -= period * index
    else:  # counted rather than solved for by a logarithm, which rounds to the wrong side at the ends of periods
        while position >= period:
            position, period, index = position - period, period * t_mult, index + 1
    low, high = min_lr * lr_shrink**index, lr * lr_shrink**index
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * position / period))


def polynomial_decay_lr(
    num_updates: int, lr: float, end_learning_rate: float, power: float, warmup_updates: int, total: int
) -> float:
    """Linear warmup from zero, then a polynomial down to `end_learning_rate` at `total`, where it stays."""
    if warmup_updates > 0 and num_updates <= warmup_updates:
        return num_updates / float(warmup_updates) * lr
    if num_updates >= total:
        return end_learning_rate
    remaining = 1 - (num_updates - warmup_updates) / (total - warmup_updates)
    return (lr - end_learning_rate) * remaining**power + end_learning_rate


def tri_stage_lr(
    num_updates: int, lr: float, steps: tuple[int, int, int], init_lr_scale: float, final_lr_scale: float
) -> float:
    """Linear warmup, a plateau at `lr`, an exponential decay; `steps` are the lengths of the three."""
    warmup_steps, hold_steps, decay_steps = steps
    if num_updates < warmup_steps:
        return warmup_lr(num_updates, init_lr_scale * lr, lr, warmup_steps)
    position = num_updates - warmup_steps - hold_steps
    if position < 0:
        return lr
    if position <= decay_steps and decay_steps > 0:
        return lr * math.exp(math.log(final_lr_scale) / decay_steps * position)
    return final_lr_scale * lr


# ---------------------------------------------------------------------------------------------------- schedules


class Schedule:
    """A schedule bound to an optimizer: writes `lr_at(num_updates) * lr_scale` into each group.

    Subclasses give `lr_at`; their constructor's signature is the schema of the config node.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lr: float, max_update: int) -> None:
        self.optimizer, self.lr, self.max_update = optimizer, lr, max_update
        self._current = lr

    @property
    def name(self) -> str:
        return type(self).__name__

    def lr_at(self, num_updates: int) -> float:
        """The rate of update num_updates + 1, before a group's `lr_scale`."""
        raise NotImplementedError

    def step_update(self, num_updates: int) -> float:
        """Set the groups' rates for the update that follows `num_updates` and return the rate."""
        lr = self._current = self.lr_at(num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        """The end of an epoch or a validation. Schedules that are functions of num_updates do nothing."""
        return self._current

    def get_lr(self) -> float:
        return self._current

    def set_base_lr(self, lr: float) -> None:
        """Another optimization.lr, in effect from the next `step_update`."""
        self.lr = lr

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore: the next `step_update` computes the rate from this run's config."""


class Fixed(Schedule):
    """One rate, with an optional warmup of `warmup_updates` updates."""

    def __init__(self, optimizer, lr, max_update, warmup_updates: int = 0) -> None:
        super().__init__(optimizer, lr, max_update)
        self.warmup_updates = _not_negative("warmup_updates", warmup_updates)

    def lr_at(self, num_updates: int) -> float:
        return fixed_lr(num_updates, self.lr, self.warmup_updates)


class InverseSqrt(Schedule):
    """Vaswani et al. 2017: warmup, then decay with the inverse square root of the number of updates.

    warmup_init_lr: where the warmup begins (null: 0).
    """

    def __init__(
        self, optimizer, lr, max_update, warmup_updates: int = 4000, warmup_init_lr: float | None = None
    ) -> None:
        super().__init__(optimizer, lr, max_update)
        self.warmup_updates = _not_negative("warmup_updates", warmup_updates)
        self.warmup_init_lr = _or_default(warmup_init_lr, 0.0)

    def lr_at(self, num_updates: int) -> float:
        return inverse_sqrt_lr(num_updates, self.lr, self.warmup_updates, self.warmup_init_lr)


class Cosine(Schedule):
    """Loshchilov and Hutter 2017: cosine annealing from optimization.lr to `min_lr`, with restarts if wanted.

    lr_period_updates: length of the first period in updates. null: one period that ends at the horizon, and min_lr from
    then on. t_mult: how many times longer each period is than the one before. lr_shrink: factor per period.
    warmup_init_lr: where the warmup begins (null: min_lr).
    total_num_update: the horizon (null: optimization.max_update).
    """

    def __init__(
        self,
        optimizer,
        lr,
        max_update,
        warmup_updates: int = 0,
        warmup_init_lr: float | None = None,
        min_lr: float = 0.0,
        lr_period_updates: float | None = None,
        t_mult: float = 1.0,
        lr_shrink: float = 0.1,
        total_num_update: int | None = None,
    ) -> None:
        super().__init__(optimizer, lr, max_update)
        self.warmup_updates = _not_negative("warmup_updates", warmup_updates)
        self.min_lr = _not_negative("min_lr", min_lr)
        self.warmup_init_lr = _or_default(warmup_init_lr, min_lr)
        self.t_mult, self.lr_shrink = t_mult, _positive("lr_shrink", lr_shrink)
        if t_mult < 1:
            raise ConfigError(f"lr_scheduler.t_mult={t_mult} must be 1 or more: ever shorter periods have an end.")
        if min_lr > lr:
            raise ConfigError(f"lr_scheduler.min_lr={min_lr} is above optimization.lr={lr}.")
        self.horizon = None
        if lr_period_updates is None or lr_period_updates <= 0:
            self.horizon = _horizon(self, total_num_update)
            _warn_if_only_warmup(self.warmup_updates, self.horizon)
            lr_period_updates = max(self.horizon - self.warmup_updates, 1)
        self.period = lr_period_updates

    def lr_at(self, num_updates: int) -> float:
        if self.horizon is not None and num_updates >= max(self.horizon, self.warmup_updates):
            return self.min_lr
        return cosine_lr(
            num_updates,
            self.lr,
            self.min_lr,
            self.warmup_updates,
            self.warmup_init_lr,
            self.period,
            self.t_mult,
            self.lr_shrink,
        )


class PolynomialDecay(Schedule):
    """Warmup from zero, then ((remaining updates) / (all updates)) ** power down to `end_learning_rate` at the horizon.

    total_num_update: the horizon (null: optimization.max_update).
    With warmup the first update has rate 0, as in fairseq.
    """

    def __init__(
        self,
        optimizer,
        lr,
        max_update,
        warmup_updates: int = 0,
        end_learning_rate: float = 0.0,
        power: float = 1.0,
        total_num_update: int | None = None,
    ) -> None:
        super().__init__(optimizer, lr, max_update)
        self.warmup_updates = _not_negative("warmup_updates", warmup_updates)
        self.end_learning_rate = _not_negative("end_learning_rate", end_learning_rate)
        self.power = _positive("power", power)
        self.total = _horizon(self, total_num_update)
        _warn_if_only_warmup(self.warmup_updates, self.total)

    def lr_at(self, num_updates: int) -> float:
        return polynomial_decay_lr(
            num_updates, self.lr, self.end_learning_rate, self.power, self.warmup_updates, self.total
        )


class TriStage(Schedule):
    """Park et al. 2019: warm up, hold, decay exponentially (also known as WSD: warmup, stable, decay).

    The stages are `warmup_steps`, `hold_steps`, `decay_steps` updates long, or the shares `phase_ratio` of the horizon
    (null, with no steps given: 0.1, 0.4, 0.5). The rate begins at init_lr_scale * lr and ends at final_lr_scale * lr.
    """

    def __init__(
        self,
        optimizer,
        lr,
        max_update,
        phase_ratio: Sequence | None = None,
        warmup_steps: int = 0,
        hold_steps: int = 0,
        decay_steps: int = 0,
        init_lr_scale: float = 0.01,
        final_lr_scale: float = 0.01,
        total_num_update: int | None = None,
    ) -> None:
        super().__init__(optimizer, lr, max_update)
        self.init_lr_scale = _not_negative("init_lr_scale", init_lr_scale)
        self.final_lr_scale = _positive("final_lr_scale", final_lr_scale)
        steps = (warmup_steps, hold_steps, decay_steps)
        for key, value in zip(("warmup_steps", "hold_steps", "decay_steps"), steps):
            _not_negative(key, value)
        if any(steps):
            if phase_ratio is not None:
                raise ConfigError("lr_scheduler: give either phase_ratio or warmup_steps, hold_steps and decay_steps.")
        else:
            steps = self._steps_by_ratio(phase_ratio or (0.1, 0.4, 0.5), total_num_update)
        self.steps = steps

    def _steps_by_ratio(self, ratio: Sequence[float], total_num_update: int | None) -> tuple[int, int, int]:
        good = len(ratio) == 3 and all(isinstance(share, (int, float)) and share >= 0 for share in ratio)
        if not good or not math.isclose(sum(ratio), 1.0):
            raise ConfigError(f"lr_scheduler.phase_ratio={list(ratio)} must be three shares that add up to 1.")
        horizon = _horizon(self, total_num_update)
        return tuple(int(horizon * share) for share in ratio)

    def lr_at(self, num_updates: int) -> float:
        return tri_stage_lr(num_updates, self.lr, self.steps, self.init_lr_scale, self.final_lr_scale)


class ReduceLROnPlateau(Schedule):
    """Multiply the rate by `lr_shrink` when the score has not improved for more than `lr_patience` validations.

    lr_threshold: relative improvement that counts. maximize: larger scores are better. The state is the factor reached,
    the best score and the number of validations since; the rate itself follows from this run's optimization.lr.
    """

    def __init__(
        self,
        optimizer,
        lr,
        max_update,
        lr_shrink: float = 0.1,
        lr_threshold: float = 1e-4,
        lr_patience: int = 0,
        maximize: bool = False,
        warmup_updates: int = 0,
        warmup_init_lr: float | None = None,
    ) -> None:
        super().__init__(optimizer, lr, max_update)
        if not 0 < lr_shrink < 1:
            raise ConfigError(f"lr_scheduler.lr_shrink={lr_shrink} must lie between 0 and 1.")
        self.lr_shrink, self.maximize = lr_shrink, maximize
        self.lr_threshold = _not_negative("lr_threshold", lr_threshold)
        self.lr_patience = _not_negative("lr_patience", lr_patience)
        self.warmup_updates = _not_negative("warmup_updates", warmup_updates)
        self.warmup_init_lr = _or_default(warmup_init_lr, 0.0)
        self.factor, self.best, self.num_bad = 1.0, None, 0
        self._num_updates = 0

    def lr_at(self, num_updates: int) -> float:
        if num_updates < self.warmup_updates:
            return warmup_lr(num_updates, self.warmup_init_lr, self.lr, self.warmup_updates)
        return self.lr * self.factor

    def step_update(self, num_updates: int) -> float:
        self._num_updates = num_updates
        return super().step_update(num_updates)

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        """Take the score of a validation into account. Scores during the warmup and missing ones are not counted."""
        if val_loss is None or self._num_updates < self.warmup_updates:
            return self._current
        if self._is_better(float(val_loss)):
            self.best, self.num_bad = float(val_loss), 0
        else:
            self.num_bad += 1
        if self.num_bad > self.lr_patience:
            self.factor, self.num_bad = self.factor * self.lr_shrink, 0
        return self.step_update(self._num_updates)

    def _is_better(self, score: float) -> bool:
        if not math.isfinite(score):
            return False
        if self.best is None:
            return True
        margin = self.lr_threshold * abs(self.best)
        return score > self.best + margin if self.maximize else score < self.best - margin

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what the state has; a foreign one may know the best score only."""
        self.factor = float(state.get("factor", 1.0))
        self.best = None if state.get("best") is None else float(state["best"])
        self.num_bad = int(state.get("num_bad", 0))


# ---------------------------------------------------------------------------------------------------- torch's classes


# What torch's schedulers leave in the groups: the ends between which they move the rate and the momentum.
SCHEDULER_KEYS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


class TorchScheduler:
    """A torch.optim.lr_scheduler class, stepped once per update (its ReduceLROnPlateau: once per validation).

    Its state is saved and restored while this run's settings are the saved ones. Where the learning rate, the class's
    fields or the groups have changed, or there is no state, it is rebuilt and stepped up to num_updates, so that it
    stands where a run with these settings would.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr: float,
        cls: type,
        fields: Mapping[str, Any] = MappingProxyType({}),
        given: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        self.optimizer, self.lr, self.cls, self.fields = optimizer, lr, cls, dict(fields)
        groups = optimizer.param_groups
        self._given = given  # built by a task: how is not known, so that its first state stands for its settings
        self._before = [dict(group) for group in groups]
        self._first_state = None if given is None else copy.deepcopy(given.state_dict())
        self._listens = cls is torch.optim.lr_scheduler.ReduceLROnPlateau
        self.inner = None
        self._rebuild()
        if any("max_lr" in group for group in groups):
            logger.info("lr_scheduler: %s takes its rates from max_lr; optimization.lr has no part in them", self.name)

    @property
    def name(self) -> str:
        return self.cls.__name__

    def _rebuild(self) -> None:
        self.num_updates = 0
        if self._given is not None:
            self.inner = self._given
            self.inner.load_state_dict(copy.deepcopy(self._first_state))
            for group, before in zip(self.optimizer.param_groups, self._before, strict=True):
                group.update({key: before[key] for key in ("lr", *self._cycled(group))})
            return
        for group, before in zip(self.optimizer.param_groups, self._before, strict=True):
            group.update({key: before[key] for key in self._cycled(group)})
            for key in SCHEDULER_KEYS:
                group.pop(key, None)
            group["lr"] = self.lr * group.get("lr_scale", 1.0)
        with _quiet():
            self.inner = _torch_instance(self.cls, self.optimizer, self.fields)

    def set_base_lr(self, lr: float) -> None:
        """Another optimization.lr, in effect from the next update."""
        position, before, self.lr = self.num_updates, self.lr, lr
        if self._listens:
            for group in self.optimizer.param_groups:
                group["lr"] *= lr / before
            return
        self._rebuild()
        self.step_update(position)

    def step_update(self, num_updates: int) -> float:
        """Go to `num_updates`: usually one step, none if it stands there already."""
        if self._listens:
            self.num_updates = num_updates
        elif num_updates == self.num_updates + 1 and getattr(self.optimizer, "_opt_called", False):
            self.inner.step()
            self.num_updates = num_updates
        elif num_updates != self.num_updates:
            if num_updates < self.num_updates:
                self._rebuild()
            with _quiet():
                for _ in range(num_updates - self.num_updates):
                    self.inner.step()
            self.num_updates = num_updates
        return self.get_lr()

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        if self._listens and val_loss is not None:
            self.inner.step(float(val_loss))
        return self.get_lr()

    def get_lr(self) -> float:
        group = self.optimizer.param_groups[0]
        scale = group.get("lr_scale", 1.0)
        return float(group["lr"]) if scale in (0, 1) else float(group["lr"]) / scale

    def state_dict(self) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        return {
            "num_updates": self.num_updates,
            "settings": self._settings(),
            "inner": _plain(self.inner.state_dict()),
            "lr": [float(group["lr"]) for group in groups],
            "cycled": [{key: _plain(group[key]) for key in self._cycled(group)} for group in groups],
        }

    def _settings(self) -> dict[str, Any]:
        scales = [float(group.get("lr_scale", 1.0)) for group in self.optimizer.param_groups]
        return _plain({"lr": self.lr, "lr_scales": scales, "fields": self.fields})

    def _cycled(self, group: Mapping[str, Any]) -> list[str]:
        """The hyperparameters that this scheduler moves beside the rate."""
        if "max_momentum" not in group and not getattr(self.inner, "cycle_momentum", False):
            return []
        return [key for key in ("momentum", "betas") if key in group]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "inner" not in state:  # another class's, or none: the next step_update goes to its position
            self._rebuild()
        elif self._listens:
            self._load_listener(state)
        elif _plain(state["settings"]) == self._settings():
            _load_inner(self.inner, state["inner"])
            for group, lr, cycled in zip(self.optimizer.param_groups, state["lr"], state["cycled"], strict=True):
                group["lr"] = lr
                group.update({k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in cycled.items()})
            self.num_updates = state["num_updates"]
        else:
            logger.info("lr_scheduler: the settings of %s have changed; it is set anew to its position", self.name)
            self._rebuild()
            self.step_update(state["num_updates"])

    def _load_listener(self, state: Mapping[str, Any]) -> None:
        """Scores seen so far are the state; the reductions so far scale the rates that are configured now."""
        for key in ("best", "num_bad_epochs", "cooldown_counter", "last_epoch"):
            setattr(self.inner, key, state["inner"][key])
        old = state["settings"]
        same = _plain(old) == self._settings()
        if len(old["lr_scales"]) != len(self.optimizer.param_groups):
            raise ConfigError(
                "The parameter groups have changed, and ReduceLROnPlateau has a rate for each."
                " To go on from optimization.lr, add: checkpoint.reset_lr_scheduler=true"
            )
        for group, lr, scale in zip(self.optimizer.param_groups, state["lr"], old["lr_scales"]):
            before = old["lr"] * scale
            group["lr"] = lr if same or not before else self.lr * group.get("lr_scale", 1.0) * (lr / before)
        self.inner._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.num_updates = state["num_updates"]


def _torch_instance(cls: type, optimizer: torch.optim.Optimizer, fields: Mapping[str, Any]) -> Any:
    """`cls(optimizer, **fields)`; nodes in a list (SequentialLR's `schedulers`) are built first, on that optimizer."""
    built = {}
    scales = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
    for key, value in fields.items():
        is_list = isinstance(value, (list, tuple)) and value
        if is_list and all(isinstance(item, Mapping) and "_target_" in item for item in value):
            value = [_nested(node, optimizer, f"lr_scheduler.{key}[{i}]") for i, node in enumerate(value)]
        elif key in ("max_lr", "base_lr") and isinstance(value, (int, float)) and set(scales) != {1.0}:
            value = [value * scale for scale in scales]
        elif isinstance(value, tuple):
            value = list(value)
        built[key] = value
    try:
        return cls(optimizer, **built)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(f"lr_scheduler: {cls.__name__} refuses these settings: {error}") from error


def _nested(node: Mapping[str, Any], optimizer: torch.optim.Optimizer, section: str) -> Any:
    fields = plain_node(node, section)
    cls = get_target(fields.pop("_target_"), torch.optim.lr_scheduler.LRScheduler, f"{section}._target_")
    return _torch_instance(cls, optimizer, checked_fields(cls, fields, ("self", "optimizer", "last_epoch"), section))


def _load_inner(inner: Any, saved: Mapping[str, Any]) -> None:
    """Torch's own loading, after counters (MultiStepLR's milestones) have become counters again."""
    state = dict(saved)
    for key, value in state.items():
        if isinstance(getattr(inner, key, None), Counter):
            state[key] = Counter(value)
    inner.load_state_dict(state)


def _plain(value: Any) -> Any:
    """Dictionaries, lists and numbers only, so that any reader opens the file, and equal settings compare equal."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if not callable(item)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value


class _quiet(warnings.catch_warnings):
    """Replaying steps before the first optimizer.step is what we mean to do; torch warns of it."""

    def __enter__(self):
        result = super().__enter__()
        warnings.simplefilter("ignore", UserWarning)
        return result


# ---------------------------------------------------------------------------------------------------- building


def build_lr_scheduler(
    node: Any, optimizer: torch.optim.Optimizer, lr: float, max_update: int | None
) -> Schedule | TorchScheduler:
    """The schedule of a config node (`_target_` and its fields), for base rate `lr` and horizon `max_update` (0: none).

    Raises: ConfigError, which names the key, for unknown fields, impossible values and a horizon that is not there.
    """
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 <= lr < float("inf"):
        raise ConfigError(f"optimization.lr must be a number, 0 or more (got {lr!r}).")
    fields = plain_node(node, "lr_scheduler")
    target = fields.pop("_target_")
    cls = get_target(target, where="lr_scheduler._target_")
    if issubclass(cls, Schedule) and cls is not Schedule:
        fields = checked_fields(cls, fields, ("self", "optimizer", "lr", "max_update"), "lr_scheduler")
        return cls(optimizer, float(lr), int(max_update or 0), **fields)
    if issubclass(cls, torch.optim.lr_scheduler.LRScheduler):
        fields = checked_fields(cls, fields, ("self", "optimizer", "last_epoch"), "lr_scheduler")
        return TorchScheduler(optimizer, float(lr), cls, fields)
    raise ConfigError(
        f"lr_scheduler._target_={target} is neither a trainer.lr_scheduler.Schedule nor a torch.optim.lr_scheduler"
        " class."
    )


def adapt_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, lr: float) -> Any:
    """What a task's own `build_lr_scheduler` returned, as something that is stepped by num_updates.

    A freshly built torch.optim.lr_scheduler object is wrapped; whatever has `step_update` is taken as it is.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return TorchScheduler(optimizer, float(lr), type(scheduler), given=scheduler)
    if not hasattr(scheduler, "step_update"):
        raise ConfigError(
            f"build_lr_scheduler returned {type(scheduler).__name__}, which is neither a trainer.lr_scheduler.Schedule"
            " nor a torch.optim.lr_scheduler object."
        )
    return scheduler


def _horizon(schedule: Schedule, total_num_update: int | None) -> int:
    horizon = total_num_update or schedule.max_update
    if horizon <= 0:
        raise ConfigError(
            f"lr_scheduler {schedule.name} needs to know where training ends:"
            " set optimization.max_update or lr_scheduler.total_num_update."
        )
    return int(horizon)


def _warn_if_only_warmup(warmup_updates: int, horizon: int) -> None:
    if warmup_updates >= horizon:
        logger.warning(
            "lr_scheduler.warmup_updates=%d is not below the horizon of %d updates: the whole run is warmup",
            warmup_updates,
            horizon,
        )


def _not_negative(key: str, value: float) -> float:
    if not value >= 0:
        raise ConfigError(f"lr_scheduler.{key}={value} must be 0 or more.")
    return value


def _positive(key: str, value: float) -> float:
    if not value > 0:
        raise ConfigError(f"lr_scheduler.{key}={value} must be above 0.")
    return value


def _or_default(value: float | None, default: float) -> float:
    """fairseq writes a warmup_init_lr that is not given as -1."""
    return default if value is None or value < 0 else value
