"""Schedules are functions of (config, num_updates): any stopping point gives the trace of a run without stops."""

from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from trainer.errors import ConfigError
from trainer.lr_scheduler import SCHEDULER_KEYS, adapt_scheduler, build_lr_scheduler

OURS = "trainer.lr_scheduler."
TORCH = "torch.optim.lr_scheduler."
HORIZON, LR = 40, 0.1

PURE = {
    "fixed": {"_target_": OURS + "Fixed", "warmup_updates": 5},
    "inverse_sqrt": {"_target_": OURS + "InverseSqrt", "warmup_updates": 5, "warmup_init_lr": 0.01},
    "inverse_sqrt without warmup": {"_target_": OURS + "InverseSqrt", "warmup_updates": 0},
    "cosine": {"_target_": OURS + "Cosine", "warmup_updates": 5, "min_lr": 1e-3},
    "cosine with restarts": {"_target_": OURS + "Cosine", "lr_period_updates": 7, "t_mult": 2, "lr_shrink": 0.5},
    "polynomial": {"_target_": OURS + "PolynomialDecay", "warmup_updates": 5, "power": 2.0, "end_learning_rate": 1e-3},
    "tri_stage": {"_target_": OURS + "TriStage", "warmup_steps": 4, "hold_steps": 10, "decay_steps": 20},
    "tri_stage by ratio": {"_target_": OURS + "TriStage", "phase_ratio": [0.1, 0.4, 0.5]},
    "plateau": {"_target_": OURS + "ReduceLROnPlateau", "warmup_updates": 3, "lr_patience": 1},
}
FROM_TORCH = {
    "StepLR": {"_target_": TORCH + "StepLR", "step_size": 4},
    "MultiStepLR": {"_target_": TORCH + "MultiStepLR", "milestones": [3, 9, 9]},
    "ExponentialLR": {"_target_": TORCH + "ExponentialLR", "gamma": 0.9},
    "CosineAnnealingLR": {"_target_": TORCH + "CosineAnnealingLR", "T_max": 10, "eta_min": 1e-3},
    "CosineAnnealingWarmRestarts": {"_target_": TORCH + "CosineAnnealingWarmRestarts", "T_0": 5, "T_mult": 2},
    "LinearLR": {"_target_": TORCH + "LinearLR", "total_iters": 8},
    "OneCycleLR": {"_target_": TORCH + "OneCycleLR", "max_lr": 0.3, "total_steps": HORIZON + 1},
    "CyclicLR": {"_target_": TORCH + "CyclicLR", "base_lr": 0.01, "max_lr": 0.3, "step_size_up": 6},
    "SequentialLR": {
        "_target_": TORCH + "SequentialLR",
        "milestones": [6],
        "schedulers": [
            {"_target_": TORCH + "LinearLR", "total_iters": 6},
            {"_target_": TORCH + "ExponentialLR", "gamma": 0.9},
        ],
    },
    "ReduceLROnPlateau": {"_target_": TORCH + "ReduceLROnPlateau", "patience": 1},
}
SCORES = {10: 3.0, 15: 3.5, 20: 3.2, 25: float("nan"), 30: 2.0, 35: 2.0}


def new(node, lr=LR, max_update=HORIZON, scales=(1.0, 0.5)):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in scales]
    groups = [{"params": [p], "lr": lr * scale, "lr_scale": scale} for p, scale in zip(parameters, scales)]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    scheduler = build_lr_scheduler(node, optimizer, lr, max_update)
    scheduler.step_update(0)
    return optimizer, scheduler


def hyperparameters(optimizer):
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def advance(optimizer, scheduler, first, last):
    """What the updates first..last use: all hyperparameters of all groups, before each of them."""
    trace = []
    for update in range(first, last + 1):
        trace.append(hyperparameters(optimizer))
        optimizer.step()
        scheduler.step_update(update)
        if update in SCORES:
            scheduler.step(1, SCORES[update])
    return trace


@pytest.mark.parametrize("name", PURE | FROM_TORCH)
def test_a_trace_is_the_same_for_every_stopping_point(name):
    node = (PURE | FROM_TORCH)[name]
    optimizer, scheduler = new(node)
    through = advance(optimizer, scheduler, 1, HORIZON)
    optimizer, scheduler = new(node)
    for stop in range(HORIZON):
        state = scheduler.state_dict()
        optimizer, scheduler = new(node)
        scheduler.load_state_dict(OmegaConf.to_container(OmegaConf.create(state)))
        scheduler.step_update(stop)
        assert advance(optimizer, scheduler, stop + 1, stop + 1) == through[stop : stop + 1], f"update {stop + 1}"


