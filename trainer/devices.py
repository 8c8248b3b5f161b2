"""Where a rank computes, and how a batch gets there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def choose_device(cpu: bool) -> torch.device:
    """The CPU where that is asked for or nothing else is there, else this rank's accelerator."""
    if cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    # Which one is the rank's was set when it joined the process group.
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def move(sample: Any, device: torch.device) -> Any:
    """The nest `sample` with each tensor on `device`; what is no container or tensor stays as it is."""
    if isinstance(sample, Tensor):
        return sample.to(device, non_blocking=True)
    if isinstance(sample, Mapping):
        return type(sample)((key, move(value, device)) for key, value in sample.items())
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*(move(value, device) for value in sample))
    if isinstance(sample, (list, tuple)):
        return type(sample)(move(value, device) for value in sample)
    return sample
