"""How a run is started and how it ends: ranks, signals, exit status.

    rank       torchrun, srun or our own launcher started this process: join the group, train, leave
    single     nobody did, and one rank is asked for: train here, without a process group
    launcher   several are asked for: start them through torch's elastic launcher and wait

Exit status: 0 done; 2 bad input, found before the first update; 75 stopped by a signal, checkpoint saved; 1 the rest.
An exception on one rank ends all ranks within seconds, and its message is printed once, by the rank that failed first.
Must not know: Hydra, the Trainer, files.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import distributed_utils
from distributed_utils import Failure, Heartbeat, LaunchFacts, LocalWatch, OwnStalls, PeerError, PeerWatch, StalledError
from trainer.preemption import SIGNALS, STOPPED_STATUS, StopRequest

BAD_INPUT_STATUS = 2
EXPLANATION_S = 4.0  # how long a rank that lost a peer waits to learn why
KILL_AFTER_SECOND_INTERRUPT_S = 3.0
_RUN_ID_PREFIX = "fairtrain-"  # of a launch by `_launch_ranks`

# Their message says all; a traceback would hide it. By name: no module is imported for an error that it did not raise.
_EXPLAINED = {"ConfigError", "NonFiniteError", "LossScaleFloorError", "CheckpointError", "DatasetError"}


def run(
    main: Callable[[], int],
    distributed_cfg: Any,
    argv: list[str],
    *,
    cpu: bool = False,
    command: list[str] | None = None,
    heartbeat: Heartbeat | None = None,
) -> int:
    """Run `main` on every rank that the launch or `distributed_cfg` asks for, and return the exit status of the whole.

    main: trains one rank; returns 0 or 75, or raises. distributed_cfg: the section distributed_training.
    argv: the arguments of the ranks that the launcher starts, as typed. cpu: leave accelerators alone.
    command: what the launcher starts instead of `python -m trainer`. An error of a launched rank does not return:
    it ends the process. heartbeat: the beats that `main` leaves, watched with distributed_training.heartbeat_timeout.
    Errors are printed here; the caller passes the status to `leave`.
    """
    heartbeat = heartbeat or Heartbeat()
    try:
        facts = distributed_utils.launch_facts()
    except distributed_utils.LaunchEnvironmentError as error:
        return report(error)
    if facts is not None:
        return _run_rank(main, distributed_cfg, facts, cpu, heartbeat)
    if stale := distributed_utils.stale_variables():
        shown = " ".join(f"{name}={os.environ[name]}" for name in stale)
        print(f"fairtrain: not started by a launcher; ignoring {shown}", file=sys.stderr)
    if distributed_cfg.distributed_world_size > 1:
        command = command or [sys.executable, "-m", "trainer"]
        return _launch_ranks(distributed_cfg.distributed_world_size, [*command, *argv])
    return _run_single(main, distributed_cfg, heartbeat)


def set_num_threads(num_threads: int = 0, local_world_size: int | None = None) -> int:
    """Set the intra-op threads of this rank and return their number; 0: this machine's cores shared by its ranks.

    The number changes sums in their last bits, so it is set explicitly whatever OMP_NUM_THREADS says.
    """
    if local_world_size is None:
        local_world_size = distributed_utils.get_local_world_size()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = num_threads or max(1, cores // local_world_size)
    torch.set_num_threads(chosen)
    return chosen


def leave(status: int) -> NoReturn:
    """End the process with `status` after flushing what was written. Destructors of threads cannot change it then."""
    flush()
    os._exit(status)


def flush() -> None:
    """Flush stdout, stderr and the handlers of logging."""
    for handler in logging.getLogger().handlers:
        try:
            handler.flush()
        except (OSError, ValueError):  # a full disk or a closed stream must not hide the status
            continue
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def report(error: BaseException, rank: int | None = None) -> int:
    """Print `error` to stderr, and to the log files, once; return the exit status that it stands for.

    A known error is one sentence, anything else comes with its traceback. rank: named in front, if there are several.
    """
    prefix = "fairtrain: " if rank is None else f"fairtrain: rank {rank}: "
    if isinstance(error, SystemExit) and rank is not None and error.code in (None, 0):
        text = f"{prefix}left by SystemExit while the other ranks were training"
    elif is_explained(error):
        text = f"{prefix}{error}"
    else:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        text = f"{prefix}{type(error).__name__}\n{trace}"
    print(text, file=sys.stderr, flush=True)
    _write_to_log_files(text)
    return distributed_utils.exit_status_of(error)


def is_explained(error: BaseException) -> bool:
    """Whether the message of `error` was written for the person at the terminal."""
    if getattr(error, "is_user_error", False) is True:
        return True
    return any(kind.__name__ in _EXPLAINED for kind in type(error).__mro__)


def _write_to_log_files(text: str) -> None:
    record = logging.LogRecord("trainer", logging.ERROR, __file__, 0, text, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


# ---------------------------------------------------------------------------------------------------------- one process


def _run_single(main: Callable[[], int], distributed_cfg: Any, heartbeat: Heartbeat) -> int:
    timeout_s = distributed_cfg.heartbeat_timeout
    watch = LocalWatch(heartbeat, timeout_s, report_stall) if timeout_s > 0 else None
    with StopRequest():
        try:
            return main()
        except SystemExit as leaving:
            return _status_of_exit(leaving)
        except BaseException as error:
            return report(error)
        finally:
            if watch is not None:
                watch.stop()


def report_stall(error: StalledError, rank: int | None = None) -> None:
    """As `report`; the process ends behind it, whatever its main thread is doing."""
    report(error, rank)
    flush()


def _status_of_exit(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


# ------------------------------------------------------------------------------------------------------- one of several


def _run_rank(
    main: Callable[[], int], distributed_cfg: Any, facts: LaunchFacts, cpu: bool, heartbeat: Heartbeat
) -> int:
    """Join, train, and leave together. An error ends this process here."""
    if facts.started_by_agent:
        distributed_utils.die_with_parent()
    watch = store = None
    request = StopRequest()  # never closed: the launcher signals the others as soon as one rank has left
    try:
        store = distributed_utils.gather_ranks(distributed_cfg, facts, lambda: request.signal_name)
        timeout_s = distributed_cfg.heartbeat_timeout
        stalls = OwnStalls(heartbeat, timeout_s) if timeout_s > 0 else None
        watch = PeerWatch(facts, store=store, stalls=stalls, tell=report_stall)  # from here on: connecting to a rank that dies now could take long
        distributed_utils.init_process_group(distributed_cfg, cpu, facts, store)
        status = main()
        watch.leaving()
        distributed_utils.barrier()  # who left earlier would have the launcher end the others
        watch.stop()
        return status
    except BaseException as error:
        _fail(error, facts, watch, store)


def _fail(error: BaseException, facts: LaunchFacts, watch: PeerWatch | None, store: dist.Store | None) -> NoReturn:
    """Publish `error`, print it if it was the first, and end this process."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # the launcher signals the others as soon as one has left
    mine = Failure.of(error, facts.rank)
    first = _explanation(error, store) or distributed_utils.publish_failure(mine, store)
    if first.exit_status == STOPPED_STATUS:  # no failure: one rank says it, or our launcher, who knows who asked
        status = STOPPED_STATUS
        if first.rank == facts.rank and not _our_launcher_speaks():
            report(error)
    elif first.rank == facts.rank:
        status = report(error, facts.rank)
    else:
        status = first.exit_status
        line = f"rank {facts.rank} ends: rank {first.rank} failed ({first.class_name})"
        watch.say_once(line) if watch is not None else print(line, file=sys.stderr)
        _write_to_log_files(f"{line}: {first.message}")
    if facts.rank == 0 and facts.world_size > 1 and not facts.store_is_agents:
        flush()
        time.sleep(2.5)  # the store dies with this process: the others must have read it
    leave(status)


