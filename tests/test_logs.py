"""log.jsonl and train.log: each step once, whatever happened to the run or to the disk."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import logs, sinks
from trainer.logs import RunLog, read_log

PLAIN = SimpleNamespace(log_interval=1, tensorboard_logdir=None, wandb_project=None)


def common(**fields):
    return SimpleNamespace(**{**vars(PLAIN), **fields})


def stats(num_updates, **fields):
    return {
        "epoch": 1 + num_updates // 10,
        "num_updates": num_updates,
        "loss": 1 / (1 + num_updates),
        "lr": 0.1,
        **fields,
    }


def lines(run_dir):
    return list(read_log(run_dir / "log.jsonl"))


def keys(run_dir):
    return [(line["event"], line.get("num_updates"), line.get("subset")) for line in lines(run_dir)]


def write_run(run_dir, last, start=0, cfg=PLAIN, valid_every=5):
    """A session from `start` to `last` as the Trainer would log it, left without a close."""
    log = RunLog(run_dir, cfg)
    log.cut_after(start)
    if start:
        log.event("resume", path="checkpoint_last.pt")
    for num_updates in range(start + 1, last + 1):
        log.train(stats(num_updates))
        if num_updates % valid_every == 0:
            log.valid("valid", stats(num_updates, accuracy=0.5))
            log.event("checkpoint", num_updates=num_updates, path=f"checkpoint_1_{num_updates}.pt", bytes=9)
    log.flush()
    return log


# --- lines -----------------------------------------------------------------------------------------------------------


@given(st.floats(width=64))
def test_a_float_comes_back_bit_for_bit_from_standard_json(value):
    def refuse(word):
        raise AssertionError(f"{word} is not standard JSON")

    read = json.loads(logs.encode_line({"event": "train", "loss": value}), parse_constant=refuse)
    assert math.isnan(value) and math.isnan(float(read["loss"])) or float(read["loss"]) == value


def test_tensors_arrays_paths_and_nested_infinities_become_plain_json(tmp_path):
    record = {"a": torch.tensor(0.1), "b": np.float32(0.1), "c": np.int64(3), "d": tmp_path, "e": [{"f": -math.inf}]}
    record |= {"g": np.array([1.0, math.nan]), "h": torch.tensor(math.inf)}
    read = logs.decode_line(logs.encode_line(record))
    assert read["a"] == torch.tensor(0.1).item() and read["b"] == float(np.float32(0.1)) and read["c"] == 3
    assert read["d"] == str(tmp_path) and read["e"] == [{"f": "-inf"}]
    assert read["g"] == [1.0, "nan"] and read["h"] == "inf"


def test_train_lines_are_thinned_by_position_alone(tmp_path):
    log = RunLog(tmp_path, common(log_interval=4))
    log.cut_after(0)
    for num_updates in range(1, 7):
        log.train(stats(num_updates))
    log.close()
    log = RunLog(tmp_path, common(log_interval=4))
    log.cut_after(6)
    for num_updates in range(7, 14):
        log.train(stats(num_updates))
    log.close()
    assert [line["num_updates"] for line in lines(tmp_path)] == [1, 4, 8, 12]


def test_ranks_other_than_0_write_nothing(tmp_path):
    log = RunLog(tmp_path, common(tensorboard_logdir="tb", wandb_project="p"), is_master=False)
    log.cut_after(0)
    log.train(stats(1))
    log.valid("valid", stats(1))
    log.event("checkpoint", num_updates=1)
    log.flush()
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_an_event_is_on_disk_at_once_and_train_lines_within_a_second(tmp_path):
    log = RunLog(tmp_path, PLAIN)
    log.cut_after(0)
    log.train(stats(1))
    log.train(stats(2))
    log.event("checkpoint", num_updates=2, path="a.pt")
    assert keys(tmp_path) == [("train", 1, None), ("train", 2, None), ("checkpoint", 2, None)]
    log.train(stats(3))
    time.sleep(1.05)
    log.train(stats(4))
    assert len(lines(tmp_path)) == 5


def test_a_train_line_costs_less_than_the_budget(tmp_path):
    log = RunLog(tmp_path, PLAIN)
    log.cut_after(0)
    many = [
        stats(n, ppl=1.1 * n, correct=0.1 / n, gnorm=0.2 / n, sample_size=64.0, wall=0.3 * n) for n in range(1, 4001)
    ]
    costs, yardstick = [], []
    for begin in range(0, 4000, 200):
        before = time.perf_counter()
        for one in many[begin : begin + 200]:
            log.train(one)
        between = time.perf_counter()
        for one in many[begin : begin + 200]:
            json.dumps(one)
        costs.append(between - before)
        yardstick.append(time.perf_counter() - between)
    assert min(costs) < 4 * min(yardstick)  # 25 µs where json.dumps takes 6, wherever this runs


# --- resume ----------------------------------------------------------------------------------------------------------


def test_a_resumed_log_equals_that_of_a_run_that_never_stopped(tmp_path):
    write_run(tmp_path / "whole", 20).close()
    write_run(tmp_path / "stopped", 13)
    write_run(tmp_path / "stopped", 20, start=10).close()
    resumed = [line for line in lines(tmp_path / "stopped") if line["event"] != "resume"]
    assert resumed == lines(tmp_path / "whole")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 15), st.integers(0, 40)), min_size=1, max_size=5))
def test_no_step_stands_twice_after_any_series_of_kills_and_resumes(tmp_path_factory, sessions):
    run_dir = tmp_path_factory.mktemp("run")
    reached = num_resumes = 0
    for start, length, torn in sessions:
        start = min(start, reached)
        reached = start + length
        num_resumes += start > 0
        write_run(run_dir, reached, start=start, valid_every=3)
        with open(run_dir / "log.jsonl", "ab") as file:
            file.write(b'{"event": "train", "num_updates": 99, "loss": 0.12'[:torn])
    log = RunLog(run_dir, PLAIN)
    log.event("end")
    log.close()
    numbered = [key for key in keys(run_dir) if key[0] not in ("resume", "end")]
    assert len(set(numbered)) == len(numbered)
    assert [key[1] for key in numbered if key[0] == "train"] == list(range(1, reached + 1))
    assert [key[0] for key in keys(run_dir)].count("resume") == num_resumes


def test_resume_lines_and_lines_without_a_number_stay_when_a_run_goes_back_behind_them(tmp_path):
    write_run(tmp_path, 10)
    write_run(tmp_path, 20, start=10)
    log = RunLog(tmp_path, PLAIN)
    log.event("note", text="checkpoint_last.pt is damaged")
    log.event("resume", num_updates=15)
    log.cut_after(5)
    log.close()
    stayed = [("checkpoint", 5, None), ("resume", None, None), ("note", None, None), ("resume", 15, None)]
    assert keys(tmp_path)[-4:] == stayed
    assert max(line["num_updates"] for line in lines(tmp_path) if line["event"] == "train") == 5


def test_a_checkpoint_line_that_came_late_does_not_hide_lines_beyond_the_cut(tmp_path):
    log = RunLog(tmp_path, PLAIN)
    log.cut_after(0)
    for num_updates in range(1, 9):
        log.train(stats(num_updates))
    log.event("checkpoint", num_updates=4, path="written in the background")
    log.close()
    RunLog(tmp_path, PLAIN).cut_after(6)
    assert keys(tmp_path) == [("train", n, None) for n in range(1, 7)] + [("checkpoint", 4, None)]


def test_a_validation_or_save_repeated_at_the_restored_update_is_written_once(tmp_path):
    write_run(tmp_path, 10)
    log = RunLog(tmp_path, PLAIN)
    log.cut_after(10)
    log.valid("valid", stats(10))
    log.valid("test", stats(10))
    log.event("checkpoint", num_updates=10, path="again.pt")
    log.close()
    expected = [("train", 10, None), ("valid", 10, "valid"), ("checkpoint", 10, None), ("valid", 10, "test")]
    assert keys(tmp_path)[-4:] == expected


def test_a_log_knows_after_the_cut_whether_the_run_was_done_there(tmp_path):
    write_run(tmp_path, 10).event("done", num_updates=10)
    for restored, done in ((10, True), (5, False)):
        log = RunLog(tmp_path, PLAIN)
        log.cut_after(restored)
        assert log.is_done(restored) is done


def test_a_run_that_goes_back_without_saying_so_still_has_each_step_once(tmp_path):
    write_run(tmp_path, 10).close()
    log = RunLog(tmp_path, PLAIN)
    log.train(stats(1))
    log.train(stats(2))
    log.train(stats(2))
    log.close()
    assert keys(tmp_path) == [("train", 1, None), ("train", 2, None)]


def test_cutting_walks_over_what_is_cut_and_not_over_the_file(tmp_path):
    path = tmp_path / "log.jsonl"
    with open(path, "wb") as file:
        file.write(b"x" * (64 << 20) + b"\n")  # would be dropped, at the price of a rewrite, if it were looked at
        for num_updates in range(1, 30_000):
            file.write(logs.encode_line({"event": "train", **stats(num_updates)}))
    size = path.stat().st_size
    RunLog(tmp_path, PLAIN).cut_after(29_000)
    assert 0 < size - path.stat().st_size < 200_000


def test_lines_longer_than_a_block_are_walked_over_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    written = [b"a" * n + b"\n" for n in (0, 1, 7, 8, 9, 30, 3, 2)] + [b"torn"]
    path.write_bytes(b"".join(written))
    for block in range(1, 12):
        with open(path, "rb") as file:
            walked = list(logs._lines_backwards(file, block))
        assert [line for _, line in reversed(walked)] == written
        assert [offset for offset, _ in reversed(walked)] == [sum(map(len, written[:i])) for i in range(len(written))]


def test_a_rewrite_killed_before_the_rename_leaves_the_old_log(tmp_path, monkeypatch):
    write_run(tmp_path, 10)
    write_run(tmp_path, 20, start=10)
    before = (tmp_path / "log.jsonl").read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    RunLog(tmp_path, PLAIN).cut_after(5)
    assert (tmp_path / "log.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def run_python(code, *arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, **options)


def test_what_was_flushed_survives_sigkill(tmp_path):
    done = run_python(
        """
        import os, sys, signal
        from types import SimpleNamespace
        from trainer.logs import RunLog
        log = RunLog(sys.argv[1], SimpleNamespace())
        log.cut_after(0)
        for n in range(1, 101):
            log.train({"epoch": 1, "num_updates": n, "loss": 0.5})
            if n == 90:
                log.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL
    assert len(lines(tmp_path)) >= 90


