"""Real ranks for tests: `run_ranks(function, world_size, *args)` gives what each rank returned.

Each rank is a process of its own with a gloo process group, forked from a server that has imported torch and numpy
once, so that four ranks take a fraction of a second. A hang is a failure: everyone is killed and the error names the
ranks that were still alive and where they stood. `function` must be importable (the top level of a test module).
Must not know: anything of the package under test.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# torch._dynamo: torch imports it, for two seconds, when a process builds its first optimizer.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy", "pytest"]
PEERS_MAY_FINISH_S = 2.0  # after a rank failed, the others may say what they saw; then they are killed
PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """What became of one rank: `value` if `finished`, `error` (a traceback) if it raised, `exitcode` as in multiprocessing."""

    rank: int
    finished: bool = False
    value: Any = None
    error: str = ""
    exitcode: int | None = None
    hung: bool = False
    stack: str = field(default="", repr=False)


class RanksFailed(RuntimeError):
    """At least one rank raised, died or hung. `outcomes` holds every rank's story, the message the failing ones'."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        super().__init__("\n".join(_story(outcome) for outcome in outcomes if not outcome.finished))


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    init: bool = True,
) -> list[Any]:
    """Run `function(*args)` on `world_size` ranks and return their values in the order of ranks.

    timeout: seconds until ranks that have not finished count as hung. env: variables set in each rank.
    init: whether the harness initialises the process group (else only the variables of torchrun are set).
    Raises RanksFailed with the traceback of each rank that raised.
    """
    outcomes = run_ranks_to_any_end(function, world_size, *args, timeout=timeout, env=env, init=init)
    if not all(outcome.finished for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def run_ranks_to_any_end(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    init: bool = True,
    peers_may_finish: float = PEERS_MAY_FINISH_S,
) -> list[Outcome]:
    """As `run_ranks`, for tests in which ranks are meant to fail: returns every rank's outcome, raises nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # The store lives here, as torchrun's lives in its agent: no port is chosen twice and no rank must outlive another.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        ranks = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            variables = {**_torchrun_variables(rank, world_size, store.port), **(env or {})}
            process = context.Process(
                target=_rank_main, args=(sender, folder, variables, init, timeout, function, args), name=f"rank{rank}"
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        outcomes = _collect(ranks, timeout, peers_may_finish)
        for outcome in outcomes:
            stack_file = Path(folder, f"stack{outcome.rank}")
            outcome.stack = stack_file.read_text() if stack_file.exists() else ""
    return outcomes


def _torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives to a rank of one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _rank_main(sender, folder, variables, init, timeout, function, args) -> None:
    os.setpgid(0, 0)  # so that a kill reaches the children of this rank too
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the server ends with the tests, the ranks with it
    os.environ.update(variables)
    stack_file = open(os.path.join(folder, f"stack{variables['RANK']}"), "w")
    faulthandler.enable(file=stack_file)  # SIGABRT from the harness writes down where this rank hangs
    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
        report = (True, function(*args))
        payload = pickle.dumps(report)  # plain pickle: tensors by value, since this process is about to end
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(payload)
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(ranks, timeout: float, peers_may_finish: float) -> list[Outcome]:
    """Wait until all ranks have reported or died, until `timeout`, or a little while after the first failure."""
    outcomes = [Outcome(rank) for rank in range(len(ranks))]
    open_receivers = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while open_receivers and (left := deadline - time.monotonic()) > 0:
        for receiver in multiprocessing.connection.wait(list(open_receivers), timeout=left):
            outcome = outcomes[open_receivers.pop(receiver)]
            try:
                ok, value = pickle.loads(receiver.recv_bytes())
                outcome.finished, outcome.value, outcome.error = ok, value if ok else None, "" if ok else value
            except EOFError:
                ok = False  # it died without a word
            if not ok:
                deadline = min(deadline, time.monotonic() + peers_may_finish)
    _end(ranks, outcomes, set(open_receivers.values()), deadline)
    return outcomes


def _end(ranks, outcomes: list[Outcome], silent: set[int], deadline: float) -> None:
    for rank in silent:
        outcomes[rank].hung = True
        os.kill(ranks[rank][0].pid, signal.SIGABRT)
    for rank, (process, receiver) in enumerate(ranks):
        process.join(timeout=2.0)
        if process.is_alive() or rank in silent:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # already gone
            process.join()
        outcomes[rank].exitcode = process.exitcode
        receiver.close()
        process.close()


def _story(outcome: Outcome) -> str:
    if outcome.error:
        return f"rank {outcome.rank} raised:\n{outcome.error}"
    if outcome.hung:
        return f"rank {outcome.rank} was still alive and has been killed; it stood at:\n{outcome.stack}"
    return f"rank {outcome.rank} died without a report, exit code {outcome.exitcode}\n{outcome.stack}"
