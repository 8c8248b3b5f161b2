"""Bad input: one sentence that names what is wrong and what to type, the right status, nothing written or lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.commands import fairtrain
from tests.resume.harness import read_log

TASK = [
    "+task._target_=tests.resume.task.Toy",
    "task_name=toy",
    "run_dir=run",
    "common.cpu=true",
    "common.num_threads=1",
    "dataset.batch_size=4",
    "optimization.lr=0.01",
]
LIMIT = "optimization.max_update=3"


def toy(cwd: Path, *argv: str, limit: str = LIMIT, **kwargs):
    return fairtrain(*TASK, *([limit] if limit else []), *argv, cwd=cwd, **kwargs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a finished run of three updates."""
    cwd = tmp_path_factory.mktemp("trained")
    result = toy(cwd)
    assert result.status == 0, result.output
    return cwd


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock" and ".output" not in p.name}


REFUSED = {
    "no limit": (["optimization.max_update=0"], ["optimization.max_update", "optimization.max_epoch"]),
    "a negative limit": (["optimization.max_update=-1"], ["optimization.max_update"]),
    "no horizon": (
        ["optimization.max_update=0", "optimization.max_epoch=1", "lr_scheduler=cosine"],
        ["lr_scheduler.total_num_update"],
    ),
    "a mistyped key": (["optimization.max_updaet=5"], ["max_updaet", "max_update"]),
    "a mistyped field of the task": (["+task.num_sample=5"], ["num_sample", "num_samples"]),
    "a wrong type": (["dataset.batch_size=many"], ["dataset.batch_size", "many"]),
    "both half precisions": (["common.fp16=true", "common.bf16=true"], ["common.fp16", "common.bf16"]),
    "an empty dataset": (["+task.num_samples=0"], ["empty"]),
    "a batch larger than the dataset": (["dataset.batch_size=54"], ["dataset.batch_size=53"]),
    "an epoch without updates": (
        ["optimization.update_freq=20", "optimization.skip_remainder_batch=true"],
        ["optimization.skip_remainder_batch"],
    ),
    "a list that is too short": (["optimizer.betas=[0.9]"], ["optimizer.betas", "expected 2 values"]),
    "an unknown metric": (["checkpoint.best_checkpoint_metric=los"], ["checkpoint.best_checkpoint_metric", "loss"]),
    "a folder that cannot be made": (["run_dir=/proc/run"], ["run_dir", "/proc/run"]),
    "no folder for checkpoints": (["checkpoint.save_dir=/proc/x"], ["checkpoint.save_dir", "/proc/x"]),
    "a file for checkpoints": (["checkpoint.save_dir=text.pt"], ["checkpoint.save_dir", "text.pt"]),
    "a missing checkpoint": (["checkpoint.restore_file=nowhere.pt"], ["nowhere.pt"]),
    "a folder that is no checkpoint": (["checkpoint.restore_file=folder"], ["folder"]),
    "an empty checkpoint": (["checkpoint.restore_file=empty.pt"], ["empty.pt"]),
    "a truncated checkpoint": (["checkpoint.restore_file=truncated.pt"], ["truncated.pt"]),
    "text": (["checkpoint.restore_file=text.pt"], ["text.pt"]),
    "another architecture": (["checkpoint.restore_file=other.pt"], ["other.pt", "first.weight"]),
    "restore and finetune": (
        ["checkpoint.restore_file=a.pt", "checkpoint.finetune_from_model=b.pt"],
        ["checkpoint.restore_file", "checkpoint.finetune_from_model"],
    ),
    "several learning rates": (["optimization.lr=[0.1,0.2]"], ["optimization.lr"]),
    "an unknown optimizer field": (["+optimizer.weight_dekay=0.1"], ["weight_dekay", "weight_decay"]),
    "a target that is no trainer": (["task._target_=torch.nn.Linear"], ["linear.Linear", "Trainer"]),
    "a target that does not exist": (["task._target_=nowhere.Task"], ["nowhere"]),
}


