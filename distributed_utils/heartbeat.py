"""How far a rank has come, and what it means if it comes no further.

Owns: the beats that the main thread leaves (`Heartbeat`), what else counts as progress, who is to blame when ranks
stand still (`culprit`), and the words for it. The threads that look are in `peer_watch`.
Must not know: the Trainer, files, how a stall ends the run.
"""

from __future__ import annotations

import linecache
import mmap
import os
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from types import FrameType
from typing import Any

# In the order in which a rank comes to them between one update and the next: who stands earlier is behind.
PHASES = (
    "start-up",
    "loading",
    "validation",
    "task",  # after_validate and after_train of a task
    "saving",
    "data",
    "forward",
    "backward",
    "reduction",
    "optimizer",
)
_INDEX = {phase: index for index, phase in enumerate(PHASES)}
_OF_NEXT_UPDATE = _INDEX["data"]  # phases from here on belong to the update that is being made
# Work of unknown length without beats: there, whoever computes, reads or writes is getting on.
_MEASURED_BY_WORK = {_INDEX[phase] for phase in ("start-up", "loading", "task", "saving")}
_WAITS_FOR_RANKS = _INDEX["reduction"]

FRAMES_SHOWN = 15
_BEATS, _PHASE, _UPDATE, _NUM_CELLS = 0, 1, 2, 3
_PAGE = mmap.PAGESIZE


class StalledError(RuntimeError):
    """A rank has made no progress for `distributed_training.heartbeat_timeout` seconds."""

    is_user_error = True


class Heartbeat:
    """What the main thread leaves for those who watch: a count that grows, the phase, the number of updates done.

    A beat is three writes to memory. Once shared, that memory can be read by another process of this machine even when
    this one is stopped.
    """

    def __init__(self) -> None:
        self._cells: Any = array("q", [0] * _NUM_CELLS)
        self.fd: int | None = None  # of the shared memory; stack dumps go behind its first page

    def enter(self, phase: str, num_updates: int | None = None) -> None:
        """Progress: this rank begins or goes on with `phase`; num_updates: those that are done, if that has changed."""
        cells = self._cells
        cells[_PHASE] = _INDEX[phase]
        if num_updates is not None:
            cells[_UPDATE] = num_updates
        cells[_BEATS] += 1

    def share(self) -> None:
        """Move the beats to memory that other processes can map (Linux; elsewhere nothing changes)."""
        if self.fd is not None or not hasattr(os, "memfd_create"):
            return
        self.fd = os.memfd_create("fairtrain-heartbeat")
        os.ftruncate(self.fd, _PAGE)
        os.lseek(self.fd, _PAGE, os.SEEK_SET)
        cells = memoryview(mmap.mmap(self.fd, _PAGE)).cast("q")
        cells[:_NUM_CELLS] = self._cells
        self._cells = cells

    @property
    def beats(self) -> int:
        return self._cells[_BEATS]

    @property
    def position(self) -> tuple[int, int]:
        """(updates done, index of the phase): ranks at a smaller one are behind."""
        return self._cells[_UPDATE], self._cells[_PHASE]


def read_shared_position(pid: int, fd: int) -> tuple[int, int] | None:
    """The position of a process of this machine, which may be stopped. None where it cannot be read."""
    try:
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            cells = array("q", file.read(8 * _NUM_CELLS))
    except (OSError, ValueError):
        return None
    return (cells[_UPDATE], cells[_PHASE]) if len(cells) == _NUM_CELLS else None


def read_shared_dumps(pid: int, fd: int, begin: int = 0) -> str:
    """What faulthandler has written behind the beats of a process of this machine, from byte `begin` on."""
    try:
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            file.seek(_PAGE + begin)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Progress:
    """Where a rank stands, as it tells its peers."""

    num_updates: int
    phase: int  # index in PHASES
    stalled_s: float  # since the last sign of progress
    is_waiting: bool  # for other ranks, as far as its stack tells

    def to_plain(self) -> list:
        return list(astuple(self))

    @property
    def place(self) -> str:
        return place_of((self.num_updates, self.phase))


def place_of(position: tuple[int, int]) -> str:
    """The words for a position of a Heartbeat."""
    num_updates, phase = position
    if phase >= _OF_NEXT_UPDATE:
        return f"in update {num_updates + 1}, phase {PHASES[phase]}"
    return (
        f"after update {num_updates}, phase {PHASES[phase]}"
        if num_updates
        else f"before update 1, phase {PHASES[phase]}"
    )


