"""Ranks that were started with other settings, other code, another model or other data: one error, on all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import checkpoint_file
import distributed_utils
from tests.dist.harness import run_ranks
from tests.resume.harness import config
from tests.resume.task import Toy
from trainer import run_folder
from trainer.config import complete_config
from trainer.errors import ConfigError
from trainer.train import main

NUM_RANKS = 3
ODD = 2  # the rank that differs


class Wider(Toy):
    def build_model(self):
        model = super().build_model()
        if torch.distributed.get_rank() == ODD:
            model.head = torch.nn.Linear(8, 2, dtype=torch.float64)
            model.extra = torch.nn.Linear(1, 1)
        return model


class Longer(Toy):
    def build_dataset(self, split):
        dataset = super().build_dataset(split)
        if torch.distributed.get_rank() == ODD:
            dataset.x, dataset.y = dataset.x[1:], dataset.y[1:]
        return dataset


class OtherTable(Toy):
    def build_dataset(self, split):
        dataset, rank = super().build_dataset(split), torch.distributed.get_rank()
        dataset.fingerprint = lambda: f"table {rank // ODD}"
        return dataset


def _started(folder: str, cls: type = Toy, **sections) -> str:
    """What `main` says when this rank is started like this."""
    cfg = config(Path(folder), **{"task": {"_target_": f"{cls.__module__}.{cls.__name__}"}, **sections})
    cfg = complete_config(cfg, cls)
    try:
        return str(main(cfg))
    except ConfigError as error:
        return str(error)


def _apart(folder: str) -> dict[str, str]:
    """What ranks say that do not see the same folder under one path; whether anything is left of the start."""
    is_odd, run_dir = torch.distributed.get_rank() == ODD, Path(folder) / "apart"
    here, own = os.getcwd(), Path(folder) / ("elsewhere" if is_odd else "here")
    own.mkdir(exist_ok=True)
    os.chdir(own)
    run_folder.SEEN_WITHIN_S = 0.1
    shared = {"distributed_training": {"use_sharded_state": True}, "checkpoint": {"save_dir": "checkpoints"}}
    told = {"folder": _started(str(run_dir), **shared)}
    torch.distributed.barrier()
    told["left"] = str(run_dir.exists() or Path("checkpoints").exists())
    if torch.distributed.get_rank() == 0:
        torch.save({"model": {}}, "a.pt")
    torch.distributed.barrier()
    try:
        checkpoint_file.open_checkpoint("a.pt", on_all_ranks=True, own_format=False)
    except checkpoint_file.CheckpointError as error:
        told["reading"] = str(error)
    os.chdir(here)
    return told


def _cases(folder: str) -> dict[str, str]:
    is_odd = torch.distributed.get_rank() == ODD
    lr = {"lr": 0.25 if is_odd else 0.5, "max_update": 1}
    return {
        "setting": _started(folder, optimization=lr),
        "absent": _started(folder, task={"_target_": "tests.resume.task.Toy", **({"noise": 0.5} if is_odd else {})}),
        "code": _started(folder, Longer if is_odd else Toy),
        "model": _started(folder, Wider),
        "length": _started(folder, Longer),
        "fingerprint": _started(folder, OtherTable),
        **_apart(folder),
        "alike": _started(folder, optimization={"max_update": 1}),
        "nested": distributed_utils.first_difference(lambda: {"a": 1, "b": None if is_odd else 2}),
    }


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return run_ranks(_cases, NUM_RANKS, str(tmp_path_factory.mktemp("alike")), timeout=60)


@pytest.mark.parametrize(
    "case, words",
    [
        ("setting", ["optimization.lr is 0.5 on rank 0 and 0.25 on rank 2", "${oc.env:NAME}"]),
        ("absent", ["task.noise is ", " on rank 0 and 0.5 on rank 2"]),
        ("code", ["task._target_ is 'tests.resume.task.Toy' on rank 0 and 'tests.dist.test_alike.Longer' on rank 2"]),
        ("model", ["head.weight is float32[2, 8] on rank 0 and float64[2, 8] on rank 2"]),
        ("length", ["the number of samples of train is ", " on rank 2", "the same data"]),
        (
            "folder",
            [
                "save_dir=checkpoints: rank 2 does not see the folder of rank 0",
                "leave out distributed_training.use_sharded_s",
            ],
        ),
        ("left", ["False"]),
        (
            "reading",
            ["a.pt: no such file", "Leave out checkpoint.load_checkpoint_on_all_dp_ranks=true", "found by rank 2"],
        ),
        ("fingerprint", ["the fingerprint of train is table 0 on rank 0 and table 1 on rank 2"]),
    ],
)
def test_a_rank_that_was_started_otherwise_is_one_error_on_all(cases, case, words):
    messages = {found[case] for found in cases}
    assert len(messages) == 1, messages
    for word in words:
        assert word in messages.copy().pop()


def test_ranks_that_are_alike_train(cases):
    assert [found["alike"] for found in cases] == ["0"] * NUM_RANKS
    assert [found["nested"] for found in cases] == [(ODD, "b", 2, None)] * NUM_RANKS
