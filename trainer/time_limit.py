"""When the allocation of this run ends, and whether there is still time for more than the last save.

Owns: how Slurm is asked, the durations that were measured, the margin that follows from them. Must not know: who
trains and saves, other ranks: one rank asks here, and its answer travels as a request to stop.

The end is turned into this process's own monotonic clock at the start, so that a clock that is set does not matter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

FLOOR_S = 30.0  # for what was not measured: processes that end, a file system that is busy just then
SAVE_FACTOR = 2.0  # the last save may take so many times the longest that was seen
UNKNOWN_SAVE_S = 30.0  # before the first save
REMEMBERED = 10  # durations; older ones are forgotten, as a file system is not slow for ever
ASK_S = 10.0  # how long an answer of scontrol or squeue is waited for


class TimeLimit:
    """The end of the allocation, against what an update, a validation and a save have taken so far.

    seconds_left: until the end, None where there is none; all times are seconds.
    """

    def __init__(self, seconds_left: float | None) -> None:
        self._end = None if seconds_left is None else time.monotonic() + seconds_left
        self._taken: dict[str, list[float]] = {"update": [], "validation": [], "save": []}

    @property
    def exists(self) -> bool:
        return self._end is not None

    @property
    def seconds_left(self) -> float:
        return float("inf") if self._end is None else self._end - time.monotonic()

    @contextlib.contextmanager
    def measured(self, what: str) -> Iterator[None]:
        """An `update`, a `validation` or a `save` takes as long as this is open."""
        begun = time.monotonic()
        yield
        self.took(what, time.monotonic() - begun)

    @property
    def margin(self) -> float:
        """What the last save may take, and what comes with it."""
        saves = self._taken["save"]
        return FLOOR_S + (SAVE_FACTOR * max(saves) if saves else UNKNOWN_SAVE_S)

    def took(self, what: str, seconds: float) -> None:
        """As `measured`, where it is known already."""
        self._taken[what] = [*self._taken[what], seconds][-REMEMBERED:]

    def has_time_for_updates(self) -> bool:
        """Asked before each update: whether there will be time for one more after it."""
        return self._end is None or self.seconds_left > 2 * self._longest("update") + self.margin

    def has_time_for_validation(self) -> bool:
        """Also true where no update was made yet: a start that only stopped again would never get further."""
        return (
            not self._taken["update"]
            or self.seconds_left > self._longest("validation") + self._longest("update") + self.margin
        )

    def _longest(self, what: str) -> float:
        return max(self._taken[what], default=0.0)

    def __str__(self) -> str:
        return f"the end of the Slurm job in {max(self.seconds_left, 0.0):.0f} s (a save may take {self.margin:.0f} s)"


def seconds_until_the_job_ends(env: Mapping[str, str] | None = None) -> float | None:
    """How long the Slurm job that this process is in may still run; None where there is none, or nobody knows.

    SLURM_JOB_END_TIME says it, else scontrol or squeue is asked, once. An end that lies in the past is another job's,
    left in the environment.
    """
    env = os.environ if env is None else env
    if re.fullmatch(r"\d{1,12}", env.get("SLURM_JOB_END_TIME", "").strip()):
        left = int(env["SLURM_JOB_END_TIME"]) - time.time()
        if left <= 0:
            logger.warning(
                "SLURM_JOB_END_TIME=%s is over and was left by another job: ignored", env["SLURM_JOB_END_TIME"]
            )
            return None
        return left
    job = env.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"\d{1,12}", job):
        return None
    for command, read in (
        (["squeue", "--noheader", "--states=running", f"--job={job}", "--format=%L"], _time_left),
        (["scontrol", "show", "job", "--oneliner", job], _end_time),
    ):
        left = read(_answer(command))
        if left is not None:
            return left if left > 0 else None
    return None


def _answer(command: list[str]) -> str:
    """What the command prints; nothing where it is not there, fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s: the end of the job is not known (%s)", command[0], error)
        return ""


def _time_left(answer: str) -> float | None:
    """Seconds of `[days-][[hours:]minutes:]seconds`; UNLIMITED, INVALID and NOT_SET are none."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", answer.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _end_time(answer: str) -> float | None:
    """Seconds until `EndTime=2030-01-31T12:00:00`, which is in local time."""
    found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b", answer)
    if found is None:
        return None
    return time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) - time.time()
