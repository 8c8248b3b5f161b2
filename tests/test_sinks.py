"""TensorBoard and wandb: each step once, also when the killed run had written beyond the restored update."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.test_logs import common, run_python, stats, write_run
from trainer.errors import ConfigError
from trainer.logs import RunLog

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
@pytest.mark.parametrize(
    "logdir, place",
    [("tb", "run/tb"), ("run/tb", "run/tb"), ("{}/run/tb", "run/tb"), ("../tb", "tb"), ("{}/tb", "tb")],
)
def test_a_relative_folder_is_one_in_the_folder_of_the_run(tmp_path, monkeypatch, logdir, place):
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), 3, cfg=common(tensorboard_logdir=logdir.format(tmp_path))).close()
    assert {path.parent.resolve() for path in tmp_path.rglob("events*")} == {tmp_path / place}


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