def culprit(progress: Sequence[Progress], timeout_s: float) -> int | None:
    """The rank to blame for standing still, by the rank's index in `progress`; None while there is no hang.

    Who stands still for `timeout_s` and waits for nobody is to blame, however the others are. If all stand still and
    wait, it is the one that is furthest behind. Of several, the one furthest behind, then the lowest rank.
    """
    stalled = [rank for rank, one in enumerate(progress) if one.stalled_s >= timeout_s]
    guilty = [rank for rank in stalled if not progress[rank].is_waiting]
    if not guilty and len(stalled) == len(progress):
        guilty = stalled
    return min(guilty, key=lambda rank: (progress[rank].num_updates, progress[rank].phase, rank), default=None)


class ProgressMeter:
    """Looks at the Heartbeat of this process, from a thread of its own, and says for how long nothing has moved."""

    def __init__(self, heartbeat: Heartbeat, main_ident: int | None = None) -> None:
        self.heartbeat = heartbeat
        self._main = threading.main_thread().ident if main_ident is None else main_ident
        self._seen: tuple = (heartbeat.beats, None)
        self._cpu_s, self._looked_at = time.process_time(), time.monotonic()
        self._moved_at = self._looked_at

    def look(self) -> Progress:
        now, (num_updates, phase) = time.monotonic(), self.heartbeat.position
        by_work = phase in _MEASURED_BY_WORK
        seen = (self.heartbeat.beats, _work_done() if by_work else None)
        if seen != self._seen or (by_work and self._is_computing(now)):
            self._moved_at = now
        self._seen, self._cpu_s, self._looked_at = seen, time.process_time(), now
        frame = sys._current_frames().get(self._main)
        is_waiting = phase == _WAITS_FOR_RANKS or (frame is not None and waits_for_ranks(frame))
        return Progress(num_updates, phase, now - self._moved_at, is_waiting)

    def stack(self) -> str:
        """The stack of the main thread, innermost call last; of a deep one the innermost calls."""
        frame = sys._current_frames().get(self._main)
        lines = traceback.format_stack(frame) if frame is not None else []
        return "".join(["  ...\n"] * (len(lines) > FRAMES_SHOWN) + lines[-FRAMES_SHOWN:]).rstrip()

    def _is_computing(self, now: float) -> bool:
        """Whether this process has used a tenth of a core since the last look."""
        return time.process_time() - self._cpu_s > 0.1 * (now - self._looked_at)


_OWN_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN_PACKAGES = tuple(
    os.path.join(_OWN_ROOT, name) + os.sep
    for name in ("distributed_utils", "checkpoint_file", "checkpoint_utils", "trainer")
)
_TORCH_DISTRIBUTED = os.sep + os.path.join("torch", "distributed") + os.sep
_PASSED_THROUGH = tuple(os.sep + os.path.join("torch", *path) for path in (["_ops.py"], ["utils", "_contextlib.py"]))


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether the innermost call of a stack is one that returns when other ranks have come."""
    while frame is not None and frame.f_code.co_filename.endswith(_PASSED_THROUGH):
        frame = frame.f_back
    if frame is None:
        return False
    path = frame.f_code.co_filename
    if _TORCH_DISTRIBUTED in path:
        return True
    line = linecache.getline(path, frame.f_lineno)
    return path.startswith(_OWN_PACKAGES) and ".wait(" in line


def _work_done() -> tuple[int, int]:
    """Counters that move while this process reads, writes or waits for its writes to reach the disk (Linux)."""
    own, moved, flushing = threading.get_native_id(), 0, False
    for thread in threading.enumerate():
        if thread.native_id in (None, own):
            continue
        try:
            with open(f"/proc/self/task/{thread.native_id}/io") as file:
                moved += sum(int(line.split()[1]) for line in file)
            flushing = flushing or process_state(f"self/task/{thread.native_id}") == "D"
        except (OSError, ValueError):
            continue
    return moved, _pages_written() if flushing else 0


def _pages_written() -> int:
    """Pages that this machine has written to its disks: an fsync tells nothing else of how far it has come."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("nr_written ")), 0)
    except OSError:
        return 0


def process_state(process: int | str) -> str:
    """The letter of /proc/PID/stat: T stopped, D in a system call that cannot be interrupted, …; '' if unknown."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
