"""Process groups, rank facts, objects and tensors between ranks, agreement on errors, and the death of peers.

Owns: what the variables of a launch mean, how nests of plain values and tensors travel (tensors as bytes in bounded
buckets, never pickled; nothing that arrives is executed), and how one rank's failure becomes known to all.
Every function also works where no process group is initialised, as the only rank of a world of one.
Must not know: files, checkpoints, the Trainer.

    RuntimeError
      PeerError                 another rank failed: which, how
      CannotBroadcastError      the backend of the process group has no broadcast            status 2
      LostStoreError            who held the store of the launch ended while the ranks gathered
      StoppedAtStartError       told to stop before the first update                         status 75
    ValueError
      LaunchEnvironmentError    the variables of the launch contradict each other            status 2
    TypeError
      CannotSendError           a value that ranks do not exchange, with its key path
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import io
import json
import os
import pickle
import re
import select
import signal
import socket
import sys
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 * 2**20  # what a rank holds in flight beside the object itself
PACKED_BYTES = 2**20  # blocks up to this size share a bucket, larger ones travel straight from and to their memory
PAYLOAD_BYTES = 4 * 2**20  # of the plain part of an object at a time
HEADER_BYTES = 4096  # a small object travels in its header
GATHER_BYTES = 256  # the same for all_gather_list
RENDEZVOUS_S = 300.0  # how long ranks wait for each other at the start
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
        if self.timeout_s <= 0:
            found.append(
                f"distributed_training.timeout_s is {self.timeout_s}, but it must be above 0: "
                "distributed_training.timeout_s=1800"
            )
        return found


class PeerError(RuntimeError):
    """Another rank failed. `rank`, `class_name` and `message` are its, `exit_status` is the one it stands for."""

    is_user_error = True

    def __init__(self, rank: int, class_name: str, message: str, exit_status: int = 1) -> None:
        self.rank, self.class_name, self.message, self.exit_status = rank, class_name, message, exit_status
        super().__init__(f"rank {rank} failed: {class_name}: {message}")


class LaunchEnvironmentError(ValueError):
    """The variables that a launcher sets contradict each other or are incomplete; the message prints them."""

    is_user_error = True
    exit_status = 2

    def __init__(self, problem: str, env: Mapping[str, str]) -> None:
        shown = " ".join(f"{name}={env[name]}" for name in LAUNCH_VARIABLES if name in env)
        super().__init__(f"{problem} ({shown}). Start with torchrun, or plainly with these variables unset.")


class StoppedAtStartError(RuntimeError):
    """A stop was requested by `signal_name` before this start made an update: nothing has begun, nothing is lost."""

    is_user_error = True
    exit_status = 75

    def __init__(self, signal_name: str) -> None:
        super().__init__(f"stopped by {signal_name} before the first update; start me again")


class LostStoreError(RuntimeError):
    """Whoever held the store of the launch, rank 0 or the launcher, ended while the ranks were gathering."""

    is_user_error = True


class CannotSendError(TypeError):
    """A value of a type that ranks do not exchange; the message gives its key path."""


class CannotBroadcastError(RuntimeError):
    """The backend of the process group has no broadcast."""

    is_user_error = True
    exit_status = 2

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend = backend
        super().__init__(
            f"the backend {backend} cannot broadcast from {device}. Choose one that can: distributed_training.backend=auto"
            " (or, to read a checkpoint only, let every rank do it: checkpoint.load_checkpoint_on_all_dp_ranks=true)"
        )


# --------------------------------------------------------------------------------------------- who started this process

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchFacts:
    """This process's place in the launch that started it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    store_is_agents: bool  # torchrun's agent holds the store; else rank 0 does
    started_by_agent: bool  # torchrun or our launcher is the parent process


def launch_facts(env: Mapping[str, str] | None = None, ancestors: Iterable[int] | None = None) -> LaunchFacts | None:
    """What the variables of torchrun (or of srun, where srun started us) say; None: nobody launched ranks.

    A part of the variables is left over from another launch and counts as none (see `stale_variables`).
    Raises LaunchEnvironmentError where they contradict each other.
    """
    env = os.environ if env is None else env
    by_agent = "TORCHELASTIC_RUN_ID" in env
    missing = [name for name in _NEEDED if not env.get(name)]
    if missing and by_agent:
        raise LaunchEnvironmentError(f"torchrun started this process, but {', '.join(missing)} is missing", env)
    _check_ranks(env)
    if missing:
        return _srun_facts(env, ancestors)
    if not env.get("LOCAL_RANK"):
        raise LaunchEnvironmentError("LOCAL_RANK is missing", env)
    local_rank = int(env["LOCAL_RANK"])
    return LaunchFacts(
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_rank=local_rank,
        local_world_size=int(env.get("LOCAL_WORLD_SIZE") or local_rank + 1),
        master_addr=env["MASTER_ADDR"],
        master_port=int(env["MASTER_PORT"]),
        store_is_agents=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        started_by_agent=by_agent,
    )


def stale_variables(env: Mapping[str, str] | None = None) -> list[str]:
    """Names of launch variables that are set though no launcher started this process."""
    env = os.environ if env is None else env
    if all(env.get(name) for name in _NEEDED):
        return []
    return [name for name in LAUNCH_VARIABLES if env.get(name)]


