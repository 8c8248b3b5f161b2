"""Every schedule, optimizer and precision goes on over a stop as if there had been none."""

from __future__ import annotations

import pytest

from tests.resume.harness import assert_same_run, config, read_log, run_to_status

SCHEDULES = {
    "fixed": {"_target_": "trainer.lr_scheduler.Fixed", "warmup_updates": 4},
    "inverse_sqrt": {"_target_": "trainer.lr_scheduler.InverseSqrt", "warmup_updates": 4},
    "cosine": {"_target_": "trainer.lr_scheduler.Cosine", "warmup_updates": 4},
    "polynomial_decay": {"_target_": "trainer.lr_scheduler.PolynomialDecay", "warmup_updates": 4, "power": 2.0},
    "tri_stage": {"_target_": "trainer.lr_scheduler.TriStage", "phase_ratio": [0.2, 0.3, 0.5]},
    "reduce_lr_on_plateau": {
        "_target_": "trainer.lr_scheduler.ReduceLROnPlateau", "lr_shrink": 0.5, "lr_patience": 0, "lr_threshold": 0.9,
    },
    "OneCycleLR": {
        "_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.02, "total_steps": 40,
    },
    "StepLR": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3, "gamma": 0.7},
}
OPTIMIZERS = {
    "sgd": {"_target_": "torch.optim.SGD", "weight_decay": 0.0},
    "sgd_momentum": {"_target_": "torch.optim.SGD", "momentum": 0.9, "nesterov": True},
    "adam": {"_target_": "torch.optim.Adam", "amsgrad": True},
    "adafactor": {"_target_": "torch.optim.Adafactor"},
    "rmsprop": {"_target_": "torch.optim.RMSprop", "centered": True, "momentum": 0.5},
    "groups": {
        "_target_": "torch.optim.AdamW",
        "groups": [{"pattern": "bias|scale", "weight_decay": 0.0, "lr_scale": 0.5}, {"pattern": "head"}],
    },
}


def stopped_twice(tmp_path, nodes: dict | None = None, **sections) -> list[dict]:
    """Compare a run through three epochs with one stopped in the first and at the end of the second.

    `nodes` replace the toy's whole sections, other sections are merged into them.
    """
    sections.setdefault("optimization", {"max_update": 36, "lr": 0.01, "clip_norm": 1.0})

    def cfg(name: str) -> dict:
        return {**config(tmp_path / name, **sections), **(nodes or {})}

    run_to_status(cfg("through"), 0)
    for update in (3, 28):
        run_to_status(cfg("stopped"), 75, stop=f"{update}:0:0:SIGTERM")
    run_to_status(cfg("stopped"), 0)
    assert_same_run(tmp_path / "through", tmp_path / "stopped")
    return read_log(tmp_path / "through", "train")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on(tmp_path, name):
    lines = stopped_twice(tmp_path, {"lr_scheduler": SCHEDULES[name]})
    rates = {line["lr"] for line in lines}
    assert len(rates) > 1, "the schedule moves in this run"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_optimizer_state_goes_on(tmp_path, name):
    stopped_twice(tmp_path, {"optimizer": OPTIMIZERS[name]})


def test_fp16_with_overflows_goes_on(tmp_path):
    common = {"seed": 7, "log_format": "none", "cpu": True, "num_threads": 1, "fp16": True, "fp16_init_scale": 2.0**17,
              "fp16_scale_window": 5}
    lines = stopped_twice(tmp_path, common=common)
    scales = {line["loss_scale"] for line in lines}
    assert len(scales) > 2, "the scale moved in this run"


@pytest.mark.parametrize("ema", [{"ema_update_freq": 3}, {"ema_start_update": 5, "ema_warmup": True}, {"ema_validate": True}],
                         ids=["every third", "late with warmup", "validated"])
def test_every_kind_of_average_goes_on(tmp_path, ema):
    stopped_twice(tmp_path, ema={"store_ema": True, "ema_decay": 0.9, **ema})


def test_validating_logging_and_saving_more_often_changes_no_update(tmp_path):
    often = {"batch_size": 4, "validate_interval_updates": 1}
    run_to_status(config(tmp_path / "seldom", optimization={"max_update": 20, "lr": 0.01}), 0)
    run_to_status(config(tmp_path / "often", optimization={"max_update": 20, "lr": 0.01}, dataset=often,
                         checkpoint={"save_interval_updates": 1}), 0)

    def trained(run_dir):
        return [{k: v for k, v in line.items() if k != "wall"} for line in read_log(run_dir, "train")]

    assert trained(tmp_path / "seldom") == trained(tmp_path / "often")
