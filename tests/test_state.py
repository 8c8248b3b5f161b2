"""What a saved state is compared by, and the sentences that come of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.harness import RanksFailed, run_ranks
from trainer.health import first_non_finite
from trainer.state import (
    ClassMismatchError,
    ModelMismatchError,
    check_classes,
    check_equal_on_ranks,
    plan_module,
)


class Grows(nn.Module):
    """A module with buffers that a fresh one has in another shape, or not yet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("history", torch.zeros(0))
        self.register_buffer("late", None)
        self.register_buffer("cache", torch.ones(2), persistent=False)


def fill(module: nn.Module, saved: dict) -> None:
    with torch.no_grad():
        for source, target in plan_module(module, saved, "a.pt", "model").pairs:
            target.copy_(source)


def test_persistent_buffers_come_back_whatever_their_shape():
    old = Grows()
    old.history, old.late = torch.arange(5.0), torch.tensor([True, False])
    saved = old.state_dict()
    assert "cache" not in saved
    new = Grows()
    fill(new, saved)
    for name, tensor in saved.items():
        assert torch.equal(new.state_dict()[name], tensor) and new.state_dict()[name].dtype == tensor.dtype


def test_all_mismatches_are_named_in_one_error_ten_and_a_count():
    built = nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)], nn.Linear(2, 3))
    saved = dict(nn.Sequential(*[nn.Linear(2, 2) for _ in range(2)]).state_dict())
    saved |= {"8.weight": torch.zeros(5, 2), "8.bias": torch.zeros(3), "head.weight": torch.zeros(1)}
    with pytest.raises(ModelMismatchError) as caught:
        plan_module(built, saved, "runs/a.pt", "model")
    error = caught.value
    assert len(error.missing) == 12 and error.unexpected == ["head.weight"]
    assert error.shapes == ["8.weight (file [5, 2], here [3, 2])"]
    text = str(error)
    assert "runs/a.pt" in text and "missing in the file (12)" in text and "and 2 more" in text


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.encoder."])
def test_the_prefix_that_would_make_the_names_fit_is_suggested(prefix):
    built = nn.Linear(2, 2)
    with_prefix = {prefix + name: tensor for name, tensor in built.state_dict().items()}
    with pytest.raises(ModelMismatchError, match=f"prefix '{prefix}'"):
        plan_module(built, with_prefix, "a.pt", "model")
    wrapped = nn.Module()
    inner = wrapped
    *outer, last = prefix[:-1].split(".")
    for name in outer:
        inner.add_module(name, nn.Module())
        inner = getattr(inner, name)
    inner.add_module(last, nn.Linear(2, 2))
    with pytest.raises(ModelMismatchError, match=f"prefix '{prefix}'"):
        plan_module(wrapped, built.state_dict(), "a.pt", "model")


def test_another_class_is_refused_with_both_names_and_the_flag_unless_it_is_reset():
    parameters = [nn.Parameter(torch.zeros(1))]
    entry = {"criterion_name": "MSELoss", "optimizer_name": "Adam", "lr_scheduler_name": "Fixed", "num_updates": 7}

    class Scheduler:
        name = "Fixed"

    def check(criterion, optimizer, reset_optimizer=False):
        check_classes(entry, criterion, optimizer, Scheduler(), "a.pt", reset_optimizer, False)

    adam, sgd = torch.optim.Adam(parameters), torch.optim.SGD(parameters)
    check(nn.MSELoss(), adam)
    check(None, adam)  # a task without a criterion is not compared
    with pytest.raises(ClassMismatchError, match="update 7.*Adam.*SGD.*checkpoint.reset_optimizer=true"):
        check(nn.MSELoss(), sgd)
    with pytest.raises(ClassMismatchError, match="MSELoss.*HuberLoss.*checkpoint.reset_optimizer=true"):
        check(nn.HuberLoss(), adam)
    check(nn.HuberLoss(), sgd, reset_optimizer=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_parameter_that_is_not_finite_is_found_by_name(bad, dtype):
    named = [("a", torch.ones(3)), ("empty", torch.zeros(0)), ("count", torch.tensor(3)), ("b", torch.ones(4, 2, dtype=dtype))]
    assert first_non_finite(named) is None
    named[3][1][3, 1] = bad
    assert first_non_finite(named) == "b"


def _check(states: list) -> None:
    check_equal_on_ranks(states[torch.distributed.get_rank()], None)


def test_task_state_that_differs_between_ranks_is_named_on_all_of_them():
    same = {"seen": 3, "table": torch.arange(4)}
    run_ranks(_check, 2, [same, dict(same)])
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_check, 2, [same, {"seen": 3, "table": torch.arange(4) + 1}])
    assert all("task_state.table" in outcome.error for outcome in failed.value.outcomes)


def _save_after_a_change(path: str, change: float) -> None:
    from tests.resume.harness import config
    from tests.resume.task import Toy

    trainer = Toy(config(Path(path).parent))
    samples = next(iter(trainer.get_train_iterator(1).next_epoch_itr()))
    trainer.train_step(samples)
    if trainer.data_parallel_rank == 1:
        with torch.no_grad():
            trainer.model.head.weight.mul_(1 + change)
    trainer.save_checkpoint(path)


def test_parameters_that_drifted_apart_are_not_saved(tmp_path):
    run_ranks(_save_after_a_change, 2, str(tmp_path / "same.pt"), 0.0)
    run_ranks(_save_after_a_change, 2, str(tmp_path / "last_digits.pt"), 1e-5)
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_save_after_a_change, 2, str(tmp_path / "apart.pt"), 0.1)
    assert all("parameter head.weight of rank 1 differs from rank 0's" in one.error for one in failed.value.outcomes)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["last_digits.pt", "same.pt"]
