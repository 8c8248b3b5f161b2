"""The toy task on a machine whose locks do not reach others: TEST_HOST names it. Leases are short, for the test's sake."""

from __future__ import annotations

import fcntl
import os

from tests.resume.task import Toy as SameToy
from trainer import lease


def be_another_host(name: str) -> None:
    """From here on this process is on a host of that name, and flock says yes to everything."""
    lease._boot_id = lambda: name
    fcntl.flock = lambda *_: None


def be_quick(period: float) -> None:
    lease.BEAT_S, lease.PERIOD_S, lease.PATIENCE = period / 10, period, period / 5


class Toy(SameToy):
    pass


if "TEST_HOST" in os.environ:
    be_quick(3.0)
    be_another_host(os.environ["TEST_HOST"])
