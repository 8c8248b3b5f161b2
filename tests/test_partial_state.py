"""A part of somebody's checkpoint: what is taken, under which names, and what is said about it."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checkpoint_utils import CheckpointConfig
from tests.commands import fairtrain
from tests.resume.harness import assert_same_run, config, run_to_status
from trainer import Trainer
from trainer.errors import ConfigError
from trainer.partial_state import Selection, selection_of
from trainer.state import ModelMismatchError, plan_module


class Net(nn.Module):
    def __init__(self, classes: int = 3, encoder: str = "encoder") -> None:
        super().__init__()
        setattr(self, encoder, nn.Linear(4, 4))
        self.table = nn.Embedding(classes, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(next(iter(self.children()))(x) + self.table.weight.sum(0))


class Rows(Trainer):
    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(4, generator=generator) for _ in range(8)]

    def compute_loss(self, sample):
        loss = self.model(sample).square().sum()
        return loss, len(sample), {"loss": loss.detach()}


def trainer_of(model: nn.Module, **checkpoint) -> Rows:
    cfg = {"dataset": {"batch_size": 4, "valid_subset": None}, "optimization": {"max_update": 10}, "checkpoint": checkpoint}
    return Rows({**cfg, "common": {"cpu": True}, "ema": {"store_ema": True}}, model=model)


def trained(folder, model: nn.Module) -> str:
    trainer = trainer_of(model)
    itr = trainer.get_train_iterator(1)
    for samples in itr.next_epoch_itr():
        trainer.train_step(samples)
    path = str(folder / "a.pt")
    trainer.save_checkpoint(path, {"train_iterator": itr.state_dict()})
    return path


NAMES = ["encoder.weight", "encoder.bias", "table.weight", "head.weight", "head.bias"]


@given(st.lists(st.sampled_from(["^encoder", "bias$", "head", "table", "x"]), max_size=2),
       st.lists(st.sampled_from(["^encoder", "bias$", "head", "table", "x"]), max_size=2))  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_each_tensor_is_taken_or_fresh_and_what_is_left_is_counted(include, exclude):
    selection = Selection(tuple(include), tuple(exclude))
    old, new = Net(), Net()
    plan = plan_module(new, old.state_dict(), "a.pt", "model", selection)
    wanted = [name for name in NAMES if not include or any(re.search(p, name) for p in include)]
    wanted = [name for name in wanted if not any(re.search(p, name) for p in exclude)]
    assert plan.taken == wanted and plan.sliced == [] and plan.fresh == plan.left == [name for name in NAMES if name not in wanted]


def test_a_table_of_another_shape_can_be_left_out_and_the_rest_is_taken_moments_too(tmp_path):
    """As when a DiT goes on with another number of classes."""
    path = trained(tmp_path, Net(classes=3))
    with pytest.raises(ModelMismatchError) as caught:
        trainer_of(Net(classes=5)).load_checkpoint(path)
    message = str(caught.value)
    assert "table.weight (file [3, 4], here [5, 4])" in message
    (override,) = re.findall(r"checkpoint\.load_exclude=(\[.*?\])'", message)
    fresh = Net(classes=5)
    start = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    trainer = trainer_of(fresh, load_exclude=eval(override))
    trainer.load_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    for name in NAMES:
        left_out = name not in ("encoder.weight", "encoder.bias")
        assert torch.equal(fresh.state_dict()[name], start[name] if left_out else saved["model"][name]), name
        parameter = fresh.get_parameter(name)
        assert (parameter in trainer.optimizer.state) != left_out
        assert torch.equal(trainer.ema.state_dict()[name], start[name] if left_out else saved["extra_state"]["ema"][name])
    index = saved["last_optimizer_state"]["param_groups"][0]["param_names"].index("encoder.bias")
    moments = trainer.optimizer.state[fresh.encoder.bias]["exp_avg"]
    assert torch.equal(moments, saved["last_optimizer_state"]["state"][index]["exp_avg"])
    assert trainer.get_num_updates() == 2
    report = trainer.load_report
    assert "model (2 tensors)" in report.restored and any("3 tensors of the model" in line for line in report.fresh)
    assert any("3 tensors of the file" in line for line in report.dropped)


def test_renamed_tensors_bring_their_moments_and_averages(tmp_path):
    path = trained(tmp_path, Net(encoder="bert"))
    model = Net(encoder="encoder")
    trainer = trainer_of(model, load_rename=["^bert[.] -> encoder."], load_expected_count=5)
    trainer.load_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert torch.equal(model.encoder.weight, saved["model"]["bert.weight"])
    assert torch.equal(trainer.ema.state_dict()["encoder.weight"], saved["extra_state"]["ema"]["bert.weight"])
    assert torch.equal(trainer.optimizer.state[model.encoder.weight]["exp_avg"], saved["last_optimizer_state"]["state"][0]["exp_avg"])


@pytest.mark.parametrize("mismatch, rows", [("skip", 0), ("slice", 3)])
def test_tensors_of_another_shape_are_skipped_or_taken_in_part(tmp_path, mismatch, rows):
    path = trained(tmp_path, Net(classes=3))
    model = Net(classes=5)
    start = model.table.weight.detach().clone()
    trainer = trainer_of(model, load_shape_mismatch=mismatch)
    trainer.load_model(path)
    saved = torch.load(path, weights_only=True)["model"]
    assert torch.equal(model.table.weight[:rows], saved["table.weight"][:rows])
    assert torch.equal(model.table.weight[rows:], start[rows:])
    assert torch.equal(trainer.ema.state_dict()["table.weight"], model.table.weight)
    assert torch.equal(model.encoder.weight, saved["encoder.weight"])
    other_shape = "table.weight, head.weight, head.bias"
    fresh = [f"3 tensors of the model ({other_shape})"] if mismatch == "skip" else []
    assert [line for line in trainer.load_report.fresh if "of the model" in line] == fresh


class Biased(Net):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("bias", torch.full((size,), float(size)))


def test_a_buffer_of_another_shape_is_taken_where_a_run_continues_and_said_else_it_is_as_a_parameter(tmp_path):
    path = trained(tmp_path, Biased(16))
    trainer = trainer_of(Biased(8))
    trainer.load_checkpoint(path)
    assert trainer.model.bias.tolist() == [16.0] * 16
    assert "buffers that took the shape of the file: bias [16], here [8]" in trainer.load_report.restored
    with pytest.raises(ModelMismatchError, match=r"other shape \(1\): bias \(file \[16\], here \[8\]\)"):
        trainer_of(Biased(8)).load_model(path)
    for mismatch in ("skip", "slice"):
        for load in (Trainer.load_checkpoint, Trainer.load_model):
            trainer = trainer_of(Biased(8), load_shape_mismatch=mismatch)
            load(trainer, path)
            assert trainer.model.bias.tolist() == [8.0 if mismatch == "skip" else 16.0] * 8
            assert torch.equal(trainer.ema.state_dict()["bias"], trainer.model.bias)


def test_another_count_than_expected_is_refused(tmp_path):
    path = trained(tmp_path, Net())
    with pytest.raises(ConfigError, match=r"a.pt: 2 tensors are taken, checkpoint.load_expected_count=5"):
        trainer_of(Net(), load_include="^encoder[.]", load_expected_count=5).load_model(path)


def test_a_pattern_that_finds_nothing_is_told_and_taking_nothing_is_refused(tmp_path, caplog):
    path = trained(tmp_path, Net())
    trainer_of(Net(), load_exclude="^enkoder").load_model(path)
    assert "no tensor is found by the pattern '^enkoder'" in caplog.text
    with pytest.raises(ConfigError, match=r"a.pt: nothing of it would be taken. See checkpoint.load_include"):
        trainer_of(Net(), load_include="^enkoder").load_model(path)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"load_include": "["}, r"load_include: '\[' is no regular expression"),
        ({"load_exclude": 3}, "load_exclude is a pattern or a list of patterns, got 3"),
        ({"load_exclude": [3]}, "load_exclude is a pattern or a list of patterns"),
        ({"load_rename": ["a"]}, "load_rename: 'a' is not of the form"),
        ({"load_rename": [r"a -> \2"]}, "load_rename"),
    ],
)
def test_settings_that_mean_nothing_are_refused_before_anything_is_built(settings, message):
    with pytest.raises(ConfigError, match=message):
        selection_of(CheckpointConfig(**settings))


def test_a_run_that_began_with_a_part_goes_on_with_all_of_its_own_checkpoint(tmp_path):
    run_to_status(config(tmp_path / "first", optimization={"max_update": 5, "lr": 0.01}), 0)
    part = {"restore_file": str(tmp_path / "first" / "checkpoints" / "checkpoint_last.pt"), "load_exclude": "^head"}
    limits = {"max_update": 12, "lr": 0.01}
    run_to_status(config(tmp_path / "through", optimization=limits, checkpoint=part), 0)
    run_to_status(config(tmp_path / "stopped", optimization=limits, checkpoint=part), 75, stop="8:0:0:SIGTERM")
    run_to_status(config(tmp_path / "stopped", optimization=limits, checkpoint=part), 0)
    assert_same_run(tmp_path / "through", tmp_path / "stopped")


def test_the_override_that_the_error_prints_can_be_typed_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = trained(tmp_path, Net(classes=3))
    typed = [
        "+task._target_=tests.test_partial_state.Rows", "model._target_=tests.test_partial_state.Net", "model.classes=5",
        "dataset.batch_size=4", "dataset.valid_subset=null", "optimization.max_update=4", "optimization.lr=0.01",
        "common.cpu=true", "run_dir=run", f"checkpoint.restore_file={path}",
    ]  # fmt: skip
    refused = fairtrain(*typed, cwd=tmp_path)
    assert refused.status == 2, refused.output
    (override,) = re.findall(r"add: '(checkpoint\.load_exclude=.*?)'", refused.output)
    taken = fairtrain(*typed, override, cwd=tmp_path)
    assert taken.status == 0 and "3 tensors of the model (table.weight, head.weight, head.bias)" in taken.output, taken.output


def test_names_that_collide_are_refused():
    with pytest.raises(ConfigError, match="two tensors of the file the name head.bias"):
        Selection(rename=(("encoder.bias", "head.bias"),)).tensors(Net().state_dict())
