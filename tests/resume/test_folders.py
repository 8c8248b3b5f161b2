"""A run whose checkpoints are folders, each rank's part in a file of its own, goes on as one that never stopped."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

import checkpoint_utils
from tests.dist.harness import run_ranks
from tests.resume.harness import assert_same_log, config, first_difference, load, run_to_status
from tests.resume.test_matrix import config_of, name_of

FOLDERS = {"distributed_training": {"use_sharded_state": True, "zero_sharding": "os"}}
INTERVALS = {"save_interval_updates": 5, "keep_interval_updates": 2}


def load_folder(run_dir, name: str = "checkpoint_last") -> dict:
    return checkpoint_utils.load_checkpoint_to_cpu(run_dir / "checkpoints" / name)


@pytest.mark.parametrize("on_all_ranks", [True, False])
def test_stopped_and_continued_in_new_processes_equals_never_stopped(tmp_path, on_all_ranks):
    checkpoint = {**INTERVALS, "load_checkpoint_on_all_dp_ranks": on_all_ranks}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_to_status(config(whole, checkpoint=checkpoint, **FOLDERS), 0, 2)
    run_to_status(config(stopped, checkpoint=checkpoint, **FOLDERS), 75, 2, stop="8:0:1:SIGTERM")
    run_to_status(config(stopped, checkpoint=checkpoint, **FOLDERS), 0, 2)
    assert_same_log(whole, stopped)
    assert first_difference(load_folder(whole), load_folder(stopped), "checkpoint_last") is None
    names = [sorted(name for name in os.listdir(run / "checkpoints")) for run in (whole, stopped)]
    assert names[0] == names[1]


def test_a_folder_of_two_ranks_is_continued_by_any_number_as_a_file_is(tmp_path):
    runs = {}
    for form in ("file", "folder"):
        runs[form] = tmp_path / form
        sections = FOLDERS if form == "folder" else {}
        run_to_status(config(runs[form], checkpoint=INTERVALS, **sections), 75, 2, stop="8:0:1:SIGTERM")
    for world_size in (3, 1):
        for form, run_dir in runs.items():  # the second session changes the form: file to folder, folder to file
            sections = FOLDERS if (form == "file") == (world_size == 3) else {}
            stop = {"stop": "14:0:0:SIGTERM"} if world_size == 3 else {}
            run_to_status(config(run_dir, checkpoint=INTERVALS, **sections), 75 if stop else 0, world_size, **stop)
    one, other = load(runs["file"]), load_folder(runs["folder"])
    difference = first_difference({**one, "cfg": None}, {**other, "cfg": None}, "checkpoint_last")
    assert difference is None, difference
    assert torch.equal(one["model"]["head.weight"], other["model"]["head.weight"])


@pytest.mark.parametrize("keys", ["model", "top"])
def test_a_run_begins_from_the_model_in_a_folder_of_another_program(tmp_path, keys):
    import torch.distributed.checkpoint as dcp

    from tests.resume.task import Net

    model = {name: torch.randn_like(t) for name, t in Net().state_dict().items()}
    model["tied.weight"] = model["second.weight"]
    state = {"model": model, "optimizer": {"lr": 0.1}} if keys == "model" else {**model, "train_state": {"step": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    cfg = config(
        tmp_path / "run",
        checkpoint={"finetune_from_model": str(tmp_path / "plain"), "save_interval_updates": 1},
        task={"_target_": "tests.resume.task.ModelOnly", "follow_mean": False},
        optimization={"max_update": 1, "lr": 1e-30},
        optimizer={"_target_": "torch.optim.SGD"},
        **FOLDERS,
    )
    run_to_status(cfg, 0, 2)
    assert first_difference(load_folder(tmp_path / "run")["model"], model, "model") is None


def test_a_run_is_resumed_from_the_config_in_its_folders(tmp_path):
    from trainer.run_folder import saved_config

    run_to_status(config(tmp_path, **FOLDERS), 75, 1, stop="3:0:0:SIGTERM")
    shutil.rmtree(tmp_path / ".hydra")
    cfg, source = saved_config(str(tmp_path))
    assert cfg["distributed_training"]["use_sharded_state"] is True and source.endswith("checkpoint_last")


def save_in_both_forms(folder, arrangement, source: str | None = None) -> None:
    """Train a little, or load the folder `source` in both ways; then save a file and a folder."""
    from tests.resume.task import Toy

    ways = (True, False) if source else (True,)
    for on_all_ranks in ways:
        trainer = Toy(config_of(folder, arrangement, load_checkpoint_on_all_dp_ranks=on_all_ranks))
        trainer.use_sharded_state = True
        itr = trainer.get_train_iterator(1)
        if source:
            itr.load_state_dict(trainer.load_checkpoint(str(folder / source))["train_iterator"])
        else:
            for _, samples in zip(range(3), itr.next_epoch_itr()):
                trainer.train_step(samples)
        for suffix in ("", ".pt"):
            name = f"{name_of(arrangement)}_{on_all_ranks}{suffix}"
            trainer.save_checkpoint(str(folder / name), {"train_iterator": itr.state_dict()})


def test_a_folder_of_any_arrangement_holds_what_its_file_holds_and_any_other_loads_it(tmp_path):
    def contents(name: str) -> dict:
        state = checkpoint_utils.load_checkpoint_to_cpu(tmp_path / name)
        del state["cfg"], state["extra_state"]["ranks"], state["extra_state"]["previous_training_time"]
        return state

    run_ranks(save_in_both_forms, 2, tmp_path, ("fsdp", 2), timeout=120)
    assert sorted(os.listdir(tmp_path / "fsdp_2_True")) == [".metadata", "__0_0.distcp", "__1_0.distcp", "fairtrain.pt"]
    expected = contents("fsdp_2_True.pt")
    assert first_difference(contents("fsdp_2_True"), expected) is None
    for arrangement, source in ((("zero", 3), "fsdp_2_True"), (("ddp", 1), "zero_3_False")):
        run_ranks(save_in_both_forms, arrangement[1], tmp_path, arrangement, source, timeout=120)
        for way in (True, False):
            assert first_difference(contents(f"{name_of(arrangement)}_{way}"), expected) is None