def _check_ranks(env: Mapping[str, str]) -> None:
    number = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if env.get(name):
            if not re.fullmatch(r"\d{1,9}", env[name].strip()):
                raise LaunchEnvironmentError(f"{name} is {env[name]!r}, not a number", env)
            number[name] = int(env[name])
    for small, large in [("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK", "WORLD_SIZE")]:
        if small in number and large in number and number[small] >= number[large]:
            raise LaunchEnvironmentError(f"{small} must be below {large}", env)
    for small, large in [("LOCAL_WORLD_SIZE", "WORLD_SIZE"), ("LOCAL_RANK", "RANK")]:
        if small in number and large in number and number[small] > number[large]:
            raise LaunchEnvironmentError(f"{small} must not be above {large}", env)
    if "MASTER_PORT" in number and not 0 < number["MASTER_PORT"] < 65536:
        raise LaunchEnvironmentError("MASTER_PORT is no port", env)


def _srun_facts(env: Mapping[str, str], ancestors: Iterable[int] | None) -> LaunchFacts | None:
    """The ranks of a job step, if srun started this process as one of several tasks. A batch script is no such task."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_TASK_PID", "SLURM_JOB_ID")
    if not all(re.fullmatch(r"\d{1,10}", env.get(name, "")) for name in names):
        return None
    rank, world_size, local_rank, step, task_pid, job = (int(env[name]) for name in names)
    first_special_step = 0xFFFFFFF0  # batch, interactive and extern steps have numbers from here
    if world_size < 2 or rank >= world_size or step >= first_special_step:
        return None
    if task_pid not in set(_ancestors() if ancestors is None else ancestors):
        return None  # inherited from a shell or another program that srun started elsewhere
    per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return LaunchFacts(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(per_node.group()) if per_node else local_rank + 1,
        master_addr=env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "localhost")),
        master_port=int(env.get("MASTER_PORT") or 20000 + (job * 7 + step) % 20000),
        store_is_agents=False,
        started_by_agent=False,
    )


def _first_host(nodelist: str) -> str:
    """`gpu[03-05,9]-ib,other` names gpu03-ib first."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    return "".join(part or "" for part in found.groups()) if found else nodelist


def _ancestors() -> list[int]:
    """This process and the processes that it descends from, where /proc tells."""
    pids, pid = [], os.getpid()
    while pid > 1:
        pids.append(pid)
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
    return pids


# ------------------------------------------------------------------------------------------------ groups and rank facts


def init_process_group(
    cfg: Any = None,
    cpu: bool = False,
    facts: LaunchFacts | None = None,
    store: dist.Store | None = None,
) -> None:
    """Join the process group of the launch that started this process. Nothing happens if there is one, or no launch.

    cfg: the section distributed_training. cpu: leave accelerators alone. store: of `gather_ranks`, which is called
    if there is none. Raises what `gather_ranks` raises.
    """
    if dist.is_initialized():
        return
    facts = facts or launch_facts()
    if facts is None:
        return
    cfg = cfg or DistributedTrainingConfig()
    store = store or gather_ranks(cfg, facts)
    if not cpu and torch.accelerator.is_available():
        torch.accelerator.set_device_index(facts.local_rank % torch.accelerator.device_count())
    dist.init_process_group(
        _backend(cfg.backend, cpu),
        store=store,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=datetime.timedelta(seconds=cfg.timeout_s),
    )


def gather_ranks(cfg: Any, facts: LaunchFacts, stop_signal: Callable[[], str | None] = lambda: None) -> dist.Store:
    """Wait until all ranks have come, and return the store of the launch.

    stop_signal: asked while the ranks gather; the name of the signal that asked for a stop, if one did.
    Raises LaunchEnvironmentError, StoppedAtStartError on the first rank that leaves for a stop and PeerError of it on
    the others, LostStoreError, or TimeoutError naming the ranks that did not come.
    """
    store = _connect(facts)
    try:
        _gather(store, facts, min(RENDEZVOUS_S, cfg.timeout_s), stop_signal)
    except dist.DistError as error:
        holder = "the launcher" if facts.store_is_agents else "rank 0"
        raise LostStoreError(f"{holder} ended while the ranks were gathering ({error})") from error
    return store


def _backend(backend: str, cpu: bool) -> str:
    if backend != "auto":
        return backend
    if cpu or not torch.accelerator.is_available():
        return "gloo"
    accelerator = torch.accelerator.current_accelerator().type
    return f"cpu:gloo,{accelerator}:{dist.Backend.default_device_backend_map[accelerator]}"


