"""The death of peers: a thread that ends this rank when another has failed, even if this one hangs in a collective."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from distributed_utils import stack_dumps
from distributed_utils.failures import Failure, failure_store, publish, published
from distributed_utils.launcher import LaunchFacts
from distributed_utils.ranks import get_rank, get_world_size
from distributed_utils.stall_watch import OwnStalls, RankStalls, Stall, end_after


class PeerWatch:
    """A thread that ends this rank when a peer has failed, even if this rank hangs in a collective.

    It looks once a second whether a failure is published, whether the next rank of this machine has died without a
    word (it then publishes that), and whether the launcher is gone. It uses a connection of its own to the store.
    A failure seen, it leaves the main thread `grace_s` to end by itself, then ends the process with status 1.

    stalls: this rank's progress, where ranks that make none are to be found; `tell(error, rank)` then prints the report.
    """

    def __init__(
        self,
        facts: LaunchFacts | None = None,
        interval_s: float = 1.0,
        grace_s: float = 2.5,
        store: dist.Store | None = None,
        stalls: OwnStalls | None = None,
        tell: Callable[[BaseException, int], Any] | None = None,
    ) -> None:
        self._interval, self._grace = interval_s, grace_s
        self._rank = get_rank() if facts is None else facts.rank
        self._stop = threading.Event()
        self._said = threading.Lock()
        self._parent = os.getppid() if facts is not None and facts.started_by_agent else None
        store = failure_store(store)
        assert store is not None, "a watch needs a process group, or the store of the launch"
        self._main_store, self._store = store, store.clone()
        self._neighbour = self._publish_pid(facts)
        self._neighbour_fd: int | None = None
        self._tell, self._own_stalls = tell, stalls
        self._holds_store = facts is not None and facts.rank == 0 and not facts.store_is_agents
        self._stalls: RankStalls | None = None
        if stalls is not None:
            world_size = get_world_size() if facts is None else facts.world_size
            local = (self._rank, world_size) if facts is None else (facts.local_rank, facts.local_world_size)
            self._stalls = RankStalls(stalls, self._main_store, self._rank, world_size, local)
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
        self._thread.start()

    def leaving(self) -> None:
        """Tell the peers that this rank is about to leave in order."""
        self._main_store.set(f"left/{self._rank}", "")

    def stop(self) -> None:
        """End the thread; at once, unless it waits for the store."""
        self._stop.set()
        self._thread.join(timeout=2.0)
        if self._own_stalls is not None:
            self._own_stalls.rest()
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
                    publish(self._store, Failure(self._neighbour, "ProcessDied", message))
                failure = published(self._store)
                stall = self._stalls.check(self._store) if self._stalls is not None and failure is None else None
                store_lost_since = None
            except (dist.DistError, RuntimeError):
                failure = stall = None
                store_lost_since = store_lost_since or time.monotonic()
                if time.monotonic() - store_lost_since > 5.0:
                    self._end("the store of the launch is gone")
            if stall is not None:
                self._end_stalled(stall)
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

    def _end_stalled(self, stall: Stall) -> NoReturn:
        """Make the stall known and end this process; a silent one is killed, since it hears nothing else."""
        end_after(lambda: self._tell_stalled(stall))

    def _tell_stalled(self, stall: Stall) -> None:
        try:
            first = publish(self._store, stall.failure)
        except (dist.DistError, RuntimeError):  # the store died with its host
            first = stall.failure
        if first != stall.failure:
            self.say_once(f"rank {self._rank} ends: rank {first.rank} failed ({first.class_name})")
        elif self._tell is not None and self._said.acquire(blocking=False):
            self._tell(stall.error, stall.rank)
        if stall.pid is not None:
            stack_dumps.kill(stall.pid)
        if self._holds_store:
            time.sleep(2.5)  # the store dies with this process: the others must have read it

    def _end(self, why: str) -> NoReturn:
        self.say_once(f"rank {self._rank} ends: {why}")
        os._exit(1)


def die_with_parent() -> None:
    """Have the kernel end this process when the process that started it dies (Linux; elsewhere PeerWatch notices)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
