"""Saves that are written while training goes on: the same files, folders, names and numbers as those that are waited
for. The tests run in both forms; FOLDER has sharded moments, so that ranks have shares that only they hold.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import checkpoint_utils
from tests.dist.harness import Outcome, run_ranks_to_any_end
from tests.resume.harness import assert_same_log, config, first_difference, read_log, run_to_status

RANKS = 2
FILE, FOLDER = {}, {"use_sharded_state": True, "zero_sharding": "os"}


def make_config(run_dir: Path, form: dict, asynchronous: bool = True, **checkpoint) -> dict:
    return config(
        run_dir,
        distributed_training=form,
        dataset={"batch_size": 4, "batch_size_valid": 4, "validate_interval_updates": 5},
        optimization={"max_update": 12, "lr": 0.01, "clip_norm": 1.0},
        checkpoint={
            "save_interval_updates": 4,
            "keep_interval_updates": 2,
            "keep_best_checkpoints": 2,
            "write_checkpoints_asynchronously": asynchronous,
            **checkpoint,
        },
    )


def patched_session(cfg: dict, what: str, save: int, rank: int) -> int:
    """A session in which the thread of `rank` that writes its `save`-th share hangs or fails (0: no share does)."""
    from checkpoint_file.writing import ShareWriter
    from trainer.config import complete_config
    from trainer.train import main

    original, count = ShareWriter._write_rows, [0]

    def write_rows(self, *supply) -> None:
        if threading.current_thread().name == "checkpoint writer" and int(os.environ["RANK"]) == rank:
            count[0] += 1
            if count[0] == save or save < 0:
                if what == "fail":
                    raise OSError(28, "No space left on device")
                threading.Event().wait()
        original(self, *supply)

    ShareWriter._write_rows = write_rows
    return main(complete_config(cfg))


def patched(cfg: dict, what: str, save: int, rank: int, stop: str = ":") -> list[Outcome]:
    return run_ranks_to_any_end(patched_session, RANKS, cfg, what, save, rank, timeout=120, env={"TEST_STOP": stop})


def load(run_dir: Path, name: str) -> dict:
    return checkpoint_utils.load_checkpoint_to_cpu(run_dir / "checkpoints" / name)


def content(run_dir: Path) -> dict[str, int]:
    """The update of each checkpoint, by its name without the suffix."""
    names = sorted(os.listdir(run_dir / "checkpoints"))
    found = {name: load(run_dir, name)["optimizer_history"][-1]["num_updates"] for name in names if name[0] != "."}
    return {name.removesuffix(".pt"): update for name, update in found.items()}


def names_of(run_dir: Path) -> list[str]:
    return sorted(os.listdir(run_dir / "checkpoints"))


def assert_same_run(one: Path, other: Path) -> None:
    assert_same_log(one, other)
    assert names_of(one) == names_of(other)
    last = next(name for name in names_of(one) if name.startswith("checkpoint_last"))
    assert first_difference(load(one, last), load(other, last), last) is None


def litter(run_dir: Path) -> list[str]:
    """What a save leaves when it does not come to its end."""
    linked = [os.readlink(path) for path in (run_dir / "checkpoints").iterdir() if path.is_symlink()]
    return [name for name in names_of(run_dir) if name[0] == "." and name not in linked]


@pytest.fixture(scope="module", params=[FILE, FOLDER], ids=["file", "folder"])
def form(request) -> dict:
    return request.param


@pytest.fixture(scope="module")
def through(tmp_path_factory, form) -> Path:
    """The asynchronous run that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("through")
    run_to_status(make_config(run_dir, form), 0, RANKS)
    return run_dir