def _connect(facts: LaunchFacts) -> dist.Store:
    """The store of this launch, under a prefix that another attempt of torchrun does not see."""
    if facts.store_is_agents:
        try:  # the agent listens before it starts ranks: who does not answer now never will
            socket.create_connection((facts.master_addr, facts.master_port), timeout=10).close()
        except OSError as error:
            raise LaunchEnvironmentError(f"nobody answers at MASTER_ADDR:MASTER_PORT ({error})", os.environ) from error
    store = dist.TCPStore(
        facts.master_addr,
        facts.master_port,
        is_master=facts.rank == 0 and not facts.store_is_agents,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=RENDEZVOUS_S),
        multi_tenant=True,
    )
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _gather(store: dist.Store, facts: LaunchFacts, limit: float, stop_signal: Callable[[], str | None]) -> None:
    """Return when all ranks have come. A wait inside the store would not see a signal, nor say who is missing.

    Whether to go or to stop is decided once, in the store: no rank goes on alone.
    """
    _peers_store(store).set(f"pid/{facts.rank}", str(os.getpid()))  # for the neighbour's PeerWatch
    store.set(f"came/{facts.rank}", "")
    store.add("came", 1)
    begin = time.monotonic()
    while True:
        if store.add("came", 0) == facts.world_size:
            decision = store.compare_set("decision", "", "go")
        elif name := stop_signal():
            decision = store.compare_set("decision", "", f"stop {name}")
        else:
            decision = store.get("decision") if store.check(["decision"]) else b""
        if decision == b"go":
            return
        if decision.startswith(b"stop "):
            _leave_stopped(store, facts, decision.decode().removeprefix("stop "))
        if time.monotonic() - begin > limit:
            absent = [rank for rank in range(facts.world_size) if not store.check([f"came/{rank}"])]
            shown = ", ".join(map(str, absent[:10])) + (f" and {len(absent) - 10} more" if len(absent) > 10 else "")
            raise TimeoutError(f"rank {facts.rank} waited {limit:.0f} s for the other ranks; missing: {shown}")
        time.sleep(0.02)


def _leave_stopped(store: dist.Store, facts: LaunchFacts, signal_name: str) -> NoReturn:
    """Raise StoppedAtStartError on the first rank that comes here, on the others what that rank has published."""
    error = StoppedAtStartError(signal_name)
    first = _publish(_peers_store(store), Failure.of(error, facts.rank))
    if facts.rank == 0 and not facts.store_is_agents:  # ranks that are still starting learn of the stop from our store
        deadline = time.monotonic() + 5.0
        while store.add("came", 0) < facts.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
    if first.rank == facts.rank:
        raise error
    raise PeerError(first.rank, first.class_name, first.message, first.exit_status)


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in `group` (None: in the world); 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in `group` (None: the world); 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_world_size() -> int:
    """The number of ranks on this machine; 1 without a process group."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if dist.is_initialized() else 1


def is_master(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is rank 0 of `group`."""
    return get_rank(group) == 0


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Return when every rank of `group` has called."""
    if get_world_size(group) > 1:
        dist.all_reduce(torch.zeros(1, device=communication_device(group)), group=group)


def call_main(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> Any:
    """As fairseq's: join the process group of the launch, if there is one, and return `main(cfg, **kwargs)`.

    cfg: a config with the section `distributed_training`. The exit status is trainer.launch's business.
    """
    init_process_group(cfg["distributed_training"] if isinstance(cfg, Mapping) else cfg.distributed_training)
    value = main(cfg, **kwargs)
    barrier()
    return value


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where small messages of `group` live: the CPU if its backend can send from there, else the accelerator."""
    if not dist.is_initialized() or "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator()


# -------------------------------------------------------------------------------------------------- objects and tensors


def broadcast_object(
    obj: Any,
    src_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    dist_device: torch.device | str | None = None,
) -> Any:
    """Return on every rank of `group` what `src_rank` passed as `obj`; the others' `obj` is ignored.

    obj: any nest of dict, list, tuple, set, None, bool, int, float, complex, str, bytes, torch sizes, dtypes, devices
        and dense tensors of any dtype. Tensors arrive without gradients, equal in dtype, shape and value; permuted
        layouts keep their strides, and what overlapped in memory overlaps again. Meta tensors stay on meta. The source
        gets `obj` itself. Beside the object a rank holds a bucket or two, however large the object is.
    src_rank: a global rank. dist_device: where received tensors live and messages are sent from (default: the CPU).
    Raises on all ranks if the source's value cannot be sent: CannotSendError there, PeerError elsewhere;
        CannotBroadcastError where the backend has no broadcast.
    """
    if get_world_size(group) == 1:
        return obj
    comm = torch.device(dist_device) if dist_device is not None else communication_device(group)
    is_source = dist.get_rank() == src_rank
    if is_source:
        try:
            head, nest_bytes, sources = _encode(obj)
        except CannotSendError as error:
            _PayloadWriter(len(str(error).encode()), False, src_rank, group, comm).write(str(error).encode())
            raise
        writer = _PayloadWriter(len(head) + nest_bytes, True, src_rank, group, comm)
        writer.write(head)
        if nest_bytes:
            _PlainPickler(writer, _referring({})).dump(obj)
        _broadcast_blocks([nbytes for nbytes, _ in sources], [make for _, make in sources], src_rank, group, comm)
        return obj
    reader = _PayloadReader(src_rank, group, comm)
    specs, sizes = _PlainUnpickler(reader, _refuse).load()
    device = torch.device("cpu") if dist_device is None else comm
    blocks = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
    tensors = [_tensor_of(spec, blocks, device) for spec in specs]
    nest = _PlainUnpickler(reader, lambda reference: _dereference(reference, tensors)).load()
    _broadcast_blocks(sizes, [lambda block=block: block for block in blocks], src_rank, group, comm)
    return nest


