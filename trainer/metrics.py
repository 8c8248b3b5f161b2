"""What an update or a validation counts: sums over micro-batches, over ranks, over an epoch.

Owns: `LocalSums` (one rank), `GlobalSums` (one message for all ranks), `EpochMeter` (what the file remembers).
Must not know: what the numbers mean. A task's `reduce_metrics` turns sums into what is logged.
"""

from __future__ import annotations

import math
from typing import Any, Mapping

import torch
from torch import Tensor

import distributed_utils

Number = float | int | Tensor

# Places in the message of an update; the values of the logging outputs follow, then on how many ranks each was given.
_SAMPLE_SIZE, _LOSS, _STOP, _SAVE, _BUFFERS, _WRITTEN, _FAILED, _NEW_NAMES = range(8)
_NUM_RESERVED = 8


class LocalSums:
    """Sums of one rank over the micro-batches of an update, or over the batches of a validation."""

    def __init__(self) -> None:
        self.sample_size: Number = 0
        self.loss: Number = 0
        self.outputs: dict[str, Number] = {}

    def add(self, loss: Tensor, sample_size: Number, logging_output: Mapping[str, Number]) -> None:
        """Add one batch: `loss` is a sum over its samples, `logging_output` holds sums (numbers or 0-dim tensors)."""
        self.sample_size = self.sample_size + sample_size
        self.loss = self.loss + _plain(loss.detach())
        outputs = self.outputs
        for name, value in logging_output.items():
            value = _plain(value)
            outputs[name] = outputs[name] + value if name in outputs else value


def _plain(value: Number) -> Number:
    """A tensor on the CPU as a Python number (float64 from here on); one on an accelerator stays, to wait for nothing."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value.item() if value.device.type == "cpu" else value.double()
    return value


class GlobalSums:
    """The sums and requests that all ranks share in an update, in one float64 message.

    The message is known after the last forward and travels while the last backward runs, so it costs no wait. All
    ranks get all messages and add them up exactly: an all-reduce adds in an order that depends on the place in the
    message, and places depend on what was logged before, which would show in the last bit after a resume.
    Which value has which place is agreed when a name is first seen: the update that meets a new name gathers the
    outputs by name once, after its message has said so.
    """

    def __init__(self, group: Any, world_size: int, device: torch.device) -> None:
        self._group, self._world_size, self._device = group, world_size, device
        self._names: list[str] = []
        self._local: LocalSums | None = None
        self._messages: Tensor | None = None
        self._work: Any = None
        self.stop_requested = self.save_requested = self.buffers_changed = False
        self.all_written, self.any_write_failed = True, False

    def start(
        self,
        local: LocalSums,
        stop: bool = False,
        save: bool = False,
        buffers_changed: bool = False,
        written: bool = True,
        write_failed: bool = False,
    ) -> None:
        """Send this rank's sums on their way. With one rank nothing is sent.

        written, write_failed: whether this rank is done with its share of a save, and whether that went wrong.
        """
        self._local = local
        if self._world_size == 1:
            self.stop_requested, self.save_requested, self.buffers_changed = stop, save, buffers_changed
            self.all_written, self.any_write_failed = written, write_failed
            return
        new_names = any(name not in self._names for name in local.outputs)
        values = [local.sample_size, local.loss, stop, save, buffers_changed, written, write_failed, new_names]
        values += [local.outputs.get(name, 0.0) for name in self._names]
        values += [name in local.outputs for name in self._names]
        message = _vector(values, self._device)
        self._messages = message.new_empty(self._world_size, len(values))
        self._work = torch.distributed.all_gather(list(self._messages), message, group=self._group, async_op=True)

    def finish(self) -> tuple[float, float, dict[str, float]]:
        """The global (sample_size, loss, outputs). Outputs hold the names that any rank gave in this update."""
        local, self._local = self._local, None
        assert local is not None, "start comes before finish"
        if self._world_size == 1:
            return float(local.sample_size), float(local.loss), {k: float(v) for k, v in local.outputs.items()}
        self._work.wait()
        sums = [math.fsum(column) for column in zip(*self._messages.tolist())]
        self.stop_requested, self.save_requested = sums[_STOP] > 0, sums[_SAVE] > 0
        self.buffers_changed = sums[_BUFFERS] > 0
        self.all_written, self.any_write_failed = sums[_WRITTEN] == self._world_size, sums[_FAILED] > 0
        if sums[_NEW_NAMES] > 0:
            return sums[_SAMPLE_SIZE], sums[_LOSS], self._gather_outputs(local)
        places = range(_NUM_RESERVED, _NUM_RESERVED + len(self._names))
        given = {name: sums[i] for name, i in zip(self._names, places) if sums[i + len(self._names)] > 0}
        return sums[_SAMPLE_SIZE], sums[_LOSS], given

    def _gather_outputs(self, local: LocalSums) -> dict[str, float]:
        mine = {name: float(value) for name, value in local.outputs.items()}
        gathered = distributed_utils.all_gather_list(mine, self._group)
        given = sorted({name for outputs in gathered for name in outputs})
        # Sorted, so that what is logged does not show in which order names came up.
        self._names = sorted({*self._names, *given})
        return {name: math.fsum(outputs.get(name, 0.0) for outputs in gathered) for name in given}


def _vector(values: list[Number], device: torch.device) -> Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([torch.as_tensor(value, dtype=dtype, device=device).reshape(()) for value in values])
    return torch.tensor(values, dtype=dtype, device=device)


class EpochMeter:
    """Sums over the updates of the current epoch, for its summary line. Python floats, so a resume goes on exactly."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.num_updates = 0
        self.sample_size = 0.0
        self.sums: dict[str, float] = {}

    def add(self, sample_size: float, outputs: Mapping[str, float]) -> None:
        self.num_updates += 1
        self.sample_size += sample_size
        sums = self.sums
        for name, value in outputs.items():
            sums[name] = sums.get(name, 0.0) + value

    def state_dict(self) -> dict:
        return {"num_updates": self.num_updates, "sample_size": self.sample_size, "sums": dict(self.sums)}

    def load_state_dict(self, state: Mapping) -> None:
        self.num_updates, self.sample_size = int(state["num_updates"]), float(state["sample_size"])
        self.sums = {name: float(value) for name, value in state["sums"].items()}
