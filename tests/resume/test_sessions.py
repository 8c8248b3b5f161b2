"""How sessions of a run begin and end: signals, kills, limits, and which checkpoint a start continues from."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time

import pytest

from tests.commands import start
from tests.resume.harness import assert_same_run, config, load, read_log, run_to_status, session


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("through")
    run_to_status(saving(run_dir), 0)
    return run_dir


def saving(run_dir, **checkpoint) -> dict:
    return config(run_dir, checkpoint={"save_interval_updates": 3, "keep_interval_updates": 2, **checkpoint})


@pytest.mark.parametrize("update", [1, 4, 14, 21])
def test_a_killed_process_continues_from_its_newest_checkpoint_without_a_trace(tmp_path, through, update):
    outcome = session(saving(tmp_path), stop=f"{update}:0:0:SIGKILL")[0]
    assert outcome.exitcode == -signal.SIGKILL
    run_to_status(saving(tmp_path), 0)
    assert_same_run(through, tmp_path)


def test_a_kill_during_validation_repeats_the_validation(tmp_path, through):
    outcome = session(saving(tmp_path), stop="valid:14:0:SIGKILL")[0]
    assert outcome.exitcode == -signal.SIGKILL
    run_to_status(saving(tmp_path), 0)
    assert_same_run(through, tmp_path)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_request_during_validation_or_on_the_last_update_leaves_no_trace(tmp_path, through, name):
    cfg = saving(tmp_path)
    run_to_status(cfg, 75, stop=f"valid:14:0:{name}")  # heard at the end of the next update
    assert load(tmp_path)["optimizer_history"][-1]["num_updates"] == 15
    run_to_status(cfg, 0, stop=f"22:0:0:{name}")  # the run was done anyhow
    assert_same_run(through, tmp_path)


def test_sigusr2_saves_and_goes_on(tmp_path):
    cfg = config(tmp_path, optimization={"max_update": 8, "lr": 0.01})
    run_to_status(cfg, 0, 2, stop="5:0:1:SIGUSR2")
    saves = [line["num_updates"] for line in read_log(tmp_path, "checkpoint")]
    assert saves == [5, 7, 8]  # 7: the epoch's end


def test_a_finished_run_says_so_at_once_and_goes_on_when_the_limit_grows(tmp_path, through):
    shutil.copytree(through, tmp_path / "run")
    cfg = saving(tmp_path / "run")
    before = load(tmp_path / "run")
    stamp = (tmp_path / "run" / "checkpoints" / "checkpoint_last.pt").stat().st_mtime_ns
    run_to_status(cfg, 0)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint_last.pt").stat().st_mtime_ns == stamp
    cfg["optimization"]["max_update"] = 25
    run_to_status(cfg, 0)
    assert before["optimizer_history"][-1]["num_updates"] == 22
    assert load(tmp_path / "run")["optimizer_history"][-1]["num_updates"] == 25
    assert [line["num_updates"] for line in read_log(tmp_path / "run", "train")] == list(range(1, 26))


def test_a_limit_below_what_was_reached_is_told_with_one_that_extends_the_run(tmp_path, through):
    shutil.copytree(through, tmp_path / "run")
    cfg = saving(tmp_path / "run")
    cfg["optimization"]["max_update"] = 9
    run_to_status(cfg, 0)
    text = (tmp_path / "run" / "train.log").read_text()
    assert "optimization.max_update=44" in text.splitlines()[-1]


def test_limits_count_whole_updates_whatever_the_stops(tmp_path):
    cfg = config(tmp_path, optimization={"max_epoch": 2, "max_update": 0, "lr": 0.01},
                 lr_scheduler={"_target_": "trainer.lr_scheduler.InverseSqrt", "warmup_updates": 3})
    per_epoch = -(-53 // 4)
    for update in (1, per_epoch, per_epoch + 1, 2 * per_epoch - 1):
        run_to_status(cfg, 75, stop=f"{update}:0:0:SIGTERM")
    run_to_status(cfg, 0)
    assert load(tmp_path)["optimizer_history"][-1]["num_updates"] == 2 * per_epoch
    epochs = [(line["epoch"], line["num_updates"]) for line in read_log(tmp_path, "epoch")]
    assert epochs == [(1, per_epoch), (2, 2 * per_epoch)]


def test_patience_and_best_score_go_on_over_a_stop(tmp_path):
    def cfg(run_dir):
        # The rate is so large that scores get worse soon.
        return config(run_dir, optimization={"max_update": 200, "lr": 0.5}, dataset={"batch_size": 4,
                      "validate_interval_updates": 2}, checkpoint={"patience": 4, "keep_best_checkpoints": 2})

    run_to_status(cfg(tmp_path / "through"), 0)
    end = load(tmp_path / "through")["optimizer_history"][-1]["num_updates"]
    assert 8 < end < 200
    for update in (3, end - 3, end - 1):
        run_to_status(cfg(tmp_path / "stopped"), 75, stop=f"{update}:0:0:SIGTERM")
    run_to_status(cfg(tmp_path / "stopped"), 0)
    assert_same_run(tmp_path / "through", tmp_path / "stopped")


def test_the_time_limit_is_cumulative_and_an_end(tmp_path):
    cfg = config(tmp_path, optimization={"max_update": 100000, "lr": 0.01, "stop_time_hours": 2 / 3600})
    run_to_status(cfg, 75, stop="5:0:0:SIGTERM")
    run_to_status(cfg, 0)
    state = load(tmp_path)
    assert 2 <= state["extra_state"]["previous_training_time"] < 4
    num_updates = state["optimizer_history"][-1]["num_updates"]
    run_to_status(cfg, 0)
    assert load(tmp_path)["optimizer_history"][-1]["num_updates"] == num_updates


def test_the_same_command_goes_on_from_its_own_checkpoint_and_not_from_restore_file(tmp_path, through):
    restore_file = str(through / "checkpoints" / "checkpoint_last.pt")
    cfg = saving(tmp_path, restore_file=restore_file)
    cfg["optimization"]["max_update"] = 30
    run_to_status(cfg, 75, stop="25:0:0:SIGTERM")
    assert read_log(tmp_path, "train")[0]["num_updates"] == 23
    run_to_status(cfg, 0)
    assert [line["num_updates"] for line in read_log(tmp_path, "train")] == list(range(23, 31))
    resumed_from = [line["path"] for line in read_log(tmp_path, "resume")]
    assert resumed_from[0] == restore_file and resumed_from[1].startswith(str(tmp_path))


def test_a_new_restore_file_wins_and_what_lay_beyond_is_kept_aside(tmp_path):
    run_to_status(saving(tmp_path), 0)
    older = tmp_path / "checkpoints" / "checkpoint_2_18.pt"
    assert older.exists()
    shutil.copy(older, tmp_path / "older.pt")
    cfg = saving(tmp_path, restore_file=str(tmp_path / "older.pt"))
    run_to_status(cfg, 75, stop="19:0:0:SIGTERM")
    assert load(tmp_path)["optimizer_history"][-1]["num_updates"] == 19
    abandoned = os.listdir(tmp_path / "checkpoints" / "abandoned")
    assert any("21" in name for name in abandoned) and any("last" in name for name in abandoned)
    assert [line["num_updates"] for line in read_log(tmp_path, "train")] == list(range(1, 20))


def test_a_damaged_last_checkpoint_is_passed_over_for_the_newest_that_verifies(tmp_path, through):
    outcome = session(saving(tmp_path), stop="11:0:0:SIGKILL")[0]
    assert outcome.exitcode == -signal.SIGKILL
    last = tmp_path / "checkpoints" / "checkpoint_last.pt"
    weight = load(tmp_path)["model"]["second.weight"].numpy().tobytes()
    data = bytearray(last.read_bytes())
    data[data.index(weight) + 9] ^= 4
    last.unlink()  # it shares its bytes with checkpoint_1_9.pt
    last.write_bytes(bytes(data))
    run_to_status(saving(tmp_path), 0)
    resumed = read_log(tmp_path, "resume")
    assert resumed[-1]["num_updates"] == 9 and resumed[-1]["path"].endswith("checkpoint_1_9.pt")
    assert_same_run(through, tmp_path, names=False)


def test_all_checkpoints_damaged_is_an_error_and_never_a_fresh_start(tmp_path):
    run_to_status(saving(tmp_path), 0)
    for name in os.listdir(tmp_path / "checkpoints"):
        (tmp_path / "checkpoints" / name).write_bytes(b"nothing")
    outcome = session(saving(tmp_path))[0]
    assert not outcome.finished and "checkpoint" in outcome.error
    assert [line["num_updates"] for line in read_log(tmp_path, "train")] == list(range(1, 23))


def test_a_second_live_run_in_the_same_folder_is_refused(tmp_path):
    argv = ["+task._target_=tests.resume.task.Toy", "run_dir=run", "common.cpu=true", "dataset.batch_size=4",
            "optimization.lr=0.01", "optimization.max_update=1000000"]
    first = start(*argv, cwd=tmp_path)
    log = tmp_path / "run" / "log.jsonl"
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    second = start(*argv, cwd=tmp_path).wait(60)
    assert second.status == 2 and "alive" in second.output and "run_dir" in second.output, second.output
    first.kill(signal.SIGTERM)
    assert first.wait(60).status == 75


@pytest.mark.slow
def test_kills_at_random_moments_leave_no_trace(tmp_path):
    """SIGKILL at twenty random times of a run that saves after each update; the end equals the run that never stopped."""
    argv = ["+task._target_=tests.resume.task.Toy", "common.cpu=true", "common.num_threads=1", "dataset.batch_size=4",
            "dataset.num_workers=1", "optimization.lr=0.01", "optimization.max_update=400",
            "checkpoint.save_interval_updates=1", "checkpoint.keep_interval_updates=2", "ema.store_ema=true"]
    assert start(*argv, "run_dir=through", cwd=tmp_path).wait(300).status == 0
    choose = random.Random(1)
    status = None
    for _ in range(20):
        running = start(*argv, "run_dir=killed", cwd=tmp_path)
        time.sleep(choose.uniform(0.3, 3.0))
        if running.process.is_alive():
            os.killpg(running.process.pid, signal.SIGKILL)
        status = running.wait(60).status
        assert status in (0, -signal.SIGKILL), running.output()
    if status != 0:
        assert start(*argv, "run_dir=killed", cwd=tmp_path).wait(300).status == 0
    assert_same_run(tmp_path / "through", tmp_path / "killed")
