"""The moving average of a model's weights.

Owns: the averages, when and how fast they follow, and the exchange of trained and averaged weights for a validation.
Float parameters are averaged in float32 (float64 in float64); every other tensor that a state_dict has (buffers,
integer and bool parameters) is copied. How fast the average follows depends on num_updates alone, so that nothing but
the averages is state.
Must not know: the Trainer, files, the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.sharding import described, described_state, is_dtensor, local_of, placement_of

Copy = Callable[[list[tuple[Any, Tensor]]], None]


@dataclass
class EMAConfig:
    """The moving average of the weights."""

    store_ema: bool = field(
        default=False, metadata={"help": "keep a moving average of the weights, in the checkpoint too"}
    )
    ema_decay: float = field(
        default=0.9999, metadata={"help": "share of the old average that stays each time, 0 to 1 (0: a plain copy)"}
    )
    ema_update_freq: int = field(default=1, metadata={"help": "average after every this many updates, 1 or more"})
    ema_start_update: int = field(
        default=0, metadata={"help": "before this update the average is a copy (0: average from the first update)"}
    )
    ema_warmup: bool = field(
        default=False, metadata={"help": "let the decay grow as (1 + n) / (10 + n), n updates after ema_start_update"}
    )
    ema_validate: bool = field(
        default=False, metadata={"help": "validate the averaged weights instead of the trained ones"}
    )

    def problems(self) -> list[str]:
        found = []
        if not 0 <= self.ema_decay <= 1:
            found.append(f"ema.ema_decay={self.ema_decay} must lie between 0 and 1, such as ema.ema_decay=0.9999.")
        if self.ema_update_freq < 1:
            found.append(f"ema.ema_update_freq={self.ema_update_freq} must be 1 or more (1: after every update).")
        if self.ema_start_update < 0:
            found.append(f"ema.ema_start_update={self.ema_start_update} must be 0 or more.")
        if self.ema_validate and not self.store_ema:
            found.append("ema.ema_validate=true needs an average: add ema.store_ema=true.")
        return found


def decay_at(cfg: Any, num_updates: int) -> float | None:
    """The share of the old average that stays after update `num_updates`; None where no averaging is due."""
    if num_updates % cfg.ema_update_freq:
        return None
    if num_updates < cfg.ema_start_update:
        return 0.0
    if cfg.ema_warmup:
        since = num_updates - cfg.ema_start_update
        return min(cfg.ema_decay, (1 + since) / (10 + since))
    return cfg.ema_decay


@dataclass
class EMAReport:
    """What `EMA.restore` did, by name."""

    restored: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # not in the file: start from the current weights
    unexpected: list[str] = field(default_factory=list)  # in the file, not in the model

    def lines(self) -> list[str]:
        lines = [f"ema: {len(self.restored)} tensors restored"]
        for what, names in (("not in the file, start from the current weights", self.missing),
                            ("in the file, not in the model", self.unexpected)):
            if names:
                more = f" and {len(names) - 10} more" if len(names) > 10 else ""
                lines.append(f"ema: {what}: {', '.join(names[:10])}{more}")
        return lines


class EMA:
    """The average of `model` (the bare module), which begins as a copy of its present weights.

    Args: cfg: the section `ema` (an EMAConfig or anything with its fields).
    """

    def __init__(self, model: nn.Module, cfg: Any) -> None:
        # Plain numbers: the fields of an OmegaConf node cost 30 us to read, as much as the averaging itself.
        names = EMAConfig.__dataclass_fields__
        self.cfg = EMAConfig(**{name: getattr(cfg, name) for name in names if hasattr(cfg, name)})
        self.model = model
        self._aliases: dict[str, str] = {}  # every name of a state_dict -> the first name of the same tensor
        self._averages: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] | None = None
        self._collect(start=True)

    @torch.no_grad()
    def _collect(self, start: bool = False) -> None:
        """Sort the model's tensors into averaged and copied ones. Names that are new begin at their present value."""
        first: dict[int, str] = {}
        self._aliases, parameters, others = {}, {}, {}
        for name, tensor in _named_tensors(self.model).items():
            self._aliases[name] = first.setdefault(id(tensor), name)
            if self._aliases[name] != name:
                continue
            averaged = isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex())
            (parameters if averaged else others)[name] = tensor
        for known, current in ((self._averages, parameters), (self._copies, others)):
            for name in known.keys() - current.keys():
                del known[name]
            for name, tensor in current.items():
                if start or name not in known:
                    wide = torch.promote_types(tensor.dtype, torch.float32) if known is self._averages else None
                    known[name] = _copied(local_of(tensor), wide or tensor.dtype, known.get(name))
        self._averages = {name: self._averages[name] for name in parameters}
        self._copies = {name: self._copies[name] for name in others}
        self._parameters, self._others = parameters, others
        self._slots = _buffer_slots(self.model, others)
        averages, weights = list(self._averages.values()), [_memory(p) for p in parameters.values()]
        self._same = [(a, p) for a, p in zip(averages, weights) if a.dtype == p.dtype]
        self._wider = [(a, p) for a, p in zip(averages, weights) if a.dtype != p.dtype]
        self._same_lists = ([a for a, _ in self._same], [p for _, p in self._same])

    @torch.no_grad()
    def update(self, model: nn.Module, num_updates: int) -> None:
        """Move the averages towards the weights that update `num_updates` left; copy what is not averaged."""
        if self._trained is not None:
            raise RuntimeError("the averaged weights are swapped in; training goes on only after they are swapped out")
        decay = decay_at(self.cfg, num_updates)
        if decay is None:
            return
        if self._same:
            torch._foreach_lerp_(*self._same_lists, 1.0 - decay)
        if self._wider:
            averages = [average for average, _ in self._wider]
            torch._foreach_lerp_(averages, [p.to(a.dtype) for a, p in self._wider], 1.0 - decay)
        if self._others:
            self._copy_others()

    def _copy_others(self) -> None:
        for name, (module, key) in self._slots.items():
            buffer, copied = module._buffers[key], self._copies[name]
            if buffer is None or copied.shape != buffer.shape or copied.dtype != buffer.dtype:
                del self._copies[name]
                self._collect()
                return self._copy_others()
            self._others[name] = buffer
        if self._others:
            torch._foreach_copy_(list(self._copies.values()), list(self._others.values()))

    @property
    def copies(self) -> list[Tensor]:
        """The tensors that are copied and not averaged: as with the buffers they come from, ranks may differ in them."""
        return list(self._copies.values())

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Tensor]:
        """All names that the model's state_dict has, in its order; tied names share one tensor. The live tensors."""
        if self._trained is None:
            with torch.no_grad():
                self._collect()
        tensors = {name: self._described(name, average) for name, average in self._averages.items()} | self._copies
        return {name: tensors[first] for name, first in self._aliases.items()}

    def _described(self, name: str, average: Tensor) -> Any:
        placement = placement_of(self._parameters[name])
        return average if placement is None else described(average, placement)

    def restart(self) -> None:
        """Begin again as a copy of the present weights."""
        self._collect(start=True)

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any] | None, copy: Copy) -> EMAReport:
        """Take the averages of a file; call it after the model has been loaded.

        Args:
            saved: name -> tensor or reference to one; None or empty for a file without EMA.
            copy: called once with (saved, tensor) pairs.
        Raises: ConfigError for parameters of another shape; nothing is changed then.
        """
        saved = saved or {}
        self._collect(start=True)  # what the file lacks starts from the weights as they are now
        self._check_shapes(saved)
        report, pairs, done = EMAReport(), [], set()
        for name, first in self._aliases.items():
            if name in saved and first not in done:
                done.add(first)
                pairs.append((saved[name], self._target(first, saved[name])))
        report.restored = [first for first in dict.fromkeys(self._aliases.values()) if first in done]
        report.missing = [first for first in dict.fromkeys(self._aliases.values()) if first not in done]
        report.unexpected = [name for name in saved if name not in self._aliases]
        if pairs:
            copy(pairs)
        return report

    def _check_shapes(self, saved: Mapping[str, Any]) -> None:
        wrong = [
            f"{name}: {list(saved[name].shape)} in the file, {list(self._parameters[first].shape)} here"
            for name, first in self._aliases.items()
            if name in saved and first in self._averages
            if tuple(saved[name].shape) != tuple(self._parameters[first].shape)
        ]
        if wrong:
            more = f" (and {len(wrong) - 10} more)" if len(wrong) > 10 else ""
            raise ConfigError(f"The saved EMA does not fit the model: {'; '.join(wrong[:10])}{more}.")

    def _target(self, first: str, saved: Any) -> Tensor:
        if first in self._averages:
            return self._described(first, self._averages[first])
        copied = self._copies[first]
        if tuple(copied.shape) != tuple(saved.shape) or copied.dtype != saved.dtype:
            copied = self._copies[first] = torch.empty(tuple(saved.shape), dtype=saved.dtype, device=copied.device)
        return copied

    # ------------------------------------------------------------------------------------------------ exchange

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Within the block the model computes with the averages; afterwards, and after an exception, with its own.

        Memory is exchanged, not copied (a parameter in another dtype than its average gets a cast copy). May be nested.
        Of a DTensor the memory stays, since others hold on to it, and its values are exchanged.
        """
        if self._trained is not None:
            yield
            return
        self._trained = {}
        try:
            for name, parameter in self._parameters.items():
                self._swap_in(name, parameter)
            yield
        finally:
            for name, trained in self._trained.items():
                self._swap_out(name, self._parameters[name], trained)
            self._trained = None

    @torch.no_grad()
    def _swap_in(self, name: str, parameter: nn.Parameter) -> None:
        average = self._averages[name]
        if not is_dtensor(parameter):
            self._trained[name] = parameter.data
            parameter.data = average.to(parameter.dtype)
            return
        weights = local_of(parameter)
        trained = weights.clone()
        weights.copy_(average)
        if average.dtype == weights.dtype:  # one copy of the largest tensor at a time, not of the model
            self._averages[name], trained = weights, average.copy_(trained)
        self._trained[name] = trained

    @torch.no_grad()
    def _swap_out(self, name: str, parameter: nn.Parameter, trained: Tensor) -> None:
        if not is_dtensor(parameter):
            parameter.data = trained
            return
        weights = local_of(parameter)
        if trained.dtype == self._averages[name].dtype:
            average = weights.clone()
            weights.copy_(trained)
            self._averages[name] = trained.copy_(average)
        else:
            weights.copy_(trained)

    def training_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's described state with the weights that are being trained, also while the averages are swapped in."""
        state = described_state(model)
        if self._trained is not None:
            trained = {name: self._described(name, tensor) for name, tensor in self._trained.items()}
            state.update({name: trained[first] for name, first in self._aliases.items() if first in trained})
        return state


def _memory(parameter: nn.Parameter) -> Tensor:
    return local_of(parameter) if is_dtensor(parameter) else parameter


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's state_dict, as the objects that the model holds."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _copied(tensor: Tensor, dtype: torch.dtype, memory: Tensor | None) -> Tensor:
    """`tensor` as `dtype`, in `memory` where it fits: a second copy of everything would show in the peak of a load."""
    if memory is not None and (memory.shape, memory.dtype, memory.device) == (tensor.shape, dtype, tensor.device):
        return memory.copy_(tensor)
    return tensor.to(dtype, copy=True)


def _buffer_slots(model: nn.Module, names: Mapping[str, Tensor]) -> dict[str, tuple[nn.Module, str]]:
    """Where each buffer lives, since modules may replace the tensor itself."""
    slots = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key in module._buffers:
            name = f"{prefix}.{key}" if prefix else key
            if name in names:
                slots[name] = (module, key)
    return slots
