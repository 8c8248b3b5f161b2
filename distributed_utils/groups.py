"""The process group of a launch: how its ranks find each other, who they are, where their messages live."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distributed_utils.config import DistributedTrainingConfig
from distributed_utils.errors import LaunchEnvironmentError, LostStoreError, PeerError, StoppedAtStartError
from distributed_utils.failures import Failure, peers_store, publish
from distributed_utils.launcher import LaunchFacts, launch_facts
from distributed_utils.ranks import barrier

RENDEZVOUS_S = 300.0  # how long ranks wait for each other at the start


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
    peers_store(store).set(f"pid/{facts.rank}", str(os.getpid()))  # for the neighbour's PeerWatch
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
    first = publish(peers_store(store), Failure.of(error, facts.rank))
    if facts.rank == 0 and not facts.store_is_agents:  # ranks that are still starting learn of the stop from our store
        deadline = time.monotonic() + 5.0
        while store.add("came", 0) < facts.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
    if first.rank == facts.rank:
        raise error
    raise PeerError(first.rank, first.class_name, first.message, first.exit_status)


def call_main(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> Any:
    """As fairseq's: join the process group of the launch, if there is one, and return `main(cfg, **kwargs)`.

    cfg: a config with the section `distributed_training`. The exit status is trainer.launch's business.
    """
    init_process_group(cfg["distributed_training"] if isinstance(cfg, Mapping) else cfg.distributed_training)
    value = main(cfg, **kwargs)
    barrier()
    return value
