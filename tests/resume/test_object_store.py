"""Whole runs whose checkpoints are in an S3 server: what a machine of its own finds there, and what breaks on the way."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal

import pytest

from checkpoint_utils.object_store import retrying
from tests.dist.harness import run_ranks_to_any_end
from tests.resume.harness import assert_same_log, assert_same_run, config, first_difference, load, read_log
from tests.s3_server import BUCKET, SECRET, Proxy, Server


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(Server()) as server:
        yield server


@pytest.fixture
def proxy(server):
    with contextlib.closing(Proxy(server.port)) as proxy:
        yield proxy


def make_config(run_dir, save_dir, **checkpoint) -> dict:
    return config(
        run_dir,
        optimization={"max_update": 9, "lr": 0.01},
        dataset={"batch_size": 4, "batch_size_valid": 4, "validate_interval_updates": 4},
        checkpoint={"save_interval_updates": 3, "keep_interval_updates": 2, **checkpoint, "save_dir": str(save_dir)},
    )


def _session(cfg: dict) -> int:
    from trainer.config import complete_config
    from trainer.train import main

    retrying.FIRST_WAIT_S, retrying.TRIES = 0.01, 4
    return main(complete_config(cfg))


def session(proxy, cfg: dict, ranks: int = 1, stop: str = ":") -> list:
    env = {"TEST_STOP": stop, **Server.environment(proxy.port)}
    return run_ranks_to_any_end(_session, ranks, cfg, timeout=120, env=env)


def statuses(outcomes) -> list:
    return [
        outcome.value if outcome.finished else outcome.error.splitlines()[-1] if outcome.error else outcome.exitcode
        for outcome in outcomes
    ]


def test_a_run_goes_on_on_another_machine_each_time_and_nobody_can_tell(proxy, tmp_path):
    """Two ranks; each session has an empty disk, the first is killed. One download a session, however many ranks read."""
    url = f"s3://{BUCKET}/moving"
    through = tmp_path / "through"
    assert statuses(session(proxy, make_config(through, through / "checkpoints"), 2)) == [0, 0]
    stops = ["5:0:0:SIGTERM", "8:0:1:SIGUSR1", ":"]
    for number, stop in enumerate(stops):
        run_dir = tmp_path / f"machine{number}" / "run"
        if number:  # the log is on the disk of the run; the checkpoints are not
            shutil.copytree(
                tmp_path / f"machine{number - 1}" / "run", run_dir, ignore=shutil.ignore_patterns("checkpoints")
            )
        proxy.requests.clear()
        cfg = make_config(run_dir, url, load_checkpoint_on_all_dp_ranks=bool(number % 2))
        ended = session(proxy, cfg, 2, stop)
        assert statuses(ended) == ([75, 75] if number < 2 else [0, 0]), [outcome.error for outcome in ended]
        assert proxy.count(r"GET .*/data/") == (1 if number else 0)
    assert_same_log(through, run_dir)
    one, other = load(through), load(run_dir)
    for saved in (one, other):
        saved["cfg"]["checkpoint"]["load_checkpoint_on_all_dp_ranks"] = None
    assert first_difference(one, other) is None
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                assert SECRET.encode() not in file.read(), name


@pytest.mark.slow
def test_a_killed_run_and_one_whose_uploads_break_go_on_from_their_folder(proxy, tmp_path):
    through = tmp_path / "through"
    assert statuses(session(proxy, make_config(through, through / "checkpoints", max_failed_saves=100))) == [0]
    run_dir, url = tmp_path / "run", f"s3://{BUCKET}/broken"
    proxy.misbehave = lambda line: "drop" if re.match("PUT .*data/", line) else None
    cfg = make_config(run_dir, url, max_failed_saves=100)
    assert statuses(session(proxy, cfg, stop="5:0:0:SIGKILL")) == [-signal.SIGKILL]
    proxy.misbehave = lambda line: None
    assert statuses(session(proxy, cfg)) == [0]
    assert_same_run(through, run_dir, names=False)
    fresh = make_config(tmp_path / "fresh", url, max_failed_saves=100)
    assert statuses(session(proxy, fresh)) == [0]  # it is finished, and says so
    assert first_difference(load(through), load(tmp_path / "fresh")) is None


@pytest.mark.slow
def test_uploads_that_fail_end_the_run_as_failed_saves_do(proxy, tmp_path):
    proxy.misbehave = lambda line: "500" if re.match("PUT .*data/", line) else None
    outcome = session(proxy, make_config(tmp_path / "run", f"s3://{BUCKET}/failing", max_failed_saves=2))[0]
    assert "checkpoint.max_failed_saves=2" in outcome.error and "uploads in a row have failed" in outcome.error
    last = load(tmp_path / "run")["optimizer_history"][-1]["num_updates"]
    assert 4 <= last < 9  # which is on the disk, whatever the store does
    proxy.misbehave = lambda line: None
    assert statuses(session(proxy, make_config(tmp_path / "run", f"s3://{BUCKET}/failing"))) == [0]
    assert read_log(tmp_path / "run", "resume")[-1]["num_updates"] == last


@pytest.mark.slow
def test_a_run_begins_from_a_checkpoint_of_another_ones_store(proxy, tmp_path):
    url = f"s3://{BUCKET}/first"
    assert statuses(session(proxy, make_config(tmp_path / "first", url))) == [0]
    cfg = make_config(
        tmp_path / "second", tmp_path / "second" / "checkpoints", restore_file=f"{url}/checkpoint_last.pt"
    )
    cfg["optimization"]["max_update"] = 12
    assert statuses(session(proxy, cfg, stop="11:0:0:SIGTERM")) == [75]
    assert statuses(session(proxy, cfg)) == [0]
    assert [line["num_updates"] for line in read_log(tmp_path / "second", "train")] == [10, 11, 12]
