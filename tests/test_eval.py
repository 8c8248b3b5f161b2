"""fairtrain-eval gives the numbers that a run logs, needs neither training data nor moments, and says what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoint_file import open_local_checkpoint, write_checkpoint_file
from tests.commands import fairtrain
from tests.resume import task
from tests.resume.harness import config, read_log, run_to_status
from tests.resume.task import Toy
from trainer.tools import eval as tool

TYPED = [
    "task._target_=tests.test_eval.WithoutTrainingData",
    "optimizer._target_=torch.optim.AdamW",
    *"common.seed=7 common.cpu=true common.num_threads=1 dataset.batch_size=4 dataset.batch_size_valid=4".split(),
]


class WithoutTrainingData(Toy):
    """The toy task on a machine that has its validation set only."""

    def build_dataset(self, split):
        assert split != "train", "the training data is not here"
        return super().build_dataset(split)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs, one validated with the trained weights, one with their average."""
    folder = tmp_path_factory.mktemp("runs")
    for name, averaged in (("trained", False), ("averaged", True)):
        saves = {"save_interval_updates": 6}
        data = {"batch_size": 4, "batch_size_valid": 4, "validate_interval": 0, "validate_interval_updates": 6}
        ema = {"store_ema": True, "ema_decay": 0.9, "ema_validate": averaged}
        cfg = config(folder / name, optimization={"max_update": 12}, checkpoint=saves, dataset=data, ema=ema)
        run_to_status(cfg, 0)
    return folder


def evaluated(capsys, *words) -> list[dict]:
    assert tool.main([*map(str, words), *TYPED, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def logged(run: Path) -> dict[int, float]:
    return {line["num_updates"]: (line["loss"], line["error"]) for line in read_log(run, "valid")}


@pytest.mark.parametrize("name, flag", [("trained", "--no-ema"), ("averaged", "--ema")])
def test_the_numbers_are_those_of_the_runs_validation_bit_by_bit(runs, capsys, name, flag):
    folder = runs / name / "checkpoints"
    rows = evaluated(capsys, *sorted(folder.glob("checkpoint_*_*.pt")), flag)
    found = {row["num_updates"]: (row["metrics"]["loss"], row["metrics"]["error"]) for row in rows}
    assert found == logged(runs / name) and len(found) == 2


def test_bare_weights_evaluate_as_their_checkpoint(runs, capsys, tmp_path):
    path = runs / "trained" / "checkpoints" / "checkpoint_last.pt"
    with open_local_checkpoint(path) as reader:
        saved = reader.materialize(reader.skeleton)
    write_checkpoint_file({**saved, "last_optimizer_state": None}, tmp_path / "slim.pt")
    rows = evaluated(capsys, path, tmp_path / "slim.pt")
    assert rows[0]["metrics"] == rows[1]["metrics"]


def test_several_checkpoints_give_a_table_in_a_process_of_its_own(runs, tmp_path):
    files = [str(path) for path in sorted((runs / "trained" / "checkpoints").glob("checkpoint_*_*.pt"))]
    done = fairtrain(*files, *TYPED, cwd=tmp_path, module="trainer.tools.eval")
    assert done.status == 0, done.output
    lines = done.output.strip().splitlines()[-3:]
    assert lines[0].split() == ["checkpoint", "update", "subset", "loss", "error"] and len(lines) == 3
    assert not (tmp_path / "outputs").exists(), "nothing is written"


def test_what_is_missing_is_said_before_anything_is_built(runs, capsys, tmp_path):
    path = runs / "trained" / "checkpoints" / "checkpoint_last.pt"
    torch.save({"first.weight": torch.zeros(8, task.FEATURES)}, tmp_path / "part.pt")
    for words, said in (
        (["gone.pt", *TYPED], "no such file"),
        (TYPED, "which checkpoint"),
        ([path], "no task is chosen"),
        ([path, *TYPED, "dataset.valid_subset=null"], "dataset.valid_subset"),
        ([tmp_path / "part.pt", *TYPED], "does not fit"),
    ):
        assert tool.main(list(map(str, words))) == 2, words
        assert said in capsys.readouterr().err, words
