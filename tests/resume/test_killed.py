"""Runs killed at any instant, again and again: they end as the run that nobody touched, bit by bit.

Each arrangement is killed before each call that changes something in the run's folder, one after the other, in the middle
of writes, and at random moments; strace does the first to a real command, where it is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.resume.killing import (
    COMMAND,
    LAYOUTS,
    Arrangement,
    Kill,
    Session,
    calls_one_after_another,
    campaign,
    differences,
    random_kills,
)

FORMS = ((False, False), (True, False), (False, True), (True, True))  # folder, asynchronous
ALL = [Arrangement(layout, folder, asynchronous) for layout in LAYOUTS for folder, asynchronous in FORMS]
QUICK = [Arrangement("one process"), Arrangement("zero", folder=True), Arrangement("data parallel", asynchronous=True)]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The run of an arrangement that nobody kills, made once."""
    made: dict[tuple, tuple[Path, Session]] = {}

    def of(arrangement: Arrangement, max_update: int) -> tuple[Path, Session]:
        if (arrangement, max_update) not in made:
            run_dir = tmp_path_factory.mktemp("untouched")
            made[arrangement, max_update] = run_dir, campaign(run_dir, arrangement, [], max_update)[0]
        return made[arrangement, max_update]

    return of


def leaves_no_trace(run_dir: Path, arrangement: Arrangement, kills: list[Kill], max_update: int, untouched) -> int:
    """Kill the run as told and compare; returns how many kills there were."""
    sessions = campaign(run_dir, arrangement, kills, max_update)
    assert [s for s in sessions if s.went_back] == [], "a start lost what was announced"
    assert [s for s in sessions if s.strays] == [], "a start left what a killed save had begun"
    assert differences(untouched(arrangement, max_update)[0], run_dir) == []
    return sum(session.killed for session in sessions)


@pytest.mark.parametrize("arrangement", QUICK, ids=str)
def test_a_run_that_is_killed_a_few_times_ends_as_if_nobody_had(tmp_path, untouched, arrangement):  # [P1] [P2] [P3]
    kills = [Kill(call=call, torn=call % 2 == 1) for call in (9, 24, 31, 38, 45)]
    assert leaves_no_trace(tmp_path, arrangement, kills, 12, untouched) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ALL, ids=str)
def test_killed_before_each_call_one_after_another(tmp_path, untouched, arrangement):  # [P1] [P2] [P3] [P6]
    assert leaves_no_trace(tmp_path, arrangement, calls_one_after_another(60), 60, untouched) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ALL[::5], ids=str)  # each layout and each form once
def test_killed_at_random_moments_and_calls(tmp_path, untouched, arrangement):  # [P1] [P2] [P3]
    killed = 0
    for seed in range(20):
        num_calls = untouched(arrangement, 25)[1].num_calls
        kills = random_kills(30, seed, num_calls, session_s=1.5)
        killed += leaves_no_trace(tmp_path / str(seed), arrangement, kills, 25, untouched)
        if killed >= 30:
            break
    assert killed >= 30


# ---- by the system, on a real command


SYSTEM_CALLS = ("pwrite64", "fsync", "rename", "link", "unlink", "mkdir")


def strace(run_dir: Path, *options: str) -> subprocess.CompletedProcess:
    command = ["strace", "-f", "-o", os.devnull, *options, *COMMAND, f"run_dir={run_dir}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=run_dir.parent, env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def real_run(tmp_path_factory) -> Path:
    if shutil.which("strace") is None:
        pytest.skip("there is no strace here")
    run_dir = tmp_path_factory.mktemp("real") / "run"
    ended = strace(run_dir, "-e", "trace=none")
    if ended.returncode != 0:
        pytest.skip(f"nothing can be traced here: {ended.stderr[-300:]}")
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_a_real_command_killed_at_a_system_call(tmp_path, real_run, name):  # [P1] [P2]
    """strace ends the process at its N-th call of one kind; the same command, untraced, ends the run."""
    killed = 0
    for when in (1, 3, 8):
        run_dir = tmp_path / str(when) / "run"
        run_dir.parent.mkdir()
        variants = f"?{name},?{name}at,?{name}at2"  # those that this machine has
        inject = f"inject={variants}:signal=SIGKILL:when={when}"
        ended = strace(run_dir, "-e", f"trace={variants}", "-e", inject)
        if re.search("invalid|Invalid", ended.stderr):
            pytest.skip(ended.stderr[-300:])
        killed += ended.returncode != 0
        assert strace(run_dir, "-e", "trace=none").returncode == 0
        assert differences(real_run, run_dir) == []
    assert killed
