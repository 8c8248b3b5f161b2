"""The diffusion process: official losses and samples, and what a Gaussian process must obey."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.errors import ConfigError
from trainer.tasks.dit.diffusion import (
    GaussianDiffusion,
    build_diffusion,
    cosine_betas,
    ddim_timesteps,
    linear_betas,
    sample_classes,
    spaced_timesteps,
)
from trainer.tasks.dit.model import DiT

FIXTURES = Path(__file__).parent / "fixtures" / "dit"


@pytest.fixture(scope="module")
def official():
    return torch.load(FIXTURES / "dit_reference_diffusion.pt", weights_only=True)


@pytest.fixture(scope="module")
def loud():
    reference = torch.load(FIXTURES / "dit_reference_outputs.pt", weights_only=True)
    model = DiT(**reference["config"]).eval()
    model.load_state_dict(reference["loud_state_dict"])
    return model


def test_losses_at_first_last_and_middle_timesteps_are_the_official_ones(official, loud):
    given = official["losses"]
    with torch.no_grad():
        losses = build_diffusion().training_losses(
            lambda x, t: loud(x, t, given["y"]), given["x"], given["t"], given["noise"]
        )
    for name in ("loss", "mse", "vb"):
        torch.testing.assert_close(losses[name], given[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, steps, ddim, clip, eta",
    [
        ("ancestral", 12, False, False, None),
        ("clipped", 7, False, True, None),
        ("ddim", 10, True, False, 0.0),
        ("ddim_eta", 10, True, True, 0.5),
    ],
)
def test_a_seed_gives_the_official_samples(official, loud, name, steps, ddim, clip, eta):
    torch.manual_seed(5)
    process = build_diffusion(sampling_steps=steps, ddim=ddim)
    ours = sample_classes(loud, process, torch.tensor([3, 7]), cfg_scale=1.5, clip=clip, eta=eta)
    scale = official[name].abs().max().item()
    torch.testing.assert_close(ours / scale, official[name] / scale, rtol=1e-3, atol=1e-4)


def test_sampling_steps_are_the_official_choice(official):
    assert {n: spaced_timesteps(1000, n) for n in official["spaced"]} == official["spaced"]


def test_ddim_steps_have_one_distance():
    assert ddim_timesteps(1000, 50) == list(range(0, 1000, 20))
    with pytest.raises(ConfigError, match="999"):
        ddim_timesteps(1000, 999)


@pytest.mark.parametrize("num_steps", [0, 1001])
def test_more_or_fewer_steps_than_there_are_is_refused(num_steps):
    with pytest.raises(ConfigError, match="sampling steps"):
        spaced_timesteps(1000, num_steps)


@pytest.mark.parametrize("betas", [linear_betas(1000), cosine_betas(1000)])
def test_noising_keeps_unit_variance_and_ends_near_pure_noise(betas):
    process = GaussianDiffusion(betas)
    torch.testing.assert_close(process.sqrt_signal**2 + process.sqrt_noise**2, torch.ones(1000))
    assert process.sqrt_signal[0] > 0.99 and process.sqrt_signal[-1] < 0.01


def test_skipping_steps_keeps_the_noise_of_the_kept_ones():
    whole, spaced = build_diffusion(), build_diffusion(sampling_steps=50)
    torch.testing.assert_close(spaced.sqrt_signal, whole.sqrt_signal[spaced.timesteps])


def test_a_perfect_denoiser_leads_back_to_the_image():
    torch.manual_seed(0)
    image, process = torch.rand(1, 1, 4, 4) * 2 - 1, build_diffusion(sampling_steps=20)

    def perfect(x, t):
        index = torch.searchsorted(process.timesteps, t)
        return (x - process._at("sqrt_signal", index) * image) / process._at("sqrt_noise", index)

    for eta in (None, 0.0):
        torch.testing.assert_close(process.sample(perfect, torch.randn(1, 1, 4, 4), eta=eta), image, atol=2e-2, rtol=0)


def test_the_bound_teaches_the_variance_and_not_the_mean():
    process, clean = build_diffusion(100), torch.zeros(2, 1, 2, 2)
    output = torch.randn(2, 2, 2, 2, requires_grad=True)
    losses = process.training_losses(lambda x, t: output, clean, torch.tensor([0, 50]), torch.randn_like(clean))
    losses["vb"].sum().backward()
    assert output.grad[:, :1].abs().max() == 0 and output.grad[:, 1:].abs().min() > 0


def test_a_model_of_fixed_variance_trains_on_the_error_alone():
    process, clean = build_diffusion(100), torch.zeros(2, 1, 2, 2)
    losses = process.training_losses(
        lambda x, t: torch.zeros_like(x), clean, torch.tensor([0, 99]), torch.ones(2, 1, 2, 2)
    )
    assert set(losses) == {"loss", "mse"} and losses["loss"].tolist() == [1.0, 1.0]


def test_guidance_without_class_dropout_is_refused_with_the_way_out():
    model = DiT(
        input_size=4, in_channels=1, hidden_size=16, depth=1, num_heads=2, num_classes=3, class_dropout_prob=0.0
    )
    with pytest.raises(ConfigError, match="guidance scale of 1"):
        sample_classes(model, build_diffusion(sampling_steps=2), torch.tensor([0]), cfg_scale=4.0)
    assert sample_classes(model, build_diffusion(sampling_steps=2), torch.tensor([0]), cfg_scale=1).shape == (
        1,
        1,
        4,
        4,
    )


def test_an_unknown_schedule_is_named():
    with pytest.raises(ConfigError, match="criterion.noise_schedule=quad"):
        build_diffusion(noise_schedule="quad")


def test_a_linear_schedule_of_too_few_steps_is_refused_rather_than_infinite():
    assert torch.isfinite(build_diffusion(21).sqrt_recip_signal).all()
    with pytest.raises(ConfigError, match="at least 21 steps"):
        build_diffusion(20)
