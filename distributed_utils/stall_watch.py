"""Who notices that a rank has stalled: the rank itself, or a neighbour where the whole process is silent.

Owns: what ranks tell each other of their progress (keys `beat/` and `process/` of the launch's store), the report of a
stall. Must not know: how a failure is made known and ends the ranks (`peer_watch`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from distributed_utils import stack_dumps
from distributed_utils.failures import Failure
from distributed_utils.heartbeat import (
    Heartbeat,
    Progress,
    ProgressMeter,
    StalledError,
    culprit,
    place_of,
    read_shared_position,
)

ELSEWHERE_S = 2.0  # a neighbour on another machine speaks up later: one on the same machine can say more
_TOLD_BYTES = 12_000  # of a report, to the other ranks


@dataclass(frozen=True)
class Stall:
    """A rank that makes no progress, and the report of it. pid: to be killed, where the process itself is silent."""

    rank: int
    text: str
    pid: int | None = None

    @property
    def error(self) -> StalledError:
        return StalledError(self.text)

    @property
    def failure(self) -> Failure:
        return Failure(self.rank, StalledError.__name__, self.text[:_TOLD_BYTES])


class OwnStalls:
    """Whether this process makes progress; for a watch that looks every second, and calls `rest` when it ends.

    Where a library holds the interpreter, so that the watch cannot look, faulthandler prints the stacks to stderr and
    ends the process with status 1, `HELD_S` after the timeout.
    """

    HELD_S = 10.0

    def __init__(self, heartbeat: Heartbeat, timeout_s: float) -> None:
        heartbeat.share()
        self.heartbeat, self.timeout_s, self._meter = heartbeat, timeout_s, ProgressMeter(heartbeat)
        if heartbeat.fd is not None:
            stack_dumps.offer(heartbeat.fd)

    def look(self) -> Progress:
        faulthandler.dump_traceback_later(self.timeout_s + self.HELD_S, exit=True, file=2)
        return self._meter.look()

    def rest(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def report(self, progress: Progress) -> str:
        text = f"{self.headline(progress.stalled_s, progress.place)} It stands at (innermost call last):\n{self._meter.stack()}"
        if self.heartbeat.fd is not None:
            children = stack_dumps.dump_children(self.heartbeat.fd, threading.main_thread().ident)
            text += f"\n{children}" if children else ""
        return text

    def headline(self, seconds: float, place: str) -> str:
        longer = f"{2 * self.timeout_s:g}"
        return (
            f"stalled {place}: no progress for {seconds:.0f} s. The run ends so that it can be started again from its last "
            f"checkpoint; if it only needs longer: distributed_training.heartbeat_timeout={longer}."
        )


class RankStalls:
    """Whether this rank, or the next one on this machine or in the job, has stalled.

    store: for the constructor, the main thread's; `check` is given the watch's own.
    """

    def __init__(self, own: OwnStalls, store: dist.Store, rank: int, world_size: int, local: tuple[int, int]) -> None:
        self._own, self._rank, self._world_size = own, rank, world_size
        self._count = 0
        self._home = stack_dumps.own_home()
        local_rank, local_world_size = local
        first = rank - local_rank
        neighbours = {first + (local_rank + 1) % local_world_size, (rank + 1) % world_size} - {rank}
        self._heard = {neighbour: ("", time.monotonic()) for neighbour in neighbours}
        facts = {"pid": os.getpid(), "home": self._home, "host": socket.gethostname()}
        facts |= {"fd": own.heartbeat.fd, "main": threading.main_thread().ident}
        store.set(f"process/{rank}", json.dumps(facts))
        self._tell(store, own.look())

    def check(self, store: dist.Store) -> Stall | None:
        """Tell the peers how far this rank is; the stall that this rank should report, if there is one."""
        progress = self._own.look()
        self._tell(store, progress)
        silent = next((rank for rank in self._heard if self._is_silent(store, rank)), None)
        if silent is not None:
            return self._silent(store, silent)
        if progress.stalled_s < self._own.timeout_s:
            return None
        told = store.multi_get([f"beat/{rank}" for rank in range(self._world_size)])
        all_ranks = [Progress(*json.loads(one)[1:]) for one in told]
        all_ranks[self._rank] = progress
        if culprit(all_ranks, self._own.timeout_s) != self._rank:
            return None  # the one to blame sees it as well
        return Stall(self._rank, self._own.report(progress))

    def _tell(self, store: dist.Store, progress: Progress) -> None:
        self._count += 1
        store.set(f"beat/{self._rank}", json.dumps([self._count, *progress.to_plain()]))

    def _is_silent(self, store: dist.Store, rank: int) -> bool:
        said, since = self._heard[rank]
        now = time.monotonic()
        heard = store.get(f"beat/{rank}").decode() if store.check([f"beat/{rank}"]) else ""
        if heard != said or not heard:
            self._heard[rank] = (heard, now)
            return False
        timeout_s = self._own.timeout_s
        if now - since < timeout_s or store.check([f"left/{rank}"]):
            return False
        return self._facts(store, rank)["home"] == self._home or now - since >= timeout_s + ELSEWHERE_S

    def _facts(self, store: dist.Store, rank: int) -> dict[str, Any]:
        return json.loads(store.get(f"process/{rank}"))

    def _silent(self, store: dist.Store, rank: int) -> Stall:
        """The report of a process that says nothing any more: what can be seen of it from here."""
        facts = self._facts(store, rank)
        said, since = self._heard[rank]
        last = Progress(*json.loads(said)[1:])
        seconds, pid = time.monotonic() - since, facts["pid"]
        if facts["home"] != self._home or not self._home:
            place = f"{last.place}, when last heard"
            return Stall(
                rank, f"{self._own.headline(seconds, place)} Its process {pid} on {facts['host']} says nothing."
            )
        state = stack_dumps.describe_state(pid)
        shared = facts["fd"] is not None
        position = read_shared_position(pid, facts["fd"]) if shared else None
        place = place_of(position) if position else f"{last.place}, when last heard"
        stack = stack_dumps.dump(pid, facts["fd"], facts["main"]) if shared else ""
        where = f" It stands at (innermost call last):\n{stack}" if stack else " It gives no stack."
        return Stall(rank, f"{self._own.headline(seconds, place)} Its process {pid} is {state}.{where}", pid)


class LocalWatch:
    """A thread that ends the only process of a run with status 1 when it makes no progress for `timeout_s`.

    tell: told the StalledError first, prints it.
    """

    def __init__(self, heartbeat: Heartbeat, timeout_s: float, tell: Callable[[StalledError], Any]) -> None:
        self._own, self._timeout_s, self._tell = OwnStalls(heartbeat, timeout_s), timeout_s, tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            progress = self._own.look()
            if progress.stalled_s >= self._timeout_s:
                end_after(lambda: self._tell(StalledError(self._own.report(progress))))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)
        self._own.rest()


def end_after(say: Callable[[], Any], within_s: float = 5.0) -> None:
    """Call `say`, then end this process with status 1; also if `say` hangs, as on a lock that the main thread holds."""
    timer = threading.Timer(within_s, os._exit, [1])
    timer.daemon = True
    timer.start()
    try:
        say()
    finally:
        os._exit(1)
