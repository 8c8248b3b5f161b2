"""A run whose ranks hold rows of the model: stopped, continued, and taken up by every other arrangement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.harness import run_ranks
from tests.dist.test_fully_sharded import CPU, assembled, build, described, trained
from tests.resume.harness import assert_same_run, config, first_difference, run_to_status

SHARDED = {"ddp_backend": "fully_sharded"}


@pytest.mark.parametrize(
    "ranks, on_all_ranks, asynchronously",
    [
        (3, True, False),
        pytest.param(2, False, True, marks=pytest.mark.slow),
        pytest.param(4, False, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_equals_the_one_that_was_not(tmp_path, ranks, on_all_ranks, asynchronously):
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    sections = {
        "checkpoint": {
            "load_checkpoint_on_all_dp_ranks": on_all_ranks,
            "write_checkpoints_asynchronously": asynchronously,
            "save_interval_updates": 2,
        },
        "optimization": {"max_update": 9, "update_freq": 2, "clip_norm": 1.0, "lr": 0.01},
        "ema": {"store_ema": True, "ema_decay": 0.9, "ema_validate": True},
        "dataset": {"batch_size": 4, "batch_size_valid": 4, "validate_interval_updates": 4},
        "distributed_training": SHARDED,
    }
    run_to_status(config(through, **sections), 0, ranks)
    run_to_status(config(stopped, **sections), 75, ranks, stop="5:1:1:SIGTERM")
    run_to_status(config(stopped, **sections), 0, ranks)
    assert_same_run(through, stopped)


# ---------------------------------------------------------------------------------------------------- other arrangements

KEYS = ("model", "criterion", "last_optimizer_state", "task_state")


def _save(folder: str) -> list:
    """Files of sharded and of data parallel ranks, and what the sharded ranks hold."""
    trainer = build(folder, False)
    trained(trainer)
    trainer.save_checkpoint(f"{folder}/plain.pt")
    trainer = build(folder, True)
    trained(trainer)
    trainer.save_checkpoint(f"{folder}/sharded.pt")
    state = described(trainer.state_dict())
    trainer = build(folder, True, distributed={"use_sharded_state": True})
    trained(trainer)
    trainer.save_checkpoint(f"{folder}/folder.pt")
    return state


def _load(folder: str) -> dict:
    """What each arrangement holds after loading each file, having begun with other weights."""
    found = {}
    for sharded in (True, False):
        for on_all_ranks in (True, False):
            reads = {"load_checkpoint_on_all_dp_ranks": on_all_ranks}
            trainer = build(folder, sharded, checkpoint=reads, common={**CPU, "seed": 8})
            for name in ("sharded", "plain", "folder"):
                trainer.load_checkpoint(f"{folder}/{name}.pt")
                found[sharded, on_all_ranks, name] = described(trainer.state_dict())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, list]:
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(_save, 2, folder)


def read(folder: str, name: str) -> dict:
    return torch.load(Path(folder, f"{name}.pt"), weights_only=True)


def same(state: dict, file: dict) -> None:
    for key in KEYS:
        assert first_difference(state[key], file[key], key) is None
    assert first_difference(state["extra_state"]["ema"], file["extra_state"]["ema"], "ema") is None
    assert state["optimizer_history"] == file["optimizer_history"]
    assert state["extra_state"]["metrics"] == file["extra_state"]["metrics"]


def test_the_file_holds_whole_tensors_as_one_process_saves_them(saved):
    folder, ranks = saved
    file, plain = read(folder, "sharded"), read(folder, "plain")
    same(assembled(ranks), file)
    assert list(file) == list(plain) and list(file["model"]) == list(plain["model"])
    for name, tensor in plain["model"].items():
        assert (tensor.shape, tensor.dtype) == (file["model"][name].shape, file["model"][name].dtype)
    assert file["model"]["tied.weight"].data_ptr() == file["model"]["second.weight"].data_ptr()
    groups, others = (one["last_optimizer_state"]["param_groups"] for one in (file, plain))
    assert [group["param_names"] for group in groups] == [group["param_names"] for group in others]


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_any_arrangement_takes_it_up_by_both_ways_of_reading(saved, ranks):
    folder, _ = saved
    results = run_ranks(_load, ranks, folder)
    for kind in results[0]:
        file = read(folder, "plain" if kind[2] == "plain" else "sharded")  # the folder holds what the file holds
        same(assembled([result[kind] for result in results]), file)


def test_one_process_takes_it_up(saved):
    folder, _ = saved
    trainer = build(folder, False)
    trainer.load_checkpoint(f"{folder}/sharded.pt")
    same(described(trainer.state_dict()), read(folder, "sharded"))
