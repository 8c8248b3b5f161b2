"""The process group of a launch: how its ranks find each other, who they are, where their messages live."""

from __future__ import annotations

import datetime
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distributed_utils.config import DistributedTrainingConfig
from distributed_utils.errors import LaunchEnvironmentError, LostStoreError, PeerError, StoppedAtStartError
from distributed_utils.failures import LATEST_START, Failure, peers_store, publish
from distributed_utils.launcher import LaunchFacts, launch_facts
from distributed_utils.ranks import barrier

RENDEZVOUS_S = 300.0  # how long ranks wait for each other at the start
STOP_WITHOUT_RANK_0_S = 5.0
CONNECT_S = 60.0  # how long connecting may take once all have come
CONNECT_TRIES = 3


def init_process_group(
    cfg: Any = None,
    cpu: bool = False,
    facts: LaunchFacts | None = None,
    store: dist.Store | None = None,
) -> None:
    """Join the process group of the launch that started this process. Nothing happens if there is one, or no launch.

    cfg: the section distributed_training. cpu: leave accelerators alone. store: of `gather_ranks`, which is called
    if there is none. Raises what `gather_ranks` raises; ConnectionError if the ranks, all there, cannot connect.
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
    for attempt in range(CONNECT_TRIES):
        problem = _connect_ranks(cfg, cpu, facts, dist.PrefixStore(f"connect_{attempt}", store))
        if problem is None:
            return
    raise ConnectionError(f"the ranks could not connect to each other in {CONNECT_TRIES} tries: {problem}")


def _connect_ranks(cfg: Any, cpu: bool, facts: LaunchFacts, store: dist.Store) -> str | None:
    """Make the process group; what stood in the way on any rank, after which no rank has one.

    Nobody returns before all are connected: gloo takes a rank that goes its own way, or ends, for one that has failed.
    """
    limit = min(CONNECT_S, cfg.timeout_s)
    problem = ""
    try:
        dist.init_process_group(
            _backend(cfg.backend, cpu),
            store=store,
            rank=facts.rank,
            world_size=facts.world_size,
            timeout=datetime.timedelta(seconds=limit),
        )
    except (dist.DistError, RuntimeError) as error:
        problem = f"rank {facts.rank}: {str(error).splitlines()[0]}"
        store.set("problem", problem)
    store.add("settled", 1)
    deadline = time.monotonic() + 2 * limit
    while store.add("settled", 0) < facts.world_size:
        if time.monotonic() > deadline:
            problem = problem or "a rank did not finish connecting"
            store.set("problem", problem)
            break
        time.sleep(0.005)
    if not store.check(["problem"]):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=cfg.timeout_s))
        return None
    if dist.is_initialized():
        dist.destroy_process_group()
    return problem or store.get("problem").decode()


def gather_ranks(cfg: Any, facts: LaunchFacts, stop_signal: Callable[[], str | None] = lambda: None) -> dist.Store:
    """Wait until all ranks have come, and return the store of the launch.

    stop_signal: asked while the ranks gather; the name of the signal that asked for a stop, if one did.
    Raises LaunchEnvironmentError, StoppedAtStartError on the first rank that leaves for a stop and PeerError of it on
    the others, LostStoreError, or TimeoutError naming the ranks that did not come.
    """
    limit = min(RENDEZVOUS_S, cfg.timeout_s)
    deadline = time.monotonic() + limit
    agents_store = _connect(facts)
    try:
        door = _Door(agents_store) if facts.rank == 0 else None
        store = door.store if door is not None else _enter(agents_store, facts, deadline, limit, stop_signal)
        _gather(store, facts, deadline, limit, stop_signal, door)
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
    """The store of this launch; where an agent holds it, with what earlier starts of the ranks have left in it."""
    if facts.store_is_agents:
        try:  # the agent listens before it starts ranks: who does not answer now never will
            socket.create_connection((facts.master_addr, facts.master_port), timeout=10).close()
        except OSError as error:
            raise LaunchEnvironmentError(f"nobody answers at MASTER_ADDR:MASTER_PORT ({error})", os.environ) from error
    return dist.TCPStore(
        facts.master_addr,
        facts.master_port,
        is_master=facts.rank == 0 and not facts.store_is_agents,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=RENDEZVOUS_S),
        multi_tenant=True,
    )


class _Door:
    """Rank 0's: it names the part of the store that is this start's alone, and tells each rank that knocks.

    An agent of torchrun keeps its store when it starts ranks again, and no variable names the start: agents of several
    nodes count their restarts apart (one whose ranks were well counts none), so that a prefix by that count leads them to
    different places, or to what an earlier start has left, such as addresses at which gloo waits for ever.
    """

    def __init__(self, agents_store: dist.Store) -> None:
        name = f"start_{uuid.uuid4().hex}"
        self.store = dist.PrefixStore(name, agents_store)
        self._agents_store, self._name = agents_store, name
        self._num_knocks, self._unanswered = 0, set()
        agents_store.set(LATEST_START, name)

    def answer(self) -> None:
        """Tell the name to everyone who has knocked; those of earlier starts do not hear it any more."""
        store = self._agents_store
        count = store.add("knocks", 0)
        self._unanswered |= set(range(self._num_knocks + 1, count + 1))
        self._num_knocks = count
        for knock in sorted(self._unanswered):
            if store.check([f"knock/{knock}"]):  # else it is being written, or who wrote it has died
                store.set(f"welcome/{store.get(f'knock/{knock}').decode()}", self._name)
                self._unanswered.discard(knock)


def _enter(
    agents_store: dist.Store, facts: LaunchFacts, deadline: float, limit: float, stop_signal: Callable[[], str | None]
) -> dist.Store:
    """Knock, and return the part of the store that rank 0 names.

    A stop is better agreed on behind the door, so a rank that is told to stop waits for rank 0 a little longer.
    """
    who = uuid.uuid4().hex
    agents_store.set(f"knock/{agents_store.add('knocks', 1)}", who)
    stopped_at = None
    while not agents_store.check([f"welcome/{who}"]):
        now = time.monotonic()
        if stopped_at is None and stop_signal():
            stopped_at = now
        if stopped_at is not None and now > stopped_at + STOP_WITHOUT_RANK_0_S:
            raise StoppedAtStartError(stop_signal())
        if now > deadline:
            raise _missing(facts, limit, [0])
        time.sleep(0.02)
    return dist.PrefixStore(agents_store.get(f"welcome/{who}").decode(), agents_store)


def _missing(facts: LaunchFacts, limit: float, absent: list[int]) -> TimeoutError:
    shown = ", ".join(map(str, absent[:10])) + (f" and {len(absent) - 10} more" if len(absent) > 10 else "")
    hint = ""
    if facts.started_by_agent and facts.local_world_size < facts.world_size:
        hint = (
            ". After a change of nodes, torchrun may have sent ranks to different stores: start it with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    return TimeoutError(f"rank {facts.rank} waited {limit:.0f} s for the other ranks; missing: {shown}{hint}")


def _gather(
    store: dist.Store,
    facts: LaunchFacts,
    deadline: float,
    limit: float,
    stop_signal: Callable[[], str | None],
    door: _Door | None,
) -> None:
    """Return when all ranks have come. A wait inside the store would not see a signal, nor say who is missing.

    Whether to go or to stop is decided once, in the store: no rank goes on alone.
    """
    peers_store(store).set(f"pid/{facts.rank}", str(os.getpid()))  # for the neighbour's PeerWatch
    store.set(f"came/{facts.rank}", "")
    store.add("came", 1)
    while True:
        if door is not None:
            door.answer()
        if store.add("came", 0) == facts.world_size:
            decision = store.compare_set("decision", "", "go")
        elif name := stop_signal():
            decision = store.compare_set("decision", "", f"stop {name}")
        else:
            decision = store.get("decision") if store.check(["decision"]) else b""
        if decision == b"go":
            return
        if decision.startswith(b"stop "):
            _leave_stopped(store, facts, decision.decode().removeprefix("stop "), door)
        if time.monotonic() > deadline:
            raise _missing(
                facts, limit, [rank for rank in range(facts.world_size) if not store.check([f"came/{rank}"])]
            )
        time.sleep(0.02)


def _leave_stopped(store: dist.Store, facts: LaunchFacts, signal_name: str, door: _Door | None) -> NoReturn:
    """Raise StoppedAtStartError on the first rank that comes here, on the others what that rank has published."""
    error = StoppedAtStartError(signal_name)
    first = publish(peers_store(store), Failure.of(error, facts.rank))
    if door is not None:  # ranks that are still starting learn of the stop from us
        deadline = time.monotonic() + 5.0
        while store.add("came", 0) < facts.world_size and time.monotonic() < deadline:
            door.answer()
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
