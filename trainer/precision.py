"""Half precision: which autocast a forward pass runs in, and the loss scale of float16.

Owns: the dynamic loss scaler, a Python number with counters. Parameters stay float32; bf16 needs no scaling.
Must not know: the Trainer, the optimizer. Whether an update overflowed is told to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ConfigError

SCALE_FACTOR = 2.0  # a power of two: scaling and unscaling are exact


class LossScaleFloorError(FloatingPointError):
    """Gradients overflow even at the smallest loss scale allowed; training has diverged."""

    def __init__(self, scale: float, floor: float, num_updates: int | None) -> None:
        self.scale, self.floor, self.num_updates = scale, floor, num_updates
        when = "" if num_updates is None else f" at update {num_updates}"
        super().__init__(
            f"Gradients overflow float16{when} even with a loss scale of {scale:g}, and common.min_loss_scale={floor:g}"
            " allows no smaller one: the loss has probably diverged. Lower optimization.lr, raise the warmup, set"
            " optimization.clip_norm, or train with common.fp16=false common.bf16=true."
        )


class FullPrecision:
    """float32: nothing to do. The other precisions differ from this one by what they override."""

    name = "fp32"
    loss_scale = 1.0  # what gradients must be divided by, together with the sample size
    can_overflow = False  # whether an update may have to be skipped

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context of a forward pass."""
        return _NO_CONTEXT

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the loss scale in place, for callers that do not divide by `loss_scale` themselves."""

    def update(self, overflow: bool, num_updates: int | None = None) -> None:
        """Tell whether the gradients of this update overflowed (it is skipped then)."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class BFloat16(FullPrecision):
    """bfloat16 autocast. Its range is float32's, so that losses are not scaled."""

    name = "bf16"
    dtype = torch.bfloat16

    def __init__(self, device: torch.device) -> None:
        self.device_type = torch.device(device).type

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device_type, dtype=self.dtype)


class Float16(BFloat16):
    """float16 autocast with a dynamic loss scale, by fairseq's rules.

    The scale doubles after every `window` updates without overflow. An overflow halves it, where at least `tolerance`
    (a share, 0 to 1) of the updates since the last change overflowed, and not below `threshold` if that is given.
    """

    name = "fp16"
    dtype = torch.float16
    can_overflow = True

    def __init__(
        self,
        device: torch.device,
        init_scale: float,
        window: int,
        tolerance: float,
        threshold: float | None,
        min_loss_scale: float,
    ) -> None:
        super().__init__(device)
        self.loss_scale = float(init_scale)
        self.window, self.tolerance, self.threshold, self.min_loss_scale = window, tolerance, threshold, min_loss_scale
        self.updates_since_overflow = self.updates_since_change = self.overflows_since_change = 0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.loss_scale)

    def update(self, overflow: bool, num_updates: int | None = None) -> None:
        """Adapt the scale to the outcome of an update.

        Args: num_updates: named in the error.
        Raises: LossScaleFloorError where the scale would sink to min_loss_scale; the scale stays as it was.
        """
        self.updates_since_change += 1
        if overflow:
            self.updates_since_overflow = 0
            self.overflows_since_change += 1
            if self.overflows_since_change / self.updates_since_change >= self.tolerance:
                self._halve(num_updates)
        else:
            self.updates_since_overflow += 1
            if self.updates_since_overflow % self.window == 0:
                self._change_to(self.loss_scale * SCALE_FACTOR)

    def _halve(self, num_updates: int | None) -> None:
        scale = self.loss_scale / SCALE_FACTOR
        if self.threshold is not None:
            scale = max(scale, self.threshold)
        if scale <= self.min_loss_scale:
            raise LossScaleFloorError(self.loss_scale, self.min_loss_scale, num_updates)
        self._change_to(scale)

    def _change_to(self, scale: float) -> None:
        self.loss_scale = scale
        self.updates_since_change = self.overflows_since_change = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss_scale": self.loss_scale,
            "updates_since_overflow": self.updates_since_overflow,
            "updates_since_change": self.updates_since_change,
            "overflows_since_change": self.overflows_since_change,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the saved scale. What the file does not know (it may be a float32 run's) is fresh."""
        self.loss_scale = float(state.get("loss_scale", self.loss_scale))
        self.updates_since_overflow = int(state.get("updates_since_overflow", 0))
        self.updates_since_change = int(state.get("updates_since_change", 0))
        self.overflows_since_change = int(state.get("overflows_since_change", 0))


_NO_CONTEXT = contextlib.nullcontext()


def build_precision(common: Any, device: torch.device, updates_per_window: int = 2**14) -> FullPrecision:
    """The precision that `common.fp16` and `common.bf16` ask for.

    Args:
        common: the section `common`. fp16_scale_window null or 0: `updates_per_window`.
        device: where the model is.
    Raises: ConfigError for both at once and for impossible values of the scaler.
    """
    fp16, bf16 = bool(getattr(common, "fp16", False)), bool(getattr(common, "bf16", False))
    if fp16 and bf16:
        raise ConfigError("common.fp16 and common.bf16 exclude each other: set one of them to false.")
    if bf16:
        return BFloat16(device)
    if not fp16:
        return FullPrecision()
    scaler = {
        "init_scale": getattr(common, "fp16_init_scale", 128),
        "window": int(getattr(common, "fp16_scale_window", None) or updates_per_window),
        "tolerance": getattr(common, "fp16_scale_tolerance", 0.0),
        "threshold": getattr(common, "threshold_loss_scale", None),
        "min_loss_scale": getattr(common, "min_loss_scale", 1e-4),
    }
    problems = [
        f"common.{key}={value} must be above 0."
        for key, value in (("fp16_init_scale", scaler["init_scale"]), ("fp16_scale_window", scaler["window"]))
        if not value > 0
    ]
    if not scaler["init_scale"] > scaler["min_loss_scale"] >= 0:
        problems.append(
            f"common.min_loss_scale={scaler['min_loss_scale']} must lie between 0 and common.fp16_init_scale."
        )
    if problems:
        raise ConfigError(" ".join(problems))
    return Float16(device, **scaler)
