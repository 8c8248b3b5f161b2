"""The end of a Slurm job: how it is asked for, and that the run saves before it."""

import datetime
import os
import time

import pytest

from tests.dist.harness import run_ranks_to_any_end
from tests.resume.harness import _session, config, load, read_log
from trainer import time_limit
from trainer.time_limit import FLOOR_S, SAVE_FACTOR, UNKNOWN_SAVE_S, TimeLimit, seconds_until_the_job_ends

EARLY = FLOOR_S + UNKNOWN_SAVE_S


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Make `squeue` and `scontrol` for the PATH, and nothing else there; returns the PATH and who was called."""
    calls = tmp_path / "calls"

    def make(**bodies: str):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, body in bodies.items():
            (folder / name).write_text(f'#!/bin/sh\necho "{name} $@" >> {calls}\n{body}\n')
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return lambda: calls.read_text().splitlines() if calls.exists() else []

    return make


JOB = {"SLURM_JOB_ID": "4711"}


def test_without_a_job_nobody_is_asked(commands):
    called = commands(squeue="echo 1:00", scontrol="exit 0")
    assert seconds_until_the_job_ends({}) is None
    assert seconds_until_the_job_ends({"SLURM_JOB_ID": "; rm -rf /"}) is None
    assert called() == []


def test_the_variable_says_it_unless_it_is_another_jobs(commands):
    called = commands(squeue="echo 1:00")
    soon = {"SLURM_JOB_END_TIME": str(int(time.time()) + 1000), **JOB}
    assert 990 < seconds_until_the_job_ends(soon) <= 1000
    assert seconds_until_the_job_ends({"SLURM_JOB_END_TIME": str(int(time.time()) - 5), **JOB}) is None
    assert called() == []


@pytest.mark.parametrize(
    "answer, seconds",
    [
        ("59", 59),
        ("1:02", 62),
        ("2:00:01", 7201),
        ("1-00:00:00", 86400),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("0:00", None),
    ],
)
def test_squeue_is_asked_once(commands, answer, seconds):
    called = commands(squeue=f"echo '  {answer}'")
    assert seconds_until_the_job_ends(JOB) == seconds
    assert [line.split()[0] for line in called()] == ["squeue"] and "--job=4711" in called()[0]


@pytest.mark.parametrize("squeue", ["echo slurm_load_jobs error >&2; exit 1", "sleep 30", None])
def test_scontrol_is_asked_where_squeue_does_not_know(commands, monkeypatch, squeue):
    monkeypatch.setattr(time_limit, "ASK_S", 0.3)
    end = datetime.datetime.now() + datetime.timedelta(hours=1)
    scontrol = f"echo 'JobId=4711 StartTime=2020-01-01T00:00:00 EndTime={end:%Y-%m-%dT%H:%M:%S} Deadline=N/A'"
    commands(scontrol=scontrol, **({"squeue": squeue} if squeue else {}))
    monkeypatch.setattr(time_limit, "ASK_S", 5.0) if squeue != "sleep 30" else None
    assert 3590 < seconds_until_the_job_ends(JOB) <= 3600


def test_without_the_commands_there_is_no_limit(commands):
    commands()
    limit = TimeLimit(seconds_until_the_job_ends(JOB))
    assert not limit.exists and limit.has_time_for_updates() and limit.has_time_for_validation()


def test_the_margin_is_what_saves_took():
    limit = TimeLimit(100.0)
    assert limit.margin == EARLY and limit.has_time_for_updates()
    for seconds in (10.0, 25.0, 3.0):
        limit.took("save", seconds)
    assert limit.margin == FLOOR_S + SAVE_FACTOR * 25 and limit.has_time_for_updates()
    limit.took("update", 11.0)  # two more would leave less than that
    assert not limit.has_time_for_updates()
    for _ in range(20):
        limit.took("save", 3.0)  # it is fast again
    assert limit.margin == FLOOR_S + SAVE_FACTOR * 3 and limit.has_time_for_updates()


def test_a_validation_is_begun_if_it_fits_or_if_nothing_else_was_done():
    limit = TimeLimit(100.0)
    limit.took("validation", 80.0)
    assert limit.has_time_for_validation()
    limit.took("update", 0.1)
    assert not limit.has_time_for_validation() and limit.has_time_for_updates()


def make_config(run_dir):
    return config(
        run_dir,
        dataset={"batch_size": 4, "validate_interval": 0},
        optimization={"max_update": 1000000, "lr": 0.01},
        checkpoint={"save_interval": 0},
    )


def test_a_job_that_ends_is_saved_before_that_and_goes_on_in_the_next(tmp_path, commands):
    """Two ranks; rank 0 alone asks, once, and no rank makes an update more than the other."""
    called = commands(squeue=f"echo {int(EARLY) + 1}")
    env = {**JOB, "PATH": os.environ["PATH"], "TEST_STOP": ":"}
    outcomes = run_ranks_to_any_end(_session, 2, make_config(tmp_path), env=env, timeout=60)
    assert [outcome.value for outcome in outcomes] == [75, 75], [outcome.error for outcome in outcomes]
    assert len(called()) == 1
    first = load(tmp_path)["optimizer_history"][-1]["num_updates"]
    assert [line["num_updates"] for line in read_log(tmp_path, "checkpoint")] == [first]
    assert "the end of the Slurm job in" in (tmp_path / "train.log").read_text()
    commands(squeue="echo 5")  # too late for anything: each start still gets further
    outcomes = run_ranks_to_any_end(_session, 2, make_config(tmp_path), env=env, timeout=60)
    assert [outcome.value for outcome in outcomes] == [75, 75], [outcome.error for outcome in outcomes]
    assert load(tmp_path)["optimizer_history"][-1]["num_updates"] == first + 1
