"""A run whose optimizer state is shared out over ranks: stopped, continued, and taken up by other arrangements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.harness import run_ranks
from tests.resume.harness import assert_same_run, config, first_difference, load, read_log, run_to_status

ZERO = {"zero_sharding": "os"}
# Three groups that interleave the order of the parameters, the criterion's among them.
GROUPS = [{"pattern": "weight|temperature", "weight_decay": 0.1}, {"pattern": r"head|scale", "lr_scale": 0.5}]
OPTIMIZERS = {
    "adamw": {"_target_": "torch.optim.AdamW", "amsgrad": True, "groups": GROUPS},
    "adagrad": {"_target_": "torch.optim.Adagrad", "initial_accumulator_value": 0.1, "weight_decay": 0.0},
}


@pytest.mark.parametrize("ranks, on_all_ranks", [(3, True), (4, False)])
def test_a_run_that_was_stopped_equals_the_one_that_was_not_and_the_one_without_zero(tmp_path, ranks, on_all_ranks):
    through, stopped, plain = (tmp_path / name for name in ("through", "stopped", "plain"))
    sections = {"checkpoint": {"load_checkpoint_on_all_dp_ranks": on_all_ranks}, "optimization": {"max_update": 9}}
    run_to_status(config(plain, **sections), 0, ranks)
    run_to_status(config(through, distributed_training=ZERO, **sections), 0, ranks)
    run_to_status(config(stopped, distributed_training=ZERO, **sections), 75, ranks, stop="5:0:1:SIGTERM")
    run_to_status(config(stopped, distributed_training=ZERO, **sections), 0, ranks)
    assert_same_run(through, stopped)
    assert first_difference(read_log(plain, "train"), read_log(through, "train")) is None
    one, other = load(plain), load(through)
    assert one.pop("cfg") != other.pop("cfg")
    assert first_difference(one, other) is None


def content(folder: Path, name: str) -> dict:
    """A checkpoint without what says who wrote it."""
    state = load(folder, name)
    del state["cfg"], state["extra_state"]["ranks"]
    return state


def trainer(folder: Path, optimizer: str, zero_sharding: str, on_all_ranks: bool, **sections):
    from tests.resume.task import Toy

    cfg = config(
        folder,
        optimizer=OPTIMIZERS[optimizer],
        distributed_training={"zero_sharding": zero_sharding},
        checkpoint={"load_checkpoint_on_all_dp_ranks": on_all_ranks},
        **sections,
    )
    cfg["lr_scheduler"] = sections.get("lr_scheduler") or {"_target_": "trainer.lr_scheduler.Fixed"}
    return Toy(cfg)


def updates(run, num_updates: int) -> list:
    stats = []
    for _ in range(num_updates):
        generator = torch.Generator().manual_seed(10 * run.get_num_updates() + run.data_parallel_rank)
        sample = torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)
        stats.append(run.train_step([sample]))
    return stats


def trained(folder: Path, optimizer: str, zero_sharding: str) -> None:
    """A run of three updates, saved as start.pt."""
    run = trainer(folder, optimizer, zero_sharding, True)
    updates(run, 3)
    (folder / "checkpoints").mkdir(exist_ok=True)
    run.save_checkpoint(str(folder / "checkpoints" / "start.pt"))


def saved_again(folder: Path, optimizer: str) -> list[str]:
    """start.pt loaded in every way that this number of ranks has; each is saved again under the name that is returned."""
    names = []
    for zero_sharding in ("none", "os"):
        for on_all_ranks in (False, True):
            run = trainer(folder, optimizer, zero_sharding, on_all_ranks)
            run.load_checkpoint(str(folder / "checkpoints" / "start.pt"))
            assert run.get_num_updates() == 3
            assert all(len(report) == 0 for report in (run.load_report.fresh, run.load_report.dropped))
            _check_bytes(run, zero_sharding)
            names.append(f"{run.data_parallel_world_size}_{zero_sharding}_{on_all_ranks}.pt")
            run.save_checkpoint(str(folder / "checkpoints" / names[-1]))
    return names


def _check_bytes(run, zero_sharding: str) -> None:
    """Of the state that has an element for each element of a parameter, a rank holds its share and one tensor at most."""
    from trainer.sharding import whole_shape

    held, whole = [], []
    for parameter, entry in run.optimizer.state.items():
        for value in (value for key, value in entry.items() if key != "step"):
            held.append(value.nbytes)
            whole.append(whole_shape(parameter).numel() * value.element_size())
    assert len(whole) > 20 or sum(whole) > 500
    if zero_sharding == "os" and run.data_parallel_world_size > 1:
        assert sum(held) <= sum(whole) / run.data_parallel_world_size + max(whole)
    else:
        assert held == whole


@pytest.mark.parametrize("optimizer, zero_sharding", [("adamw", "os"), ("adagrad", "os"), ("adamw", "none")])
def test_what_two_ranks_saved_is_what_any_others_hold_after_a_load(tmp_path, optimizer, zero_sharding):
    run_ranks(trained, 2, tmp_path, optimizer, zero_sharding)
    start = content(tmp_path, "start.pt")
    for ranks in (1, 3, 4) if zero_sharding == "os" else (3,):
        for name in run_ranks(saved_again, ranks, tmp_path, optimizer)[0]:
            assert first_difference(start, content(tmp_path, name)) is None, name


# What a run may be told at a load, and the kinds of numbers that it may compute with.
CASES = {
    "overflow": ("adamw", {}, {"common": {"fp16": True, "fp16_init_scale": 2.0**15}}),
    "bf16": ("adagrad", {}, {"common": {"bf16": True}, "optimization": {"clip_norm": 0.01}}),
    "reset_optimizer": ("adagrad", {"reset_optimizer": True}, {}),
    "reset_all": ("adamw", {"reset_optimizer": True, "reset_lr_scheduler": True, "reset_meters": True}, {}),
    "overrides": ("adamw", {"optimizer_overrides": {"lr": 0.03, "weight_decay": 0.5}}, {}),
    "torch_schedule": ("adamw", {}, {"lr_scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2}}),
}


def continued(folder: Path, name: str, zero_sharding: str) -> tuple:
    """What a run that takes up start.pt logs and holds after more updates."""
    optimizer, flags, sections = CASES[name]
    path = folder / "checkpoints" / f"{name}.pt"
    first = trainer(folder, optimizer, "os", True, **sections)
    stats = updates(first, 4)
    first.save_checkpoint(str(path))
    run = trainer(folder, optimizer, zero_sharding, True, **sections)
    run.load_checkpoint(str(path), **flags)
    stats += updates(run, 4)
    run.save_checkpoint(str(path))
    return stats, content(folder, path.name)


def compare_cases(folder: Path) -> list[str]:
    (folder / "checkpoints").mkdir(exist_ok=True)
    different = []
    for name in CASES:
        plain, zero = (continued(folder, name, zero_sharding) for zero_sharding in ("none", "os"))
        found = [stats is None for stats in plain[0]]
        assert any(found) == (name == "overflow") and not all(found), (name, found)
        zero[1]["run_id"] = plain[1]["run_id"]
        different.append(f"{name}: {first_difference(plain, zero)}")
    return different


def test_flags_overrides_schedules_and_precisions_are_those_of_plain_data_parallel(tmp_path):
    for different in run_ranks(compare_cases, 2, tmp_path):
        assert different == [f"{name}: None" for name in CASES]


def seen_by_build_optimizer(folder: Path) -> list:
    from tests.resume.task import Toy

    class Watching(Toy):
        def build_optimizer(self, named_parameters):
            self.seen = [(name, tuple(parameter.shape)) for name, parameter in named_parameters]
            return super().build_optimizer(named_parameters)

    run = Watching(config(folder, distributed_training=ZERO))
    assert type(run.optimizer).__name__ == "AdamW" and isinstance(run.optimizer, torch.optim.AdamW)
    return run.seen


def test_build_optimizer_sees_names_and_shapes_of_the_whole_model(tmp_path):
    alone, ranks = run_ranks(seen_by_build_optimizer, 1, tmp_path)[0], run_ranks(seen_by_build_optimizer, 2, tmp_path)
    assert ranks == [alone, alone] and ("second.weight", (8, 8)) in alone and ("criterion.temperature", ()) in alone
