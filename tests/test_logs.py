"""log.jsonl, TensorBoard, wandb and train.log: each step once, whatever happened to the run or to the disk."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import signal
import struct
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

from trainer import logs
from trainer.errors import ConfigError
from trainer.logs import RunLog, read_log

PLAIN = SimpleNamespace(log_interval=1, tensorboard_logdir=None, wandb_project=None)


def common(**fields):
    return SimpleNamespace(**{**vars(PLAIN), **fields})


def stats(num_updates, **fields):
    return {"epoch": 1 + num_updates // 10, "num_updates": num_updates, "loss": 1 / (1 + num_updates), "lr": 1e-4, **fields}


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
            log.event("checkpoint", num_updates=num_updates, path=f"checkpoint_1_{num_updates}.pt", blocked_s=0.1, bytes=9)
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
    assert read["d"] == str(tmp_path) and read["e"] == [{"f": "-inf"}] and read["g"] == [1.0, "nan"] and read["h"] == "inf"


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
    many = [stats(n, ppl=1.1 * n, accuracy=0.1 / n, gnorm=0.2 / n, sample_size=64.0, wall=0.3 * n) for n in range(1, 4001)]
    costs = []
    for begin in range(0, 4000, 400):
        before = time.perf_counter()
        for one in many[begin : begin + 400]:
            log.train(one)
        costs.append((time.perf_counter() - before) / 400)
    assert min(costs) < 25e-6  # the best of ten: others may be using the machine


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
    reached = 0
    for start, length, torn in sessions:
        reached = min(start, reached) + length
        write_run(run_dir, reached, start=reached - length, valid_every=3)
        with open(run_dir / "log.jsonl", "ab") as file:
            file.write(b'{"event": "train", "num_updates": 99, "loss": 0.12'[:torn])
    log = RunLog(run_dir, PLAIN)
    log.event("end")
    log.close()
    numbered = [key for key in keys(run_dir) if key[0] not in ("resume", "end")]
    assert len(set(numbered)) == len(numbered)
    assert [key[1] for key in numbered if key[0] == "train"] == list(range(1, reached + 1))
    assert [key[0] for key in keys(run_dir)].count("resume") == sum(line["event"] == "resume" for line in lines(run_dir))


def test_resume_lines_and_lines_without_a_number_stay_when_a_run_goes_back_behind_them(tmp_path):
    write_run(tmp_path, 10)
    write_run(tmp_path, 20, start=10)
    log = RunLog(tmp_path, PLAIN)
    log.event("note", text="checkpoint_last.pt is damaged")
    log.event("resume", num_updates=15)
    log.cut_after(5)
    log.close()
    assert keys(tmp_path)[-4:] == [("checkpoint", 5, None), ("resume", None, None), ("note", None, None), ("resume", 15, None)]
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
    assert keys(tmp_path)[-4:] == [("train", 10, None), ("valid", 10, "valid"), ("checkpoint", 10, None), ("valid", 10, "test")]


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
    monkeypatch.setattr(logs, "_MAX_PENDING_BYTES", 500)
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


# --- TensorBoard -----------------------------------------------------------------------------------------------------

tensorboard = pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="tensorboard is not installed")


def scalars(folder):
    """What TensorBoard shows: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def raw_steps(folder, tag):
    """Each step that stands in the files, whether or not a reader would purge it."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for path in sorted(folder.iterdir()) for event in EventFileLoader(str(path)).Load()]
    return [event.step for event in events for value in event.summary.value if value.tag == tag]


@tensorboard
def test_tensorboard_shows_each_step_once_after_kills_beyond_the_restored_update(tmp_path):
    cfg = common(tensorboard_logdir="tb")
    write_run(tmp_path, 17, cfg=cfg)
    write_run(tmp_path, 23, start=10, cfg=cfg)  # the first session had been at 17
    write_run(tmp_path, 30, start=20, cfg=cfg).close()
    assert raw_steps(tmp_path / "tb", "train/loss") == list(range(1, 31))
    shown = scalars(tmp_path / "tb")
    assert [step for step, _ in shown["train/loss"]] == list(range(1, 31))
    assert [step for step, _ in shown["valid/accuracy"]] == [5, 10, 15, 20, 25, 30]
    assert shown["train/loss"][11][1] == pytest.approx(1 / 13)


@tensorboard
def test_tensorboard_that_was_watching_forgets_the_steps_that_were_cut(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = common(tensorboard_logdir="tb")
    write_run(tmp_path, 17, cfg=cfg)
    watcher = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0})
    watcher.Reload()
    assert len(watcher.Scalars("train/loss")) == 17
    write_run(tmp_path, 20, start=10, cfg=cfg).close()
    watcher.Reload()
    assert [event.step for event in watcher.Scalars("train/loss")] == list(range(1, 21))


@tensorboard
def test_a_torn_event_file_and_one_wholly_beyond_the_cut_are_mended(tmp_path):
    cfg = common(tensorboard_logdir="tb")
    write_run(tmp_path, 8, cfg=cfg)
    write_run(tmp_path, 16, start=8, cfg=cfg)
    first, second = sorted((tmp_path / "tb").iterdir())
    with open(first, "rb+") as file:
        file.truncate(first.stat().st_size - 3)  # within update 8
    write_run(tmp_path, 12, start=7, cfg=cfg).close()
    assert not second.exists()
    assert raw_steps(tmp_path / "tb", "train/loss") == list(range(1, 13))


@tensorboard
def test_the_event_file_of_a_session_stands_behind_those_before_whatever_the_clock_says(tmp_path, monkeypatch):
    cfg = common(tensorboard_logdir="tb")
    write_run(tmp_path, 3, cfg=cfg)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    write_run(tmp_path, 6, start=3, cfg=cfg).close()
    assert raw_steps(tmp_path / "tb", "train/loss") == [1, 2, 3, 4, 5, 6]


@tensorboard
def test_a_run_never_cuts_event_files_of_others(tmp_path):
    shared = tmp_path / "shared"
    write_run(tmp_path / "a", 9, cfg=common(tensorboard_logdir=str(shared)))
    before = {path: path.read_bytes() for path in shared.iterdir()}
    write_run(tmp_path / "b", 2, cfg=common(tensorboard_logdir=str(shared))).close()
    assert before and all(path.read_bytes() == content for path, content in before.items())


@tensorboard
def test_scores_of_a_subset_called_train_do_not_mix_with_the_training(tmp_path):
    log = RunLog(tmp_path, common(tensorboard_logdir="tb"))
    log.cut_after(0)
    log.train(stats(1, loss=torch.tensor(0.25)))
    log.valid("train", stats(1, loss=0.5, note="text"))
    log.close()
    shown = scalars(tmp_path / "tb")
    assert shown["train/loss"] == [(1, 0.25)] and shown["valid-train/loss"] == [(1, 0.5)]


@tensorboard
def test_a_validation_before_the_first_update_stays_at_a_fresh_start(tmp_path):
    cfg = common(tensorboard_logdir="tb")
    for _ in range(2):
        log = RunLog(tmp_path, cfg)
        log.cut_after(0)
        log.valid("valid", stats(0))
        log.train(stats(1))
        log.flush()
    assert raw_steps(tmp_path / "tb", "valid/loss") == [0] and raw_steps(tmp_path / "tb", "train/loss") == [1]


def test_without_tensorboard_the_error_names_the_extra_and_the_way_to_turn_it_off(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(ConfigError, match=r"fairtrain\[tensorboard\].*common.tensorboard_logdir=null"):
        RunLog(tmp_path, common(tensorboard_logdir="tb"))


# --- wandb -----------------------------------------------------------------------------------------------------------


def test_without_wandb_the_error_names_the_extra_and_the_way_to_turn_it_off(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"fairtrain\[wandb\].*common.wandb_project=null"):
        RunLog(tmp_path, common(wandb_project="p"))


def wandb_records(data):
    """The records of an offline run: LevelDB's log format (blocks of 32 KiB, pieces with a header of 7 bytes)."""
    from wandb.proto import wandb_internal_pb2

    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no header fits: the rest of the block is padding
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed")
def test_a_resumed_run_is_the_same_wandb_run_and_sends_each_step_once(tmp_path, monkeypatch):
    code = """
        import sys
        from types import SimpleNamespace
        from trainer.logs import RunLog
        run_dir, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        log = RunLog(run_dir, SimpleNamespace(wandb_project="fair"), run_id="abc123", config={"lr": 0.1})
        log.cut_after(first - 1)
        for n in range(first, last + 1):
            log.train({"epoch": 1, "num_updates": n, "loss": 1 / n})
        log.valid("valid", {"epoch": 1, "num_updates": last, "accuracy": 0.5})
        log.close()
        """
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for first, last in ((1, 6), (7, 9)):
        done = run_python(code, tmp_path, first, last)
        assert done.returncode == 0, done.stderr
    steps, ids = [], []
    for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path.read_bytes()):
            if record.WhichOneof("record_type") == "run":
                ids.append(record.run.run_id)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in items:
                steps.append((int(items["_step"]), json.loads(items["train/loss"])))
    assert set(ids) == {"abc123"} and steps == [(n, 1 / n) for n in range(1, 10)]


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
        logs.setup_logging(tmp_path)
        logging.getLogger("trainer.train").info("%s line", text)
    logging.getLogger("trainer.train").warning("watch out")
    assert capsys.readouterr().err == "first line\nsecond line\nwarning: watch out\n"
    written = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in written] == [
        "INFO trainer.train: first line",
        "INFO trainer.train: second line",
        "WARNING trainer.train: watch out",
    ]


def test_other_ranks_say_only_warnings_and_who_they_are(tmp_path, python_logging, capsys):
    logs.setup_logging(tmp_path, rank=3)
    logging.getLogger("trainer").info("nobody needs this four times")
    logging.getLogger("trainer").error("no memory")
    assert capsys.readouterr().err == "error: [rank 3] no memory\n" and not list(tmp_path.iterdir())


def test_python_warnings_are_in_train_log_as_well(tmp_path, python_logging):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.setup_logging(tmp_path)
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
    logs.setup_logging(tmp_path)
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
