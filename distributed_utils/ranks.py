"""Rank facts: who this process is in a group, and where the messages of the group live."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in `group` (None: in the world); 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in `group` (None: the world); 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """The rank in the world of `rank` of `group` (None: the world)."""
    return rank if group is None else dist.get_global_rank(group, rank)


def get_local_world_size() -> int:
    """The number of ranks on this machine; 1 without a process group."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if dist.is_initialized() else 1


def is_master(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is rank 0 of `group`."""
    return get_rank(group) == 0


# More than any run lasts, and few enough milliseconds for the clocks of the backends.
AS_LONG_AS_IT_TAKES = datetime.timedelta(days=1000)


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Return when every rank of `group` has called, however long the slowest takes.

    The timeout of the process group does not count here: ranks come from work of unequal length, such as a save or a
    validation. A rank that dies ends the wait; one that stands still is found by `heartbeat_timeout`.
    """
    if get_world_size(group) > 1:
        token = torch.zeros(1, device=communication_device(group))
        (group or dist.group.WORLD).allreduce([token], dist.ReduceOp.SUM, AS_LONG_AS_IT_TAKES).wait()
        token.item()  # with an accelerator's backend the wait above is not this process's, but the device's


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where small messages of `group` live: the CPU if its backend can send from there, else the accelerator."""
    if not dist.is_initialized() or "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator()
