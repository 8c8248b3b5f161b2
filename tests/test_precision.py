"""Losses are scaled so that float16 gradients neither vanish nor overflow, and the scale survives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainer.errors import ConfigError
from trainer.precision import LossScaleFloorError, build_precision

CPU = torch.device("cpu")


def fp16(**fields):
    return build_precision(SimpleNamespace(fp16=True, bf16=False, **fields), CPU)


def test_full_precision_does_nothing():
    precision = build_precision(SimpleNamespace(fp16=False, bf16=False), CPU)
    loss = torch.ones(())
    assert precision.scale(loss) is loss and precision.loss_scale == 1.0 and not precision.can_overflow
    assert precision.autocast() is precision.autocast()
    with precision.autocast(), precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    precision.update(False)
    assert precision.state_dict() == {}


@pytest.mark.parametrize("key, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_computes_in_half_and_keeps_parameters_whole(key, dtype):
    precision = build_precision(SimpleNamespace(**{key: True}), CPU)
    layer = torch.nn.Linear(2, 2)
    with precision.autocast():
        assert layer(torch.ones(1, 2)).dtype == dtype
    assert layer.weight.dtype == torch.float32
    assert layer(torch.ones(1, 2)).dtype == torch.float32


def test_both_halves_at_once_are_refused():
    with pytest.raises(ConfigError, match="common.fp16 and common.bf16"):
        build_precision(SimpleNamespace(fp16=True, bf16=True), CPU)


def test_scaling_and_unscaling_are_exact():
    precision = fp16()
    assert precision.loss_scale == 128
    weight = torch.randn(5, requires_grad=True)
    expected = torch.autograd.grad(weight.square().sum(), weight)[0]
    precision.scale(weight.square().sum()).backward()
    assert torch.equal(weight.grad, expected * 128)
    precision.unscale_([weight.grad])
    assert torch.equal(weight.grad, expected)


def test_the_scale_doubles_after_a_window_without_overflow_and_halves_at_one():
    precision = fp16(fp16_scale_window=3)
    scales = []
    for overflow in (False, False, False, False, True, False, False, True, False, False, False):
        precision.update(overflow)
        scales.append(precision.loss_scale)
    assert scales == [128, 128, 256, 256, 128, 128, 128, 64, 64, 64, 128]


def test_overflows_within_the_tolerance_do_not_halve():
    precision = fp16(fp16_scale_tolerance=0.5)
    scales = []
    for overflow in (False, False, True, True, False):
        precision.update(overflow)
        scales.append(precision.loss_scale)
    assert scales == [128, 128, 128, 64, 64]


def test_a_threshold_holds_the_scale():
    precision = fp16(threshold_loss_scale=64.0)
    for _ in range(5):
        precision.update(True)
    assert precision.loss_scale == 64


def test_the_floor_ends_the_run_with_a_sentence():
    precision = fp16(fp16_init_scale=4, min_loss_scale=1.0)
    precision.update(True, 41)
    with pytest.raises(LossScaleFloorError, match=r"at update 42 .* scale of 2,.*common\.min_loss_scale=1 ") as error:
        precision.update(True, 42)
    assert isinstance(error.value, FloatingPointError)
    assert (precision.loss_scale, error.value.num_updates) == (2, 42)


@pytest.mark.parametrize("stop", range(12))
def test_the_scaler_goes_on_after_a_restore(stop):
    outcomes = [i in (2, 3, 9) for i in range(12)]
    through, resumed = (fp16(fp16_scale_window=5, fp16_scale_tolerance=0.4) for _ in range(2))
    for index, overflow in enumerate(outcomes):
        through.update(overflow)
        resumed.update(overflow)
        if index == stop:
            state = resumed.state_dict()
            resumed = fp16(fp16_scale_window=5, fp16_scale_tolerance=0.4)
            resumed.load_state_dict(state)
        assert resumed.state_dict() == through.state_dict()


def test_a_state_of_float32_or_of_another_program_is_taken_as_far_as_it_goes():
    precision = fp16()
    precision.load_state_dict({})
    assert precision.loss_scale == 128
    precision.load_state_dict({"loss_scale": torch.tensor(32.0)})
    assert precision.loss_scale == 32.0 and isinstance(precision.loss_scale, float)


@pytest.mark.parametrize("fields", [{"fp16_init_scale": 0}, {"min_loss_scale": 256.0}, {"fp16_scale_window": -1}])
def test_impossible_scalers_are_refused(fields):
    with pytest.raises(ConfigError, match="common"):
        fp16(**fields)
