"""The Trainer without a command line: from a plain dictionary, in a test or a notebook."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.harness import RanksFailed, run_ranks
from tests.resume.harness import config, first_difference
from tests.resume.task import Toy
from trainer import Trainer
from trainer.errors import NonFiniteError
from trainer.state import ModelMismatchError


def toy(tmp_path, **sections) -> Toy:
    return Toy(config(tmp_path, **sections))


def train(trainer: Toy, num_updates: int) -> list[dict]:
    itr = trainer._train_iterator or trainer.get_train_iterator(1)
    stats = []
    while len(stats) < num_updates:
        for samples in itr.next_epoch_itr():
            stats.append(trainer.train_step(samples))
            if len(stats) == num_updates:
                break
    return stats


def copied(state):
    return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


class Sized(Toy):
    num_times_read = 0

    def build_dataset(self, split):
        trainer, dataset = self, super().build_dataset(split)

        class WithSizes(type(dataset)):
            @property
            def sizes(self):
                trainer.num_times_read += split == "train"
                return [2] * len(self)

        dataset.__class__ = WithSizes
        return dataset


def test_sizes_are_read_and_sorted_once_however_often_the_start_is_moved(tmp_path):
    trainer = Sized(config(tmp_path, dataset={"max_tokens": 8}))
    itr = trainer.get_train_iterator(1)
    at_first = trainer.num_times_read
    assert at_first and trainer.get_train_iterator(1) is trainer.get_train_iterator(3) is itr
    assert itr.epoch == 3 and trainer.num_times_read == at_first


def test_build_step_save_load_goes_on_bit_by_bit_from_a_plain_dictionary(tmp_path):
    whole = toy(tmp_path)
    expected = train(whole, 9)
    first = toy(tmp_path)
    assert train(first, 4) == expected[:4]
    first.save_checkpoint(str(tmp_path / "a.pt"), {"mine": {"words": ["x"], "table": torch.arange(3)}})
    second = toy(tmp_path)
    extra_state = second.load_checkpoint(str(tmp_path / "a.pt"))
    assert extra_state["mine"]["words"] == ["x"] and torch.equal(extra_state["mine"]["table"], torch.arange(3))
    second.get_train_iterator(1).load_state_dict(extra_state["train_iterator"])
    assert train(second, 5) == expected[4:]
    for key in ("model", "criterion", "last_optimizer_state", "optimizer_history"):
        assert first_difference(whole.state_dict()[key], second.state_dict()[key], key) is None


def test_a_save_directly_after_a_load_equals_what_was_loaded_and_ten_rounds_keep_the_size(tmp_path):
    trainer = toy(tmp_path)
    train(trainer, 3)
    path = tmp_path / "a.pt"
    trainer.save_checkpoint(str(path))
    content, size = torch.load(path, weights_only=True), path.stat().st_size
    for _ in range(10):
        trainer = toy(tmp_path)
        extra_state = trainer.load_checkpoint(str(path))
        trainer.get_train_iterator(1).load_state_dict(extra_state["train_iterator"])
        trainer.save_checkpoint(str(path))
    difference = first_difference(content, torch.load(path, weights_only=True))
    assert difference is None, difference
    assert abs(path.stat().st_size - size) < 512  # the digits of a time


def test_loading_into_a_trainer_that_has_trained_leaves_nothing_of_it(tmp_path):
    saved = toy(tmp_path)
    train(saved, 2)
    saved.save_checkpoint(str(tmp_path / "a.pt"))
    used = toy(tmp_path)
    train(used, 7)
    extra_state = used.load_checkpoint(str(tmp_path / "a.pt"))
    used.get_train_iterator(1).load_state_dict(extra_state["train_iterator"])
    difference = first_difference(saved.state_dict(), used.state_dict())
    assert difference is None, difference


def test_the_file_holds_what_is_trained_also_while_the_average_is_swapped_in(tmp_path):
    trainer = toy(tmp_path)
    train(trainer, 3)
    expected = copied(trainer.state_dict()["model"])
    with contextlib.suppress(KeyboardInterrupt), trainer.ema.swapped_in(trainer.model):
        assert not torch.equal(trainer.model.head.weight, expected["head.weight"])
        trainer.save_checkpoint(str(tmp_path / "a.pt"))
        raise KeyboardInterrupt
    assert first_difference(expected, torch.load(tmp_path / "a.pt", weights_only=True)["model"]) is None
    assert first_difference(expected, dict(trainer.state_dict()["model"])) is None


def test_a_parameter_that_is_not_finite_is_never_saved_over_a_healthy_file(tmp_path):
    trainer = toy(tmp_path)
    trainer.save_checkpoint(str(tmp_path / "a.pt"))
    before = (tmp_path / "a.pt").read_bytes()
    with torch.no_grad():
        trainer.model.head.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="head.weight"):
        trainer.save_checkpoint(str(tmp_path / "a.pt"))
    assert (tmp_path / "a.pt").read_bytes() == before


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    class Wide(Toy):
        def build_model(self):
            net = super().build_model()
            net.head = nn.Linear(8, 3)
            return net

    trainer = toy(tmp_path)
    train(trainer, 2)
    trainer.save_checkpoint(str(tmp_path / "a.pt"))
    wide = Wide(config(tmp_path))
    before = copied(wide.state_dict())
    with pytest.raises(ModelMismatchError, match="head.weight"):
        wide.load_checkpoint(str(tmp_path / "a.pt"))
    assert first_difference(before, wide.state_dict()) is None


def test_a_new_learning_rate_and_weight_decay_take_effect_with_the_next_update(tmp_path):
    trainer = toy(tmp_path)
    train(trainer, 2)
    trainer.save_checkpoint(str(tmp_path / "a.pt"))
    changed = toy(
        tmp_path,
        optimization={"max_update": 22, "lr": 0.5, "clip_norm": 1.0},
        optimizer={"_target_": "torch.optim.AdamW", "weight_decay": 0.25},
        lr_scheduler={"_target_": "trainer.lr_scheduler.Fixed"},
    )
    changed.load_checkpoint(str(tmp_path / "a.pt"), reset_lr_scheduler=True)
    assert train(changed, 1)[0]["lr"] == 0.5
    assert changed.optimizer.param_groups[0]["weight_decay"] == 0.25
    assert next(iter(changed.optimizer.state.values()))["step"].item() == 3, "moments were kept"


def test_optimizer_overrides_win_in_both_spellings(tmp_path):
    trainer = toy(tmp_path)
    train(trainer, 1)
    trainer.save_checkpoint(str(tmp_path / "a.pt"))
    for overrides in ({"weight_decay": 0.5, "lr": 0.125}, "{'weight_decay': 0.5, 'lr': 0.125}"):
        other = toy(tmp_path, lr_scheduler={"_target_": "trainer.lr_scheduler.Fixed", "warmup_updates": 0})
        other.load_checkpoint(str(tmp_path / "a.pt"), reset_lr_scheduler=True, optimizer_overrides=overrides)
        assert other.optimizer.param_groups[0]["weight_decay"] == 0.5
        assert train(other, 1)[0]["lr"] == 0.125


def test_finetuning_takes_parameters_and_nothing_else(tmp_path):
    trainer = toy(tmp_path)
    train(trainer, 5)
    trainer.save_checkpoint(str(tmp_path / "a.pt"))
    tuned = toy(tmp_path)
    tuned.load_model(str(tmp_path / "a.pt"))
    state = tuned.state_dict()
    assert first_difference(dict(trainer.state_dict()["model"]), dict(state["model"])) is None
    assert tuned.get_num_updates() == 0 and not state["last_optimizer_state"]["state"]
    for name, tensor in state["extra_state"]["ema"].items():
        assert torch.equal(tensor, state["model"][name]), "the average starts from the loaded weights"


def test_a_run_with_ema_continues_from_a_file_without(tmp_path):
    trainer = toy(tmp_path, ema={"store_ema": False})
    train(trainer, 2)
    trainer.save_checkpoint(str(tmp_path / "a.pt"))
    other = toy(tmp_path)
    other.load_checkpoint(str(tmp_path / "a.pt"))
    assert any("ema" in line for line in other.load_report.fresh)
    assert torch.equal(other.ema.state_dict()["head.weight"], other.model.head.weight)


@pytest.mark.parametrize("reset", [False, True])
def test_fp16_overflow_skips_an_update_and_its_scaler_is_remembered(tmp_path, reset):
    sections = {"common": {"seed": 7, "log_format": "none", "cpu": True, "fp16": True, "fp16_init_scale": 2.0**17}}
    trainer = toy(tmp_path, **sections)
    stats = train(trainer, 12)
    assert None in stats and trainer.get_num_updates() == 12 - stats.count(None)
    position = trainer._train_iterator.samples_in_epoch
    assert position == 12 * 4, "a skipped update has used its samples up"
    trainer.save_checkpoint(str(tmp_path / "a.pt"))
    other = toy(tmp_path, **sections)
    other.load_checkpoint(str(tmp_path / "a.pt"), reset_meters=reset)
    assert other.precision.state_dict() == trainer.precision.state_dict()


class Uneven(Trainer):
    def build_model(self):
        torch.manual_seed(torch.initial_seed() % 1000 + self.data_parallel_rank)  # ranks that disagree at the start
        return nn.Linear(2, 1)

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.arange(14.0).view(7, 2), torch.arange(7.0).view(7, 1))

    def compute_loss(self, sample):
        x, y = sample
        loss = (self.model(x) - y).square().sum()
        return loss, len(y), {"loss": loss.detach(), "n": len(y)}


def _uneven(tmp_path: str) -> list:
    trainer = Uneven(
        {
            "run_dir": tmp_path,
            "common": {"cpu": True},
            "dataset": {"batch_size": 2, "valid_subset": "valid"},
            "optimization": {"max_epoch": 1, "lr": 0.01, "update_freq": 2},
        }
    )
    stats = [trainer.train_step(samples) for samples in trainer.get_train_iterator(1).next_epoch_itr()]
    return [stats, trainer.validate("valid"), trainer.model.state_dict()]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_uneven_ranks_count_each_sample_once_in_training_and_validation(tmp_path, world_size):
    alone = run_ranks(_uneven, 1, str(tmp_path), timeout=60)[0]
    together = run_ranks(_uneven, world_size, str(tmp_path), timeout=60)
    for result in together:
        assert first_difference(result, together[0]) is None, "all ranks know the same"
        assert sum(stats["sample_size"] for stats in result[0]) == 7
        assert result[1]["n"] == 1.0
    if world_size == 2:  # the same updates: 2 ranks x 2 micro-batches of 2 hold all seven samples
        assert len(together[0][0]) == 1
    assert alone[1].keys() == together[0][1].keys()


def _one_rank_breaks(tmp_path: str) -> None:
    trainer = Toy(config(Path(tmp_path)))
    compute_loss = trainer.compute_loss

    def broken(sample):
        loss, sample_size, output = compute_loss(sample)
        return (loss * float("nan") if trainer.data_parallel_rank == 1 else loss), sample_size, output

    trainer.compute_loss = broken
    train(trainer, 1)


def test_a_loss_that_is_nan_on_one_rank_is_raised_on_all_with_the_rank(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_one_rank_breaks, 3, str(tmp_path), timeout=60)
    errors = [outcome.error for outcome in failed.value.outcomes]
    assert all("the loss (nan) is not finite (update 1, rank 1, micro-batch 0)" in error for error in errors)
    assert sum("PeerError" in error for error in errors) == 2


class Normalised(Trainer):
    """Batch normalisation refuses to train on one sample, and at two ranks the last micro-batch of one is empty."""

    def build_model(self):
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(12, 2), torch.randn(12, 1))

    def compute_loss(self, sample):
        x, y = sample
        loss = (self.model(x) - y).square().sum()
        return loss, len(y), {"loss": loss.detach()}


def _normalised(tmp_path: str) -> list:
    trainer = Normalised(
        {
            "run_dir": tmp_path,
            "common": {"cpu": True},
            "dataset": {"batch_size": 4, "valid_subset": None},
            "optimization": {"max_epoch": 1, "lr": 0.01},
        }
    )
    stats = [trainer.train_step(samples) for samples in trainer.get_train_iterator(1).next_epoch_itr()]
    trainer._sync_buffers()
    return [[line["sample_size"] for line in stats], dict(trainer.model.state_dict())]


def test_batch_normalisation_trains_where_a_rank_has_no_samples(tmp_path):
    one, other = run_ranks(_normalised, 2, str(tmp_path), timeout=60)
    assert one[0] == [8.0, 4.0]
    assert first_difference(one, other) is None, "buffers follow rank 0"
    assert one[1]["1.num_batches_tracked"] == 2