@pytest.mark.parametrize("name", PURE | FROM_TORCH)
def test_state_holds_plain_values_only(name, tmp_path):
    optimizer, scheduler = new((PURE | FROM_TORCH)[name])
    advance(optimizer, scheduler, 1, 12)
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == scheduler.state_dict()


def test_update_u_uses_schedule_of_u_minus_1():
    optimizer, _ = new({"_target_": OURS + "InverseSqrt", "warmup_updates": 4, "warmup_init_lr": 0.02})
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert optimizer.param_groups[1]["lr"] == 0.01  # lr_scale 0.5


@pytest.mark.parametrize(
    "name, num_updates, expected",
    [
        ("fixed", 0, 0.1 / 5),
        ("fixed", 3, 0.1 * 4 / 5),
        ("fixed", 5, 0.1),
        ("inverse_sqrt", 0, 0.01),
        ("inverse_sqrt", 5, 0.1),
        ("inverse_sqrt", 20, 0.05),
        ("cosine", 0, 1e-3),  # warmup_init_lr is min_lr unless given
        ("cosine", 5, 0.1),
        ("cosine", 5 + 35 / 2, (0.1 + 1e-3) / 2),
        ("cosine", 40, 1e-3),
        ("cosine", 400, 1e-3),
        ("cosine with restarts", 6, 0.05 * (1 + math.cos(math.pi * 6 / 7))),
        ("cosine with restarts", 7, 0.05),
        ("cosine with restarts", 14, 0.025),
        ("cosine with restarts", 21, 0.025),
        ("polynomial", 0, 0.0),
        ("polynomial", 5, 0.1),
        ("polynomial", 22.5, (0.1 - 1e-3) * 0.25 + 1e-3),
        ("polynomial", 40, 1e-3),
        ("polynomial", 99, 1e-3),
        ("tri_stage", 0, 0.001),
        ("tri_stage", 4, 0.1),
        ("tri_stage", 13, 0.1),
        ("tri_stage", 24, 0.01),
        ("tri_stage", 34, 0.001),
        ("tri_stage", 90, 0.001),
        ("tri_stage by ratio", 4, 0.1),
        ("tri_stage by ratio", 19, 0.1),
        ("tri_stage by ratio", 30, 0.01),
    ],
)
def test_known_points_of_the_schedules(name, num_updates, expected):
    _, scheduler = new(PURE[name])
    assert scheduler.lr_at(num_updates) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", PURE)
def test_a_new_lr_takes_effect_at_the_next_update(name):
    optimizer, scheduler = new(PURE[name])
    advance(optimizer, scheduler, 1, 22)
    state, factor = scheduler.state_dict(), scheduler.get_lr()
    optimizer, scheduler = new(PURE[name], lr=2 * LR)
    scheduler.load_state_dict(state)
    scheduler.step_update(22)
    always, _ = new(PURE[name], lr=2 * LR)
    if name == "plateau":
        assert optimizer.param_groups[0]["lr"] == 2 * factor  # the reduction so far stays
        assert factor == pytest.approx(0.1 * LR)
    else:
        advance(always, build_lr_scheduler(PURE[name], always, 2 * LR, HORIZON), 1, 22)
        assert optimizer.param_groups[0]["lr"] == always.param_groups[0]["lr"]


@pytest.mark.parametrize("name", FROM_TORCH)
def test_a_new_lr_reaches_torchs_schedulers_as_if_it_had_always_been_so(name):
    optimizer, scheduler = new(FROM_TORCH[name])
    advance(optimizer, scheduler, 1, 22)
    state = scheduler.state_dict()
    optimizer, scheduler = new(FROM_TORCH[name], lr=2 * LR)
    scheduler.load_state_dict(state)
    scheduler.step_update(22)
    always, its_scheduler = new(FROM_TORCH[name], lr=2 * LR)
    advance(always, its_scheduler, 1, 22)
    assert hyperparameters(optimizer) == hyperparameters(always)
    if "max_lr" not in FROM_TORCH[name]:
        assert optimizer.param_groups[0]["lr"] > 1.9 * state["lr"][0]


def test_a_new_field_of_torchs_schedulers_is_not_replaced_by_the_saved_one():
    node = FROM_TORCH["CosineAnnealingLR"]
    optimizer, scheduler = new(node)
    advance(optimizer, scheduler, 1, 4)
    longer = node | {"T_max": 100}
    resumed, resumed_scheduler = new(longer)
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    resumed_scheduler.step_update(4)
    always, its_scheduler = new(longer)
    advance(always, its_scheduler, 1, 4)
    assert hyperparameters(resumed) == hyperparameters(always) != hyperparameters(optimizer)


