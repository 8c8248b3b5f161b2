"""Each reset flag does exactly one thing, in all combinations, and only once in a run."""

from __future__ import annotations

import itertools
import shutil

import pytest

from tests.resume.harness import config, first_difference, load, read_log, run_to_status

FLAGS = ("reset_optimizer", "reset_lr_scheduler", "reset_dataloader", "reset_meters")


def plateau_config(run_dir, **sections) -> dict:
    """The schedule with state, so that dropping it shows."""
    sections.setdefault("checkpoint", {})
    return config(
        run_dir,
        lr_scheduler={"_target_": "trainer.lr_scheduler.ReduceLROnPlateau", "lr_shrink": 0.5, "lr_patience": 0,
                      "lr_threshold": 0.9},
        optimization={"max_update": 40, "lr": 0.01, "clip_norm": 1.0},
        **sections,
    )


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run stopped in its third epoch; its schedule has shrunk the rate by then."""
    run_dir = tmp_path_factory.mktemp("parent")
    run_to_status(plateau_config(run_dir), 75, stop="33:0:0:SIGTERM")
    return run_dir


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=4)), ids=lambda f: "".join("01"[x] for x in f))
def test_each_combination_of_reset_flags_resets_just_that(tmp_path, parent, flags):
    typed = dict(zip(FLAGS, flags))
    saved = load(parent)
    restore_file = str(parent / "checkpoints" / "checkpoint_last.pt")
    cfg = plateau_config(tmp_path, checkpoint={"restore_file": restore_file, **typed})
    # One update further, then look at where everything stands.
    run_to_status(cfg, 75, stop="34:0:0:SIGTERM")
    now = load(tmp_path)
    assert now["optimizer_history"][-1]["num_updates"] == 34, "counters are never reset"
    step = next(iter(now["last_optimizer_state"]["state"].values()))["step"]
    assert step.item() == (1 if typed["reset_optimizer"] else 34)
    lr = read_log(tmp_path, "train")[-1]["lr"]
    saved_lr = saved["last_optimizer_state"]["param_groups"][0]["lr"]
    assert saved_lr < 0.01
    assert lr == (0.01 if typed["reset_lr_scheduler"] else saved_lr)
    position = now["extra_state"]["train_iterator"]
    batch = 4
    saved_position = saved["extra_state"]["train_iterator"]
    expected = (1, batch) if typed["reset_dataloader"] else (3, saved_position["samples_in_epoch"] + batch)
    assert (position["epoch"], position["samples_in_epoch"]) == expected
    assert now["extra_state"]["best"] == (None if typed["reset_meters"] else saved["extra_state"]["best"])
    meter = now["extra_state"]["metrics"]["num_updates"]
    assert meter == (1 if typed["reset_meters"] else saved["extra_state"]["metrics"]["num_updates"] + 1)


def test_a_flag_is_applied_once_in_a_run(tmp_path, parent):
    restore_file = str(parent / "checkpoints" / "checkpoint_last.pt")
    cfg = plateau_config(tmp_path, checkpoint={"restore_file": restore_file, **dict.fromkeys(FLAGS, True)})
    run_to_status(cfg, 75, stop="34:0:0:SIGTERM")
    run_to_status(cfg, 75, stop="36:0:0:SIGTERM")
    now = load(tmp_path)
    assert next(iter(now["last_optimizer_state"]["state"].values()))["step"].item() == 3
    assert now["extra_state"]["train_iterator"]["samples_in_epoch"] == 3 * 4


@pytest.mark.parametrize("on_all_ranks", [False, True])
def test_both_ways_of_reading_give_the_same_state_and_a_save_after_a_load_equals_it(tmp_path, on_all_ranks):
    cfg = config(tmp_path, checkpoint={"load_checkpoint_on_all_dp_ranks": on_all_ranks})
    run_to_status(cfg, 75, 2, stop="9:0:1:SIGTERM")
    before = load(tmp_path)
    shutil.copy(tmp_path / "checkpoints" / "checkpoint_last.pt", tmp_path / "before.pt")
    loads = run_ranks_states(cfg, 2)
    for state in loads:
        difference = first_difference(before, state)
        assert difference is None, difference


def run_ranks_states(cfg: dict, world_size: int) -> list[dict]:
    from tests.dist.harness import run_ranks

    return run_ranks(_state_after_load, world_size, cfg, timeout=60)


def _state_after_load(cfg: dict) -> dict:
    import torch

    import checkpoint_utils
    from tests.resume.task import Toy

    trainer = Toy(cfg)
    checkpoint_utils.load_checkpoint(trainer.cfg.checkpoint, trainer)
    state = trainer.state_dict()
    return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