def broadcast_tensors(tensors: Iterable[Tensor], src_rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensors` with those of the global rank `src_rank`, in place, in few messages.

    Every rank passes the same shapes and dtypes in the same order; memory layouts may differ.
    """
    tensors = list(tensors)
    if get_world_size(group) == 1 or not tensors:
        return
    comm = communication_device(group)
    if comm.type == "cpu" and (device_type := tensors[0].device.type) in str(dist.get_backend_config(group)):
        comm = tensors[0].device if device_type != "cpu" else comm  # an accelerator sends from its own memory
    staged: dict[int, Tensor] = {}

    def bytes_of(index: int) -> Tensor:
        tensor = tensors[index].detach()
        if not tensor.is_contiguous():
            staged[index] = tensor = tensor.contiguous()  # what travels is the row-major order
        return _bytes_view(tensor)

    def received(index: int) -> None:
        if index in staged:
            copy = staged.pop(index)
            if dist.get_rank() != src_rank:
                tensors[index].detach().copy_(copy)

    makers = [lambda index=index: bytes_of(index) for index in range(len(tensors))]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    _broadcast_blocks(sizes, makers, src_rank, group, comm, received)


def all_gather_list(data: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `data` (plain values, no tensors), in the order of ranks.

    Raises on all ranks if one rank's value cannot be sent: CannotSendError there, PeerError elsewhere.
    """
    if get_world_size(group) == 1:
        return [data]
    try:
        mine, failure = _dumps(data, _refuse_tensor), None
    except CannotSendError as error:
        mine, failure = str(error).encode(), error
    comm = communication_device(group)
    sign = -1 if failure else 1
    header = len(mine).to_bytes(8, "little") + bytes([sign & 0xFF]) + mine[: GATHER_BYTES - 9]
    headers = _all_gather_bytes(header, GATHER_BYTES, comm, group)
    sizes = [int.from_bytes(header[:8], "little") for header in headers]
    if max(sizes) <= GATHER_BYTES - 9:
        payloads = [header[9 : 9 + size] for header, size in zip(headers, sizes)]
    else:
        payloads = [full[:size] for full, size in zip(_all_gather_bytes(mine, max(sizes), comm, group), sizes)]
    if failure:
        raise failure
    for rank, (header, payload) in enumerate(zip(headers, payloads)):
        if header[8] != 1:
            raise PeerError(_global_rank(group, rank), "CannotSendError", payload.decode(errors="replace"))
    return [_loads(payload, _refuse) for payload in payloads]


def all_reduce_dict(
    data: Mapping[str, Any], device: torch.device | str | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Sum each entry over the ranks of `group`: numbers stay numbers, tensors come back in float64 on `device`.

    All ranks pass the same keys and shapes, in any order; one message carries them. float64 where the device has it.
    """
    home = torch.device(device) if device is not None else torch.device("cpu")
    comm = communication_device(group)
    keys = sorted(data)
    wide = torch.float32 if comm.type == "mps" else torch.float64
    signature = zlib.crc32(repr([(key, tuple(getattr(data[key], "shape", ()))) for key in keys]).encode())
    values = [torch.as_tensor(data[key], dtype=wide).detach().reshape(-1).to(comm) for key in keys]
    flat = torch.cat([torch.tensor([float(signature >> 8)], dtype=wide, device=comm), *values])
    if get_world_size(group) > 1:
        dist.all_reduce(flat, group=group)
    if flat[0].item() != (signature >> 8) * get_world_size(group):
        raise ValueError(f"all_reduce_dict: the ranks hold different entries; rank {get_rank()} holds {keys}")
    summed = flat[1:].split([value.numel() for value in values])
    return {key: _like(data[key], total, home) for key, total in zip(keys, summed)}


def _like(value: Any, total: Tensor, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return total.reshape(value.shape).to(device)
    number = total.item()
    return int(number) if isinstance(value, int) else number


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _all_gather_bytes(payload: bytes, size: int, comm: torch.device, group: dist.ProcessGroup | None) -> list[bytes]:
    mine = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8).to(comm)
    gathered = [torch.empty_like(mine) for _ in range(get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return [one.cpu().numpy().tobytes() for one in gathered]


class _PayloadWriter:
    """A file that all ranks receive while it is written: `size` bytes, the first HEADER_BYTES - 9 with their number."""

    def __init__(
        self, size: int, is_fine: bool, src_rank: int, group: dist.ProcessGroup | None, comm: torch.device
    ) -> None:
        self._src_rank, self._group, self._comm, self._left = src_rank, group, comm, size
        self._message = bytearray(size.to_bytes(8, "little") + bytes([is_fine]))
        self._message_bytes = HEADER_BYTES

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        taken = 0
        while taken < len(data):
            part = data[taken : taken + self._message_bytes - len(self._message)]
            self._message += part
            taken += len(part)
            self._left -= len(part)
            if self._left == 0 or len(self._message) == self._message_bytes:
                self._send()
        return taken

    def _send(self) -> None:
        if self._message_bytes == HEADER_BYTES:
            self._message = self._message.ljust(HEADER_BYTES, b"\0")
        message = torch.frombuffer(self._message, dtype=torch.uint8).to(self._comm)
        _broadcast(message, self._src_rank, self._group)
        self._message, self._message_bytes = bytearray(), PAYLOAD_BYTES


class _PayloadReader:
    """What a _PayloadWriter on another rank writes, for an unpickler. Raises the writer's failure as PeerError."""

    def __init__(self, src_rank: int, group: dist.ProcessGroup | None, comm: torch.device) -> None:
        self._src_rank, self._group, self._comm = src_rank, group, comm
        header = self._receive(HEADER_BYTES)
        size = int.from_bytes(header[:8], "little")
        self._message = header[9 : 9 + size]
        self._position, self._left = 0, size - len(self._message)
        if header[8] != 1:
            raise PeerError(src_rank, "CannotSendError", bytes(self.read(size)).decode(errors="replace"))

    def _receive(self, nbytes: int) -> memoryview:
        message = torch.empty(nbytes, dtype=torch.uint8, device=self._comm)
        _broadcast(message, self._src_rank, self._group)
        return memoryview(message.cpu().numpy())

    def _available(self, most: int) -> memoryview:
        if self._position == len(self._message) and self._left:
            self._message = self._receive(min(self._left, PAYLOAD_BYTES))
            self._position, self._left = 0, self._left - len(self._message)
        part = self._message[self._position : self._position + most]
        self._position += len(part)
        return part

    def read(self, count: int) -> bytes:
        data = bytearray(count)
        return bytes(data[: self.readinto(data)])

    def readinto(self, data: Any) -> int:
        filled = 0
        while filled < len(data) and len(part := self._available(len(data) - filled)):
            data[filled : filled + len(part)] = part
            filled += len(part)
        return filled

    def readline(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (one := self.read(1)):
            line += one
        return line


def _broadcast(message: Tensor, src_rank: int, group: dist.ProcessGroup | None) -> None:
    try:
        dist.broadcast(message, src_rank, group=group)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, NotImplementedError) or "does not support broadcast" in str(error):
            raise CannotBroadcastError(str(dist.get_backend(group)), message.device) from error
        raise


@torch.no_grad()
def _broadcast_blocks(
    sizes: list[int],
    makers: list[Callable[[], Tensor]],
    src_rank: int,
    group: dist.ProcessGroup | None,
    comm: torch.device,
    received: Callable[[int], None] = lambda index: None,
) -> None:
    """Send blocks of bytes: small ones packed into buckets, large ones in slices of their own memory.

    `makers[i]()` gives block i as uint8 [sizes[i]], asked for when its turn comes; `received(i)` tells that it is full.
    The order follows from `sizes` alone, which all ranks share.
    """
    packed: list[int] = []
    for index, nbytes in enumerate(sizes):
        if nbytes > PACKED_BYTES:
            block = makers[index]()
            for begin in range(0, nbytes, BUCKET_BYTES):
                _broadcast_in_place(block[begin : begin + BUCKET_BYTES], src_rank, group, comm)
            received(index)
        elif nbytes:
            packed.append(index)
            if sum(map(sizes.__getitem__, packed)) >= BUCKET_BYTES - PACKED_BYTES:
                _broadcast_packed(packed, makers, src_rank, group, comm, received)
                packed = []
    if packed:
        _broadcast_packed(packed, makers, src_rank, group, comm, received)


def _broadcast_in_place(piece: Tensor, src_rank: int, group: dist.ProcessGroup | None, comm: torch.device) -> None:
    message = piece.to(comm)
    dist.broadcast(message, src_rank, group=group)
    if message.data_ptr() != piece.data_ptr() and dist.get_rank() != src_rank:
        piece.copy_(message)


def _broadcast_packed(
    indices: list[int],
    makers: list[Callable[[], Tensor]],
    src_rank: int,
    group: dist.ProcessGroup | None,
    comm: torch.device,
    received: Callable[[int], None],
) -> None:
    blocks = [makers[index]() for index in indices]
    bucket = torch.cat([block.to(comm) for block in blocks])
    dist.broadcast(bucket, src_rank, group=group)
    if dist.get_rank() != src_rank:
        for block, part in zip(blocks, bucket.split([block.numel() for block in blocks])):
            block.copy_(part)
    for index in indices:
        received(index)


# -------------------------------------------------------------------------------------------- what an object looks like
# The plain part is a pickle that may hold builtin containers and numbers only: the reader refuses every name of a class
# or function, so nothing can be executed on arrival. Tensors stand in it as references to (spec, bytes).


def _encode(obj: Any) -> tuple[bytes, int, list[tuple[int, Callable[[], Tensor]]]]:
    """Pickled specs of the tensors in `obj`, the pickled size of the rest, and the blocks (size, maker) of the tensors.

    The rest is not kept: it is pickled once to be counted and refused, and again while it is sent.
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    counter = _Counter()
    _dump(obj, counter, _referring(tensors))
    specs, blocks = _lay_out([tensor for _, tensor in tensors.values()])
    return _dumps((specs, [nbytes for nbytes, _ in blocks]), _refuse_tensor), counter.nbytes, blocks


def _referring(tensors: dict[int, tuple[int, Tensor]]) -> Callable[[Tensor], tuple[str, int]]:
    """Numbers tensors in the order in which they are met, each once."""

    def refer(tensor: Tensor) -> tuple[str, int]:
        _check_sendable(tensor)
        return "tensor", tensors.setdefault(id(tensor), (len(tensors), tensor))[0]

    return refer


class _Counter:
    nbytes = 0

    def write(self, data: Any) -> int:
        self.nbytes += memoryview(data).nbytes
        return memoryview(data).nbytes


class _PlainPickler(pickle.Pickler):
    """Pickles builtin values; what is known beyond them becomes a reference, anything else is refused."""

    def __init__(self, file: Any, refer: Callable[[Tensor], Any]) -> None:
        super().__init__(file, protocol=5)
        self._refer = refer

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _BUILTIN:
            return None
        if isinstance(obj, Tensor):
            return self._refer(obj)
        if kind is OrderedDict:
            return "OrderedDict", list(obj.items())
        if kind is torch.Size:
            return "Size", tuple(obj)
        if kind is complex:
            return "complex", obj.real, obj.imag
        if kind in (torch.dtype, torch.device):
            return kind.__name__, str(obj).removeprefix("torch.")
        raise CannotSendError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be sent between ranks")


_BUILTIN = frozenset(
    {dict, list, tuple, set, frozenset, type(None), bool, int, float, str, bytes, bytearray}
)  # exactly these: a subclass would arrive as something else


def _dumps(obj: Any, refer: Callable[[Tensor], Any]) -> bytes:
    file = io.BytesIO()
    _dump(obj, file, refer)
    return file.getvalue()


def _dump(obj: Any, file: Any, refer: Callable[[Tensor], Any]) -> None:
    try:
        _PlainPickler(file, refer).dump(obj)
    except CannotSendError as error:
        raise CannotSendError(f"{_path_of_unsendable(obj, refer)}: {error}") from None
    except RecursionError:
        raise CannotSendError("nested too deeply to be sent between ranks") from None


def _path_of_unsendable(obj: Any, refer: Callable[[Tensor], Any], path: str = "obj") -> str:
    """Where in `obj` the first value stands that cannot be sent. Only asked when there is one."""
    children: Iterable[tuple[str, Any]] = ()
    if type(obj) in (dict, OrderedDict):
        children = ((f"{path}[{key!r}]", value) for key, value in obj.items())
    elif type(obj) in (list, tuple, set, frozenset):
        children = ((f"{path}[{index}]", value) for index, value in enumerate(obj))
    for name, child in children:
        try:
            _PlainPickler(io.BytesIO(), refer).dump(child)
        except CannotSendError:
            return _path_of_unsendable(child, refer, name)
    return path


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, dereference: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._dereference = dereference

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a message between ranks names {module}.{name}; only plain values are read")

    def persistent_load(self, reference: Any) -> Any:
        return self._dereference(reference)


def _loads(data: bytes, dereference: Callable[[Any], Any]) -> Any:
    return _PlainUnpickler(io.BytesIO(data), dereference).load()


def _refuse_tensor(tensor: Tensor) -> NoReturn:
    raise CannotSendError("tensors are sent by broadcast_object and broadcast_tensors, not here")


def _refuse(reference: Any) -> Any:
    return _dereference(reference, [])


def _dereference(reference: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    kind, *value = reference
    if kind == "tensor":
        return tensors[value[0]]
    if kind == "OrderedDict":
        return OrderedDict(value[0])
    if kind == "Size":
        return torch.Size(value[0])
    if kind == "complex":
        return complex(*value)
    if kind == "device":
        return torch.device(value[0])
    assert kind == "dtype", kind
    return _dtype_named(value[0])


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"this torch has no dtype {name}")
    return dtype


# --------------------------------------------------------------------------------- tensors as specs and blocks of bytes

# dtype name, shape, strides, block index (None: no elements, ON_META: no memory), first element within the block
Spec = tuple[str, tuple[int, ...], tuple[int, ...], int | None, int]


ON_META = -1


@dataclass
class _View:
    """A tensor to send: `core` has its expanded dimensions cut to one, `begin` to `end` its bytes in its storage."""

    position: int
    tensor: Tensor
    core: Tensor
    begin: int
    end: int

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.begin, self.core.dtype, self.core.shape, self.core.stride()


def _lay_out(tensors: list[Tensor]) -> tuple[list[Spec], list[tuple[int, Callable[[], Tensor]]]]:
    specs: list[Spec | None] = [None] * len(tensors)
    blocks: list[tuple[int, Callable[[], Tensor]]] = []
    storages: dict[tuple[Any, ...], list[_View]] = {}
    for position, given in enumerate(tensors):
        tensor = given.detach().resolve_conj().resolve_neg()
        if tensor.numel() == 0 or tensor.is_meta:
            block = ON_META if tensor.is_meta else None
            specs[position] = (_name(tensor.dtype), tuple(tensor.shape), tensor.stride(), block, 0)
            continue
        view = _view_of(position, tensor)
        storages.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(view)
    for views in storages.values():
        for region in _overlapping(views):
            _lay_out_region(region, specs, blocks)
    return specs, blocks


def _check_sendable(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or hasattr(tensor, "device_mesh"):
        kind = f"{type(tensor).__name__} on {tensor.device}, {tensor.layout}, {tensor.dtype}"
        raise CannotSendError(f"a tensor of this kind cannot be sent between ranks: {kind}")


def _view_of(position: int, tensor: Tensor) -> _View:
    core = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            core = core.narrow(dim, 0, 1)  # an expanded dimension is one line in memory: it travels once
    begin = core.storage_offset() * core.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(core.shape, core.stride())) + 1
    return _View(position, tensor, core, begin, begin + reach * core.element_size())


def _overlapping(views: list[_View]) -> list[list[_View]]:
    """Group views that share memory."""
    groups: list[list[_View]] = []
    end = -1
    for view in sorted(views, key=lambda view: view.begin):
        if view.begin < end:
            groups[-1].append(view)
        else:
            groups.append([view])
        end = max(end, view.end)
    return [part for group in groups for part in _apart_if_interleaved(group)]


def _apart_if_interleaved(group: list[_View]) -> list[list[_View]]:
    """Take apart what overlaps in extent only, such as two columns of a large matrix: else the matrix would travel."""
    alike: dict[tuple[Any, ...], list[_View]] = {}
    for view in group:
        alike.setdefault(view.identity, []).append(view)
    distinct = [views[0] for views in alike.values()]
    used = sum(view.core.numel() * view.core.element_size() for view in distinct)
    extent = max(view.end for view in group) - group[0].begin
    if len(distinct) == 1 or extent <= 2 * used or len({view.core.element_size() for view in distinct}) > 1:
        return [group]
    elements = torch.cat([_element_offsets(view.core) for view in distinct])
    return list(alike.values()) if elements.unique().numel() == elements.numel() else [group]


def _element_offsets(tensor: Tensor) -> Tensor:
    """Where the elements of `tensor` stand in its storage, int64 [numel]."""
    offsets = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride()):
        offsets = (offsets[:, None] + torch.arange(size) * stride).reshape(-1)
    return offsets


def _lay_out_region(
    region: list[_View], specs: list[Spec | None], blocks: list[tuple[int, Callable[[], Tensor]]]
) -> None:
    """Add one block that serves all views of `region`, and their specs."""
    first, block = region[0].core, len(blocks)
    dense = region[0].end - region[0].begin == first.numel() * first.element_size()
    if all(view.identity == region[0].identity for view in region) and not dense:
        # The gaps between its elements are not ours to send.
        blocks.append((first.numel() * first.element_size(), lambda: _bytes_view(first.contiguous())))
        strides = _contiguous_strides(first.shape)
        for view in region:
            specs[view.position] = _spec(view, strides, block, 0)
        return
    begin = region[0].begin & ~15 if len(region) > 1 else region[0].begin  # a multiple of every element size
    end = max(view.end for view in region)
    blocks.append((end - begin, lambda: _storage_bytes(first, begin, end)))
    for view in region:
        specs[view.position] = _spec(view, view.core.stride(), block, (view.begin - begin) // view.core.element_size())


def _spec(view: _View, strides: tuple[int, ...], block: int, offset: int) -> Spec:
    shape = view.tensor.shape
    strides = tuple(0 if size != cut else stride for size, cut, stride in zip(shape, view.core.shape, strides))
    return _name(view.tensor.dtype), tuple(shape), strides, block, offset


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_view(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8, shared with it."""
    begin = tensor.storage_offset() * tensor.element_size()
    return _storage_bytes(tensor, begin, begin + tensor.numel() * tensor.element_size())


def _storage_bytes(tensor: Tensor, begin: int, end: int) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))


def _tensor_of(spec: Spec, blocks: list[Tensor], device: torch.device) -> Tensor:
    name, shape, strides, block, offset = spec
    dtype = _dtype_named(name)
    if block in (None, ON_META):
        home = device if block is None else torch.device("meta")
        return torch.empty_strided(shape, strides, dtype=dtype, device=home)
    return torch.empty(0, dtype=dtype, device=device).set_(blocks[block].untyped_storage(), offset, shape, strides)


# -------------------------------------------------------------------------------------- agreement, failures, dead peers


def agree(error: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
    """Collective: return on every rank if no rank has an error, else raise on every rank.

    A failing rank raises its own error, the others PeerError of the first failing rank. One small message.
    """
    if get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    mine = None if error is None else dataclasses.astuple(Failure.of(error))
    told = all_gather_list(mine, group)
    if error is not None:
        raise agreed(error)
    for one in told:
        if one is not None:
            failure = Failure(*one)
            raise agreed(PeerError(failure.rank, failure.class_name, failure.message, failure.exit_status))


def agreed(error: BaseException) -> BaseException:
    """Mark an error that every rank raises at this place, so that all can still act together (`is_agreed`)."""
    error.raised_by_all = True
    return error


def is_agreed(error: BaseException) -> bool:
    return getattr(error, "raised_by_all", False) or get_world_size() == 1


@dataclass(frozen=True)
class Failure:
    """How a rank failed: what the others need to know."""

    rank: int
    class_name: str
    message: str
    exit_status: int = 1

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> Failure:
        """The failure that `error` is; a PeerError stands for the failure of its peer."""
        if isinstance(error, PeerError):
            return cls(error.rank, error.class_name, error.message, error.exit_status)
        rank = get_rank() if rank is None else rank
        return cls(rank, type(error).__name__, str(error)[:4000], exit_status_of(error))


def exit_status_of(error: BaseException) -> int:
    """The status that `error` stands for: its attribute `exit_status`, 2 for a ConfigError, else 1."""
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status
    return 2 if any(kind.__name__ == "ConfigError" for kind in type(error).__mro__) else 1


def publish_failure(error: BaseException | Failure, store: dist.Store | None = None) -> Failure:
    """Make this rank's failure known to all ranks, unless another rank was first. Returns the first failure.

    store: of the launch (`gather_ranks`), for the time before there is a process group.
    """
    failure = error if isinstance(error, Failure) else Failure.of(error)
    store = _failure_store(store)
    if store is None:
        return failure
    try:
        return _publish(store, failure)
    except (dist.DistError, RuntimeError):  # the store died with its host: nobody is left to be told
        return failure


def peer_failure(store: dist.Store | None = None, run_id: str | None = None) -> Failure | None:
    """The first failure that a rank has published; None if there is none, or no process group and no `store`.

    store: of the launch, where there is no process group. run_id: of the launch, for who is none of its ranks.
    """
    store = _failure_store(store, run_id)
    try:
        return _published(store) if store is not None else None
    except (dist.DistError, RuntimeError):
        return None


def _publish(store: dist.Store, failure: Failure) -> Failure:
    first = store.compare_set("failure", "", json.dumps(dataclasses.astuple(failure)))
    return Failure(*json.loads(first))


def _published(store: dist.Store) -> Failure | None:
    return Failure(*json.loads(store.get("failure"))) if store.check(["failure"]) else None


def _failure_store(store: dist.Store | None = None, run_id: str | None = None) -> dist.Store | None:
    """Where failures are published: in the store of the launch, the process group's if none is given."""
    if store is None and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    return None if store is None else _peers_store(store, run_id)


def _peers_store(store: dist.Store, run_id: str | None = None) -> dist.Store:
    """What ranks tell of themselves in the store of the launch, apart from the keys of process groups."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "") if run_id is None else run_id
    return dist.PrefixStore(f"peers/{run_id}_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class PeerWatch:
    """A thread that ends this rank when a peer has failed, even if this rank hangs in a collective.

    It looks once a second whether a failure is published, whether the next rank of this machine has died without a
    word (it then publishes that), and whether the launcher is gone. It uses a connection of its own to the store.
    A failure seen, it leaves the main thread `grace_s` to end by itself, then ends the process with status 1.
    """

    def __init__(
        self,
        facts: LaunchFacts | None = None,
        interval_s: float = 1.0,
        grace_s: float = 2.5,
        store: dist.Store | None = None,
    ) -> None:
        self._interval, self._grace = interval_s, grace_s
        self._rank = get_rank() if facts is None else facts.rank
        self._stop = threading.Event()
        self._said = threading.Lock()
        self._parent = os.getppid() if facts is not None and facts.started_by_agent else None
        store = _failure_store(store)
        assert store is not None, "a watch needs a process group, or the store of the launch"
        self._main_store, self._store = store, store.clone()
        self._neighbour = self._publish_pid(facts)
        self._neighbour_fd: int | None = None
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
        self._thread.start()

    def leaving(self) -> None:
        """Tell the peers that this rank is about to leave in order."""
        self._main_store.set(f"left/{self._rank}", "")

    def stop(self) -> None:
        """End the thread; at once, unless it waits for the store."""
        self._stop.set()
        self._thread.join(timeout=2.0)
        if self._neighbour_fd is not None:
            os.close(self._neighbour_fd)
            self._neighbour_fd = None

    def say_once(self, line: str) -> None:
        """Print `line` to stderr unless this rank has explained its end already."""
        if self._said.acquire(blocking=False):
            print(line, file=sys.stderr, flush=True)

    def _publish_pid(self, facts: LaunchFacts | None) -> int | None:
        """Return the next rank of this machine, to be watched: under torchrun's agent, whose ranks see each other."""
        if facts is None or not facts.started_by_agent or facts.local_world_size < 2 or not hasattr(os, "pidfd_open"):
            return None
        self._main_store.set(f"pid/{self._rank}", str(os.getpid()))
        return facts.rank - facts.local_rank + (facts.local_rank + 1) % facts.local_world_size

    def _find_neighbour(self) -> bool:
        """Open a descriptor that becomes readable when the neighbour dies; True if it has died already."""
        if self._neighbour is None or self._neighbour_fd is not None:
            return False
        if not self._store.check([f"pid/{self._neighbour}"]):
            return False  # it has not come so far
        try:
            self._neighbour_fd = os.pidfd_open(int(self._store.get(f"pid/{self._neighbour}")))
        except ProcessLookupError:
            return True
        except OSError:
            self._neighbour = None  # this kernel does not offer it; torchrun's agent will notice
        return False

    def _run(self) -> None:
        looked, store_lost_since = False, None
        while not self._stop.is_set():
            died = self._wait() if looked else False
            looked = True
            if self._stop.is_set():
                return
            if self._parent is not None and os.getppid() != self._parent:
                self._end("the launcher has died")
            try:
                died = self._find_neighbour() or died
                if died and not self._store.check([f"left/{self._neighbour}"]):
                    message = "died without a report (killed, out of memory, or a crash)"
                    _publish(self._store, Failure(self._neighbour, "ProcessDied", message))
                failure = _published(self._store)
                store_lost_since = None
            except (dist.DistError, RuntimeError):
                failure = None
                store_lost_since = store_lost_since or time.monotonic()
                if time.monotonic() - store_lost_since > 5.0:
                    self._end("the store of the launch is gone")
            if failure is not None and failure.rank != self._rank and not self._stop.wait(self._grace):
                self._end(f"rank {failure.rank} failed ({failure.class_name})")

    def _wait(self) -> bool:
        """Sleep for one interval; True if the neighbour has died, at once when it does."""
        if self._neighbour_fd is None:
            self._stop.wait(self._interval)
            return False
        deadline = time.monotonic() + self._interval
        poll = select.poll()
        poll.register(self._neighbour_fd, select.POLLIN)
        while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
            if poll.poll(min(left, 0.1) * 1000):
                self._stop.wait(0.1)  # not in a busy loop while others act on the death
                return True
        return False

    def _end(self, why: str) -> NoReturn:
        self.say_once(f"rank {self._rank} ends: {why}")
        os._exit(1)


def die_with_parent() -> None:
    """Have the kernel end this process when the process that started it dies (Linux; elsewhere PeerWatch notices)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