def test_names_files_and_log_are_those_of_saves_that_are_waited_for(tmp_path, form, through):
    run_to_status(make_config(tmp_path, form, asynchronous=False), 0, RANKS)
    for event in ("train", "valid", "epoch"):
        assert first_difference(read_log(tmp_path, event), read_log(through, event), event) is None
    assert content(tmp_path) == content(through)
    for name in (name for name in names_of(through) if name[0] != "."):
        one, other = load(tmp_path, name), load(through, name)
        assert one.pop("cfg") != other.pop("cfg")
        assert first_difference(one, other, name) is None
    waited, background = (read_log(run_dir, "checkpoint") for run_dir in (tmp_path, through))
    assert [line["num_updates"] for line in waited] == [line["num_updates"] for line in background]
    assert [[Path(p).name for p in line["paths"]] for line in waited] == [
        [Path(p).name for p in line["paths"]] for line in background
    ]
    assert all(line["blocked_s"] > 0 and line["bytes"] > 1000 for line in background)


def test_a_kill_in_the_middle_of_a_write_leaves_the_save_before(tmp_path, form, through):
    # [P1] [P2]
    patched(make_config(tmp_path, form), "hang", 2, rank=1, stop="7:0:0:SIGKILL")
    assert content(tmp_path)["checkpoint_last"] == 4  # that of update 5 was still being written at update 7
    run_to_status(make_config(tmp_path, form), 0, RANKS)
    assert_same_run(through, tmp_path)
    assert litter(tmp_path) == litter(through) == []


def test_a_stop_waits_for_the_write(tmp_path, form, through):
    cfg = make_config(tmp_path, form)
    run_to_status(cfg, 75, RANKS, stop="9:0:1:SIGTERM")
    assert content(tmp_path)["checkpoint_last"] == 9
    run_to_status(cfg, 0, RANKS)
    assert_same_run(through, tmp_path)


def test_a_failed_write_is_told_and_does_not_end_healthy_training(tmp_path, form, through):  # [P5] [N6]
    outcomes = patched(make_config(tmp_path, form), "fail", 1, rank=1)
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes
    for event in ("train", "valid"):
        assert first_difference(read_log(through, event), read_log(tmp_path, event), event) is None
    saved = [line["num_updates"] for line in read_log(tmp_path, "checkpoint")]
    expected = [line["num_updates"] for line in read_log(through, "checkpoint")]
    assert saved == expected[1:] and litter(tmp_path) == []
    told = (tmp_path / "train.log").read_text()
    assert "the save of update 4 FAILED" in told and "No space left on device" in told and "found by rank 1" in told
    assert str(tmp_path / "checkpoints" / "checkpoint_1_4") in told


def test_failures_in_a_row_end_the_run_on_all_ranks(tmp_path, form):  # [P5]
    outcomes = patched(make_config(tmp_path, form, max_failed_saves=2), "fail", -1, rank=0)
    for outcome in outcomes:
        assert "CheckpointWriteError" in outcome.error and "No space left on device" in outcome.error
    assert [line["num_updates"] for line in read_log(tmp_path, "train")][-1] in (6, 7)  # saves of 4 and 5 have failed
    assert os.listdir(tmp_path / "checkpoints") == []


def poisoned_session(cfg: dict) -> int:
    """A session whose loss is NaN at update 6, on all ranks alike, one update after a save was begun."""
    from tests.resume.task import Toy
    from trainer.config import complete_config
    from trainer.train import main

    original = Toy.compute_loss

    def compute_loss(self, sample):
        loss, size, outputs = original(self, sample)
        bad = self.model.training and self.get_num_updates() == 5
        return (loss * float("nan") if bad else loss), size, outputs

    Toy.compute_loss = compute_loss
    return main(complete_config(cfg))


def test_an_error_that_all_ranks_meet_waits_for_the_write(tmp_path, form):  # [P2]
    outcomes = run_ranks_to_any_end(poisoned_session, RANKS, make_config(tmp_path, form), timeout=120)
    assert all("NonFiniteError" in outcome.error for outcome in outcomes)
    assert content(tmp_path)["checkpoint_last"] == 5
    last = next(name for name in names_of(tmp_path) if name.startswith("checkpoint_last"))
    assert not load(tmp_path, last)["model"]["head.bias"].isnan().any()