def test_a_full_disk_stops_nothing_warns_once_and_loses_no_line_once_there_is_room(tmp_path):
    """A limit on the file's size plays the disk: the write that meets it is cut short, those after it fail."""
    done = run_python(
        """
        import logging, resource, signal, sys
        from types import SimpleNamespace
        from trainer.logs import RunLog, setup_logging
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        logging.basicConfig()
        log = RunLog(sys.argv[1], SimpleNamespace())
        log.cut_after(0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        for n in range(1, 101):
            log.train({"epoch": 1, "num_updates": n, "loss": 1 / n})
            if n % 10 == 0:
                log.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.flush()
        log.train({"epoch": 1, "num_updates": 101, "loss": 0.5})
        log.close()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written") == 1 and done.stderr.count("nothing is lost") == 1
    assert [line["num_updates"] for line in lines(tmp_path)] == list(range(1, 102))


def test_lines_beyond_what_memory_may_hold_are_counted_as_lost(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sinks, "_MAX_PENDING_BYTES", 500)
    blocker = tmp_path / "run"
    blocker.write_text("a file where the folder should be")
    log = RunLog(blocker, PLAIN)
    log.cut_after(0)
    for num_updates in range(1, 101):
        log.train(stats(num_updates))
        log.flush()
    blocker.unlink()
    log.close()
    kept = lines(blocker)
    assert 0 < len(kept) < 20 and f"{100 - len(kept)} lines are lost" in caplog.text


# --- Python's logging ------------------------------------------------------------------------------------------------


@pytest.fixture
def python_logging():
    root = logging.getLogger()
    level = root.level
    yield
    logs.teardown_logging()
    root.setLevel(level)


def test_rank_0_writes_short_lines_to_stderr_and_dated_ones_to_train_log(tmp_path, python_logging, capsys):
    for text in ("first", "second"):  # a second session appends
        logs.setup_logging(tmp_path).open_file()
        logging.getLogger("trainer.train").info("%s line", text)
    logging.getLogger("trainer.train").warning("watch out")
    assert capsys.readouterr().err == "first line\nsecond line\nwarning: watch out\n"
    written = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in written] == [
        "INFO trainer.train: first line",
        "INFO trainer.train: second line",
        "WARNING trainer.train: watch out",
    ]


def test_nothing_is_in_the_folder_before_it_is_known_to_be_ours_and_nothing_said_is_lost(tmp_path, python_logging):
    handle = logs.setup_logging(tmp_path / "run")
    logging.getLogger("trainer").info("said early")
    assert not list(tmp_path.iterdir())
    handle.open_file()
    logging.getLogger("trainer").info("said later")
    written = (tmp_path / "run/train.log").read_text().splitlines()
    assert [line.split(": ")[1] for line in written] == ["said early", "said later"]


def test_other_ranks_say_only_warnings_and_who_they_are(tmp_path, python_logging, capsys):
    logs.setup_logging(tmp_path, rank=3)
    logging.getLogger("trainer").info("nobody needs this four times")
    logging.getLogger("trainer").error("no memory")
    assert capsys.readouterr().err == "error: [rank 3] no memory\n" and not list(tmp_path.iterdir())


def test_python_warnings_are_in_train_log_as_well(tmp_path, python_logging):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.setup_logging(tmp_path).open_file()
        warnings.warn("a thing is deprecated", UserWarning, stacklevel=1)
        logs.teardown_logging()
    assert "a thing is deprecated" in (tmp_path / "train.log").read_text()


def test_json_and_none_change_what_the_terminal_gets(tmp_path, python_logging, capsys):
    logs.setup_logging(tmp_path, log_format="json")
    logging.getLogger("trainer").info("hello")
    assert json.loads(capsys.readouterr().err) == {"level": "info", "logger": "trainer", "message": "hello"}
    logs.setup_logging(tmp_path, log_format="none")
    logging.getLogger("trainer").info("hello")
    logging.getLogger("trainer").warning("careful")
    assert capsys.readouterr().err == "warning: careful\n"


def test_a_train_log_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path, python_logging, capsys):
    (tmp_path / "train.log").mkdir()
    logs.setup_logging(tmp_path).open_file()
    for _ in range(3):
        logging.getLogger("trainer").info("on we go")
    said = capsys.readouterr().err
    assert said.count("train.log cannot be written") == 1 and said.count("on we go") == 3 and "Traceback" not in said


def test_importing_touches_no_logging_and_loads_nothing_heavy():
    done = run_python(
        """
        import sys, logging
        import trainer.logs, trainer.progress
        assert not logging.getLogger().handlers
        heavy = {"torch", "rich", "tensorboard", "wandb", "PIL"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    assert done.returncode == 0, done.stderr
