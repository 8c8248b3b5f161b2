"""The section `distributed_training`: how ranks are started, what they share out, how long they wait."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

DDP_BACKENDS = ("pytorch_ddp", "fully_sharded")
# What takes the place of fairseq's other names. All of them sum gradients once an update here.
OTHER_BACKENDS = {
    **dict.fromkeys(("c10d", "legacy_ddp", "no_c10d", "slow_mo", "slowmo"), "pytorch_ddp"),
    **dict.fromkeys(("fsdp", "fsdp2", "fully_shard"), "fully_sharded"),
}


@dataclass
class DistributedTrainingConfig:
    """Section `distributed_training`."""

    distributed_world_size: int = field(
        default=1, metadata={"help": "ranks that plain `fairtrain` starts on this machine, >= 1; torchrun has its own"}
    )
    ddp_backend: str = field(
        default="pytorch_ddp",
        metadata={
            "help": "pytorch_ddp: every rank holds the model, gradients are summed; fully_sharded: each holds its part "
            "(FSDP2)"
        },
    )
    cpu_offload: bool = field(
        default=False,
        metadata={"help": "fully_sharded: parameters, gradients and moments lie in host memory between their uses"},
    )
    gather_in_half_precision: bool = field(
        default=False,
        metadata={
            "help": "fully_sharded with common.bf16 or fp16: parameters travel and compute in that precision, "
            "gradients are summed in float32"
        },
    )
    find_unused_parameters: bool = field(
        default=False, metadata={"help": "let ranks finish an update in which some parameters had no gradient"}
    )
    zero_sharding: str = field(
        default="none", metadata={"help": "os: each rank keeps the optimizer state of its share alone; none: all of it"}
    )
    use_sharded_state: bool = field(
        default=False,
        metadata={
            "help": "save folders of torch.distributed.checkpoint, each rank writing its own part, under the names of the "
            "files without .pt; every run loads both"
        },
    )
    backend: str = field(
        default="auto", metadata={"help": "torch.distributed backend; auto: gloo for the CPU and the accelerator's own"}
    )
    timeout_s: float = field(
        default=1800.0, metadata={"help": "seconds after which a collective that a rank does not join fails, > 0"}
    )
    heartbeat_timeout: float = field(
        default=-1.0,
        metadata={
            "help": "seconds without progress of a rank after which it is named, with its stack, and the run ends with "
            "status 1; -1: never"
        },
    )

    def problems(self) -> list[str]:
        """Sentences about values that cannot work."""
        found = []
        if self.distributed_world_size < 1:
            found.append(
                f"distributed_training.distributed_world_size is {self.distributed_world_size}, but at least one rank "
                "must train: distributed_training.distributed_world_size=1"
            )
        if self.zero_sharding not in ("none", "os"):
            found.append(
                f"distributed_training.zero_sharding is {self.zero_sharding!r}, but it must be none or os: "
                "distributed_training.zero_sharding=none"
            )
        if self.ddp_backend not in DDP_BACKENDS:
            wish = OTHER_BACKENDS.get(self.ddp_backend, " or ".join(DDP_BACKENDS))
            found.append(
                f"distributed_training.ddp_backend={self.ddp_backend} is not offered: distributed_training.ddp_backend={wish}"
            )
        if self.ddp_backend == "fully_sharded" and self.zero_sharding == "os":
            found.append(
                "distributed_training.ddp_backend=fully_sharded shards the optimizer state as well: leave out "
                "distributed_training.zero_sharding=os"
            )
        for name in ("cpu_offload", "gather_in_half_precision"):
            if getattr(self, name) and self.ddp_backend != "fully_sharded":
                found.append(
                    f"distributed_training.{name}=true is for sharded models: add "
                    "distributed_training.ddp_backend=fully_sharded, or leave it out"
                )
        if self.backend != "auto" and (missing := missing_backends(self.backend)):
            found.append(
                f"distributed_training.backend={self.backend}: this torch ({torch.__version__}) has no backend "
                f"{' or '.join(map(repr, missing))}, it has {', '.join(built_backends())}: distributed_training.backend=auto"
            )
        if self.timeout_s <= 0:
            found.append(
                f"distributed_training.timeout_s is {self.timeout_s}, but it must be above 0: "
                "distributed_training.timeout_s=1800"
            )
        if self.heartbeat_timeout <= 0 and self.heartbeat_timeout != -1:
            found.append(
                f"distributed_training.heartbeat_timeout is {self.heartbeat_timeout:g}, but it must be above 0, or -1 for "
                "none: distributed_training.heartbeat_timeout=-1"
            )
        if self.heartbeat_timeout >= self.timeout_s > 0:
            found.append(
                f"distributed_training.heartbeat_timeout is {self.heartbeat_timeout:g}, but it must be below "
                f"distributed_training.timeout_s={self.timeout_s:g}, after which the waiting ranks give up themselves: "
                f"distributed_training.timeout_s={2 * self.heartbeat_timeout:g}"
            )
        return found


def missing_backends(backend: str) -> list[str]:
    """Of a backend as torch takes it, `NAME` or `DEVICE:NAME,...`, the names that this torch does not have."""
    names = [part.rpartition(":")[2].strip() for part in backend.split(",")]
    return [name for name in names if name.lower() not in built_backends()]


def built_backends() -> list[str]:
    """The backends that this torch was built with, and those that others have registered; not that of its own tests."""
    known = [name for name in dist.Backend.backend_list if name not in (dist.Backend.UNDEFINED, "fake")]
    return [name for name in known if dist.is_backend_available(name)]