@pytest.mark.parametrize("name", set(FROM_TORCH) - {"ReduceLROnPlateau"})
def test_torchs_schedulers_go_to_a_position_without_state(name):
    optimizer, scheduler = new(FROM_TORCH[name])
    advance(optimizer, scheduler, 1, 17)
    without_state, other = new(FROM_TORCH[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.step_update(17)
    assert hyperparameters(without_state) == hyperparameters(optimizer)
    other.step_update(3)  # back again, for instance to an older checkpoint
    early, its_scheduler = new(FROM_TORCH[name])
    advance(early, its_scheduler, 1, 3)
    assert hyperparameters(without_state) == hyperparameters(early)


def test_set_base_lr_equals_a_run_with_that_lr():
    for name, node in (PURE | FROM_TORCH).items():
        optimizer, scheduler = new(node)
        advance(optimizer, scheduler, 1, 8)
        scheduler.set_base_lr(2 * LR)
        scheduler.step_update(8)
        always, its_scheduler = new(node, lr=2 * LR)
        advance(always, its_scheduler, 1, 8)
        assert hyperparameters(optimizer) == hyperparameters(always), name


def test_the_horizon_follows_max_update_unless_it_is_given():
    node = {"_target_": OURS + "PolynomialDecay"}
    assert new(node, max_update=100)[1].lr_at(50) == pytest.approx(LR / 2)
    assert new(node | {"total_num_update": 200}, max_update=100)[1].lr_at(50) == pytest.approx(LR * 3 / 4)
    assert new(node | {"total_num_update": 200}, max_update=0)[1].lr_at(50) == pytest.approx(LR * 3 / 4)


@pytest.mark.parametrize("target", ["Cosine", "PolynomialDecay", "TriStage"])
def test_a_missing_horizon_names_both_keys(target):
    with pytest.raises(ConfigError, match=r"optimization\.max_update or lr_scheduler\.total_num_update"):
        new({"_target_": OURS + target}, max_update=0)


@pytest.mark.parametrize(
    "node, words",
    [
        ({"_target_": OURS + "Cosine", "warmup_update": 3}, "warmup_update is unknown .* Did you mean warmup_updates?"),
        ({"_target_": OURS + "Cosin"}, "Did you mean Cosine"),
        ({"_target_": TORCH + "StepLR", "step_size": 3, "gama": 0.1}, "Did you mean gamma?"),
        ({"_target_": TORCH + "StepLR"}, "step_size is needed"),
        ({"_target_": "torch.optim.AdamW"}, "neither"),
        ({"_target_": "os.path.join"}, "not a class"),
        ({"_target_": "no_such_package.X"}, "no module"),
        ({}, "_target_"),
        ({"_target_": OURS + "Fixed", "warmup_updates": -1}, "0 or more"),
        ({"_target_": OURS + "Fixed", "warmup_updates": "many"}, "expected int"),
        ({"_target_": OURS + "Fixed", "warmup_updates": 2.5}, "whole number"),
        ({"_target_": OURS + "Cosine", "min_lr": 1.0}, "above optimization.lr"),
        ({"_target_": OURS + "TriStage", "phase_ratio": [0.5, 0.6, 0.1]}, "add up to 1"),
        ({"_target_": OURS + "TriStage", "phase_ratio": [0.5, 0.5, 0], "hold_steps": 3}, "either"),
        ({"_target_": OURS + "TriStage", "final_lr_scale": 0}, "above 0"),
        ({"_target_": OURS + "ReduceLROnPlateau", "lr_shrink": 1.5}, "between 0 and 1"),
        ({"_target_": TORCH + "OneCycleLR", "max_lr": 0.1}, "OneCycleLR refuses"),
    ],
)
def test_impossible_settings_name_the_key(node, words):
    with pytest.raises(ConfigError, match=words):
        new(node)


def test_numbers_written_as_text_and_whole_floats_are_numbers():
    _, scheduler = new({"_target_": OURS + "Cosine", "warmup_updates": 5.0, "min_lr": "1e-3"})
    assert (scheduler.warmup_updates, scheduler.min_lr) == (5, 1e-3)
    assert isinstance(scheduler.warmup_updates, int)


def test_plateau_waits_for_patience_and_for_the_warmup():
    optimizer, scheduler = new({"_target_": OURS + "ReduceLROnPlateau", "lr_patience": 1, "warmup_updates": 4})
    scheduler.step_update(2)
    scheduler.step(1, 1.0)
    assert scheduler.best is None
    scheduler.step_update(4)
    lrs = [scheduler.step(1, score) for score in (1.0, 1.0, 1.0, 0.5, 0.6, None, 0.5)]
    assert lrs == pytest.approx([LR, LR, LR / 10, LR / 10, LR / 10, LR / 10, LR / 100])
    assert optimizer.param_groups[1]["lr"] == pytest.approx(LR / 200)


def test_plateau_can_maximize_and_ignores_what_is_not_a_number():
    _, scheduler = new({"_target_": OURS + "ReduceLROnPlateau", "maximize": True, "lr_patience": 9})
    for score, best in ((0.1, 0.1), (0.3, 0.3), (float("nan"), 0.3), (float("inf"), 0.3), (0.2, 0.3)):
        scheduler.step(1, score)
        assert scheduler.best == best


def test_plateau_without_its_state_is_back_at_optimization_lr():
    optimizer, scheduler = new(PURE["plateau"])
    advance(optimizer, scheduler, 1, 30)
    assert scheduler.get_lr() < LR
    _, reset = new(PURE["plateau"])
    assert reset.step_update(30) == LR


def test_plateau_takes_the_best_score_of_a_foreign_state():
    _, scheduler = new(PURE["plateau"])
    scheduler.load_state_dict({"best": 4.907, "last_epoch": 3})
    assert (scheduler.best, scheduler.factor) == (4.907, 1.0)


def test_no_key_of_a_scheduler_stays_behind_when_it_is_rebuilt():
    optimizer, scheduler = new(FROM_TORCH["OneCycleLR"])
    scheduler.step_update(9)
    scheduler._rebuild()
    fresh, _ = new(FROM_TORCH["OneCycleLR"])
    assert hyperparameters(optimizer) == hyperparameters(fresh)
    assert set(SCHEDULER_KEYS) - {"min_lr", "base_momentum"} <= optimizer.param_groups[0].keys()


def test_group_scales_hold_for_schedulers_with_rates_of_their_own():
    optimizer, scheduler = new(FROM_TORCH["OneCycleLR"])
    for update in (0, 5, 20):
        scheduler.step_update(update)
        first, second = optimizer.param_groups
        assert second["lr"] == pytest.approx(first["lr"] / 2)


BY_A_TASK = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda u: 0.9**u),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 9, 9]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, HORIZON + 1),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
}