def speaks_for_all() -> bool:
    """Whether this process tells what every process of the launch knows: our launcher, rank 0 of another, or alone."""
    try:
        facts = distributed_utils.launch_facts()
    except distributed_utils.LaunchEnvironmentError:
        return True
    return facts is None or (facts.rank == 0 and not _our_launcher_speaks())


def _our_launcher_speaks() -> bool:
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_RUN_ID_PREFIX)


def _explanation(error: BaseException, store: dist.Store | None) -> Failure | None:
    """The failure of a peer that `error` follows from; None if it is this rank's own."""
    if isinstance(error, PeerError):
        return Failure.of(error)
    deadline = time.monotonic() + (EXPLANATION_S if lost_a_peer(error) else 0.0)
    while True:
        failure = distributed_utils.peer_failure(store)
        if failure is not None or time.monotonic() >= deadline:
            return failure
        time.sleep(0.1)


_SIGNS_OF_A_LOST_PEER = ("closed by peer", "reset by peer", "refused", "Broken pipe", "gloo/transport", "NCCL")


def lost_a_peer(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that a connection to another rank broke."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, dist.DistError):
            return True
        if isinstance(link, RuntimeError) and any(sign in str(link) for sign in _SIGNS_OF_A_LOST_PEER):
            return True
        link = link.__cause__ or link.__context__
    return False


# --------------------------------------------------------------------------------------------------------- the launcher


def _launch_ranks(world_size: int, command: list[str]) -> int:
    """Start `world_size` local ranks of `command` with torch's elastic agent and return the status of the whole."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks speak for themselves
    from torch.distributed.elastic.multiprocessing import SignalException

    with tempfile.TemporaryDirectory(prefix="fairtrain_") as log_dir, _Forwarder() as forwarder:
        agent, rendezvous = _build_agent(world_size, command, log_dir, forwarder)
        try:
            result = agent.run()
        except SignalException as error:  # SIGHUP, SIGQUIT: the agent has ended the ranks
            print(f"fairtrain: ended by {error.sigval.name}", file=sys.stderr)
            return 1
        finally:
            told = agent.failure_of_ranks()
            rendezvous.shutdown()
    exitcodes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    _explain_deaths(exitcodes, told)
    status = status_of_ranks(exitcodes, forwarder.ended_at_once)
    if status == STOPPED_STATUS and told is not None:  # else they saved, and rank 0 has said so
        print(f"fairtrain: {told.message}", file=sys.stderr)
    return status


def _build_agent(world_size: int, command: list[str], log_dir: str, forwarder: _Forwarder) -> tuple[Any, Any]:
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    class Agent(LocalElasticAgent):
        """Torch's agent, but the signals that it would answer by killing ranks are forwarded to them."""

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            # Ranks inherit the blocked mask: a signal that comes before they are ready waits for their StopRequest.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                workers = super()._start_workers(worker_group)
                forwarder.ranks_started(list(workers.values()))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return workers

        def failure_of_ranks(self) -> Failure | None:
            """What the first rank that failed has published for the others."""
            group = self._worker_group
            if group.master_port is None:  # none was started
                return None
            try:
                store = dist.TCPStore(group.master_addr, group.master_port, wait_for_workers=False)
            except dist.DistError:
                return None
            return distributed_utils.failure_of_launch(store)

    rendezvous = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=_RUN_ID_PREFIX + uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=world_size,
        entrypoint=command[0],
        args=tuple(word.replace("$", "$$") for word in command[1:]),  # the agent expands $ in arguments
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; the host's name need not resolve
    return Agent(spec, logs_specs=DefaultLogsSpecs(log_dir=log_dir), start_method="spawn"), rendezvous


class _Forwarder:
    """Signal handlers of the launcher: what it is told, the ranks are told. A second SIGINT ends them in seconds."""

    def __init__(self) -> None:
        self.ended_at_once = False
        self._pids: list[int] | None = None
        self._waiting: list[int] = []
        self._interrupts = 0
        self._previous: dict[int, Any] = {}
        self._main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> _Forwarder:
        if self._main_thread:
            self._previous = {signum: signal.signal(signum, self._forward) for signum in SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def ranks_started(self, pids: list[int]) -> None:
        """Take the handlers back from torch, which installs its own, and pass on what came before."""
        self._pids = pids
        if self._main_thread:
            for signum in SIGNALS:
                signal.signal(signum, self._forward)
        for signum in self._waiting:
            self._send(signum)

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            self._interrupts += 1
        if self._pids is None:
            self._waiting.append(signum)
        else:
            self._send(signum)
        if self._interrupts == 2 and not self.ended_at_once:
            self.ended_at_once = True
            timer = threading.Timer(KILL_AFTER_SECOND_INTERRUPT_S, self._send, [signal.SIGKILL])
            timer.daemon = True
            timer.start()

    def _send(self, signum: int) -> None:
        for pid in self._pids or []:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue  # it has ended already


def status_of_ranks(exitcodes: Mapping[int, int], ended_at_once: bool = False) -> int:
    """The status of the whole from the exit codes of the ranks that did not end with 0."""
    if not exitcodes:
        return 0
    if ended_at_once:
        return 1
    if set(exitcodes.values()) == {STOPPED_STATUS}:
        return STOPPED_STATUS
    return BAD_INPUT_STATUS if BAD_INPUT_STATUS in exitcodes.values() else 1


def _explain_deaths(exitcodes: Mapping[int, int], told: Failure | None) -> None:
    """Name the signals that killed ranks: nobody else can. SIGTERM is how the agent ends survivors.

    told: what the ranks say themselves; one that stalled was killed for it.
    """
    stalled = told.rank if told is not None and told.class_name == StalledError.__name__ else None
    for rank, exitcode in sorted(exitcodes.items()):
        if rank != stalled and exitcode < 0 and -exitcode != signal.SIGTERM:
            name = signal.Signals(-exitcode).name
            hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
            print(f"fairtrain: rank {rank} was killed by {name}{hint}", file=sys.stderr)