@pytest.mark.parametrize("argv, words", REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_with_a_sentence_and_leaves_nothing(tmp_path, trained, argv, words):
    checkpoint = trained / "run" / "checkpoints" / "checkpoint_last.pt"
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("no checkpoint\n")
    (tmp_path / "truncated.pt").write_bytes(checkpoint.read_bytes()[:-500])
    state = torch.load(checkpoint, weights_only=True)
    state["model"] = {"encoder." + name: tensor for name, tensor in state["model"].items()}
    torch.save(state, tmp_path / "other.pt")
    before = everything_in(tmp_path)
    result = toy(tmp_path, *argv)
    assert result.status == 2, result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output, result.output
    assert everything_in(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_bad_input_to_a_run_that_exists_leaves_it_as_it_was(tmp_path, trained):
    shutil.copytree(trained / "run", tmp_path / "run")
    before = everything_in(tmp_path)
    for argv in (["optimization.max_updaet=9"], ["checkpoint.restore_file=nowhere.pt"], ["checkpoint.best_checkpoint_metric=x"]):
        result = toy(tmp_path, "optimization.max_update=9", *argv)
        assert result.status == 2, result.output
        assert everything_in(tmp_path) == before


def test_more_ranks_than_samples_is_refused(tmp_path):
    result = toy(tmp_path, "+task.num_samples=4", "distributed_training.distributed_world_size=5", timeout=120)
    assert result.status == 2, result.output
    assert "5 ranks" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dataset_that_raises_names_the_sample(tmp_path, ranks):
    (tmp_path / "broken.py").write_text(BROKEN_DATASET)
    result = toy(tmp_path, "task._target_=broken.Broken", f"distributed_training.distributed_world_size={ranks}", limit="optimization.max_epoch=1", timeout=120)
    assert result.status == 1, result.output
    assert "sample 17" in result.output and "cannot decode" in result.output
    assert result.output.count("cannot decode seventeen") <= 2, "the error is told once, its traceback may repeat it"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_nan_is_named_and_the_last_good_checkpoint_stays(tmp_path, ranks):
    (tmp_path / "broken.py").write_text(BROKEN_LOSS)
    result = toy(
        tmp_path,
        "task._target_=broken.Broken",
        "checkpoint.save_interval_updates=2",
        f"distributed_training.distributed_world_size={ranks}",
        limit="optimization.max_update=9",
        timeout=120,
    )
    assert result.status == 1, result.output
    assert "the loss (nan)" in result.output and "update 4" in result.output and "micro-batch 0" in result.output
    assert "samples of that batch" in result.output and "Traceback" not in result.output
    state = torch.load(tmp_path / "run" / "checkpoints" / "checkpoint_last.pt", weights_only=True)
    assert state["optimizer_history"][-1]["num_updates"] == 2
    assert read_log(tmp_path / "run", "train")[-1]["num_updates"] == 3


def test_a_gradient_that_is_nan_names_its_parameter(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN_GRADIENT)
    result = toy(tmp_path, "task._target_=broken.Broken", limit="optimization.max_update=9")
    assert result.status == 1, result.output
    assert "the gradient of" in result.output and "update 2" in result.output and "Traceback" not in result.output


BROKEN_DATASET = """
from tests.resume.task import Toy, NoisyRows

class Rows(NoisyRows):
    def __getitem__(self, index):
        if index == 17:
            raise ValueError("cannot decode seventeen")
        return super().__getitem__(index)

class Broken(Toy):
    def build_dataset(self, split):
        return Rows(53, 1, 0.1)
"""

BROKEN_LOSS = """
from tests.resume.task import Toy

class Broken(Toy):
    def compute_loss(self, sample):
        loss, sample_size, output = super().compute_loss(sample)
        if self.model.training and self.get_num_updates() == 3 and self.data_parallel_rank == self.data_parallel_world_size - 1:
            loss = loss * float("nan")
        return loss, sample_size, output
"""

BROKEN_GRADIENT = """
import torch
from tests.resume.task import Toy

class Broken(Toy):
    def compute_loss(self, sample):
        loss, sample_size, output = super().compute_loss(sample)
        if self.model.training and self.get_num_updates() == 1:
            loss = loss + 0 * torch.sqrt(self.model.scale - self.model.scale.detach())
        return loss, sample_size, output
"""


EARLY_STOPS = """
import os, signal
from tests.resume.task import Toy

class Stopped(Toy):
    def build_dataset(self, split):
        if split == "valid" and os.environ["STOP_IN"] == "build_dataset":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().build_dataset(split)

    def upgrade_state_dict(self, state):
        if os.environ["STOP_IN"] == "upgrade_state_dict":
            os.kill(os.getpid(), signal.SIGINT)
        return state
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place, name", [("build_dataset", "SIGTERM"), ("upgrade_state_dict", "SIGINT")])
def test_a_stop_during_start_up_is_one_sentence_and_75_and_trains_nothing(trained, tmp_path, place, name, ranks):
    (tmp_path / "early.py").write_text(EARLY_STOPS)
    if place == "upgrade_state_dict":  # while a run is being continued
        shutil.copytree(trained / "run", tmp_path / "run")
    before = {path: data for path, data in everything_in(tmp_path).items() if path.endswith(".pt")}
    several = [f"distributed_training.distributed_world_size={ranks}", "task._target_=early.Stopped"]
    result = toy(tmp_path, *several, limit="optimization.max_update=9", env={"STOP_IN": place})
    assert result.status == 75, result.output
    lines = result.output.splitlines()
    assert lines[-1] == f"fairtrain: stopped by {name} before the first update; start me again"
    assert "Traceback" not in result.output and result.output.count("stopped by") == 1, result.output
    assert {path: data for path, data in everything_in(tmp_path).items() if path.endswith(".pt")} == before
    assert place == "upgrade_state_dict" or not (tmp_path / "run").exists()
