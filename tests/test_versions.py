"""Checkpoints of every version of the format load, also where settings have come and gone since; the report says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import checkpoint_file
from checkpoint_file import FORMAT_VERSION, NotACheckpointError, open_local_checkpoint
from checkpoint_file.folder_contents import FOLDER_VERSION
from checkpoint_file.versions import MIGRATIONS, upgraded
from tests.fixtures.make_formats import UPDATES
from tests.resume.harness import config, read_log, run_to_status
from trainer.config import complete_config, to_plain
from trainer.start_report import changed_settings, with_real_ranks

FIXTURES = Path(__file__).resolve().parent / "fixtures"
RELEASED = [
    *(f"format_{n}.pt" for n in range(1, FORMAT_VERSION + 1)),
    *(f"folder_{n}" for n in range(1, FOLDER_VERSION + 1)),
]


@pytest.mark.parametrize("name", RELEASED)
def test_a_run_goes_on_from_a_checkpoint_of_every_released_version(tmp_path, name):
    assert checkpoint_file.verify_checkpoint(FIXTURES / name) == []
    wish = {"restore_file": str(FIXTURES / name)}
    run_to_status(config(tmp_path, optimization={"max_update": UPDATES + 2}, checkpoint=wish), 0)
    assert [line["num_updates"] for line in read_log(tmp_path, "train")] == [UPDATES + 1, UPDATES + 2]
    (resume,) = read_log(tmp_path, "resume")
    assert "position in the data" in resume["restored"] and not resume["fresh"] and not resume["dropped"]


def test_each_version_has_a_migration_to_the_next():
    assert len(MIGRATIONS) + 1 == FORMAT_VERSION


def test_migrations_run_from_the_version_of_the_file_to_the_newest():
    steps = (lambda s: {**s, "seen": [1]}, lambda s: {**s, "seen": [*s.get("seen", []), 2]})
    for version, seen in ((1, [1, 2]), (2, [2]), (3, None)):
        state = upgraded({"format_version": version, "model": {}}, "x.pt", steps)
        assert state["format_version"] == 3 and state.get("seen") == seen


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, "1", None, True])
def test_a_version_that_is_not_known_is_refused_with_the_way_out(tmp_path, version):
    torch.save({"format_version": version, "model": {}}, tmp_path / "x.pt")
    with pytest.raises(NotACheckpointError, match=f"format version {re.escape(repr(version))}.*install a newer"):
        open_local_checkpoint(tmp_path / "x.pt")


def test_settings_that_came_and_went_are_told_and_the_run_goes_on(tmp_path):
    with open_local_checkpoint(FIXTURES / "format_1.pt") as reader:
        state = reader.materialize(reader.skeleton)
    state["cfg"]["optimization"]["use_old_clipping"] = True  # exists no more
    del state["cfg"]["optimization"]["global_batch_size"]  # did not exist yet
    del state["cfg"]["ema"]
    state["cfg"]["checkpoint"]["patience"] = 3
    checkpoint_file.write_checkpoint_file(state, tmp_path / "old.pt")
    wish = {"restore_file": str(tmp_path / "old.pt")}
    run_to_status(config(tmp_path / "run", optimization={"max_update": UPDATES + 1}, checkpoint=wish), 0)
    (resume,) = read_log(tmp_path / "run", "resume")
    told = {row["key"]: (row["saved"], row["now"], row["from"]) for row in resume["changed"]}
    assert told["optimization.use_old_clipping"] == (True, "(absent)", "no longer a setting")
    assert told["optimization.global_batch_size"] == ("(absent)", 0, "new setting")
    assert told["ema.store_ema"] == ("(absent)", True, "new setting")
    assert told["checkpoint.patience"] == (3, -1, "default")
    assert told["optimization.max_update"] == (UPDATES, UPDATES + 1, "config")
    assert re.search(r"setting +saved +now +from\n", (tmp_path / "run" / "train.log").read_text())


def test_a_table_says_who_brought_each_value():
    saved = {
        "optimization": {"lr": 1.0, "clip_norm": 0},
        "lr_scheduler": {"_target_": "a", "warmup": 1},
        "model": {"dim": 1},
    }
    now = {"optimization": {"lr": 2.0, "clip_norm": 0}, "lr_scheduler": {"_target_": "b"}, "model": {"dim": 2}}
    typed = ["optimization.lr=2.0", "lr_scheduler=b", "+model={dim: 2}"]
    found = {row["key"]: row["from"] for row in changed_settings(saved, now, typed)}
    assert found == {
        "optimization.lr": "typed",
        "lr_scheduler._target_": "lr_scheduler=b",
        "lr_scheduler.warmup": "lr_scheduler=b",
        "model.dim": "typed",
    }
    assert changed_settings("no config at all", now, [])  # whatever a file holds


def test_the_row_of_the_ranks_tells_how_many_trained():
    key = "distributed_training.distributed_world_size"
    now = to_plain(complete_config({"optimization": {"max_update": 3}}))
    saved = {**now, "distributed_training": {**now["distributed_training"], "distributed_world_size": 2}}
    rows = changed_settings(saved, now, [])  # by our launcher, then by torchrun
    assert with_real_ranks(rows, 2, 2) == []
    assert with_real_ranks(rows, 2, 4) == [{"key": key, "saved": 2, "now": 4, "from": "launch"}]
    assert with_real_ranks(rows, 2, 1) == with_real_ranks(rows, None, 1) == rows