@pytest.mark.parametrize("name", BY_A_TASK)
def test_a_scheduler_that_a_task_builds_itself_resumes_anywhere(name):
    def built():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=LR, momentum=0.9)
        return optimizer, adapt_scheduler(BY_A_TASK[name](optimizer), optimizer, LR)

    optimizer, scheduler = built()
    through = advance(optimizer, scheduler, 1, HORIZON)
    for stop in (0, 1, 9, 30):
        optimizer, scheduler = built()
        advance(optimizer, scheduler, 1, stop)
        state = OmegaConf.to_container(OmegaConf.create(scheduler.state_dict()))
        for with_state in (True, False):
            optimizer, scheduler = built()
            if with_state:
                scheduler.load_state_dict(state)
            scheduler.step_update(stop)
            assert advance(optimizer, scheduler, stop + 1, HORIZON) == through[stop:]


def test_a_scheduler_of_another_kind_is_refused():
    schedule = new(PURE["fixed"])[1]
    assert adapt_scheduler(schedule, schedule.optimizer, LR) is schedule
    with pytest.raises(ConfigError, match="build_lr_scheduler returned int"):
        adapt_scheduler(3, schedule.optimizer, LR)


OPTIONS = sorted((Path(__file__).parents[1] / "configs/lr_scheduler").glob("*.yaml"))


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: path.stem)
def test_every_option_of_the_group_builds_and_knows_its_fields(path):
    checkpoint = {"maximize_best_checkpoint_metric": True}
    cfg = OmegaConf.create({"checkpoint": checkpoint, "lr_scheduler": OmegaConf.load(path)})
    _, scheduler = new(cfg.lr_scheduler, max_update=10000)
    fields = set(inspect.signature(type(scheduler)).parameters) - {"optimizer", "lr", "max_update"}
    assert fields == set(cfg.lr_scheduler) - {"_target_"}
    for name in fields - {"maximize"}:
        assert inspect.signature(type(scheduler)).parameters[name].default == cfg.lr_scheduler[name], name
