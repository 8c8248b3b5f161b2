"""Gaussian diffusion: noise an image, score a prediction, walk from noise back to an image.

Owns: noise schedules, the choice of sampling steps, losses per image, the two samplers.
Must not know: what the network is (any callable (x, t) -> output), the Trainer, files.
Sources: Ho et al. 2020 (arXiv:2006.11239), Nichol and Dhariwal 2021 for the learned variance and the hybrid loss
(arXiv:2102.09672), Song et al. 2020 for DDIM (arXiv:2010.02502).

Timesteps count from 0 (nearly clean) to num_timesteps - 1 (nearly pure noise).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError

Denoiser = Callable[[Tensor, Tensor], Tensor]  # (x [B, C, S, S], original timesteps [B]) -> [B, C or 2C, S, S]


def linear_betas(num_steps: int) -> Tensor:
    """Variances added per step, float64 [num_steps]: evenly from 1e-4 to 0.02 at 1,000 steps, scaled for others."""
    scale = 1000 / num_steps
    if scale * 0.02 >= 1:
        raise ConfigError(
            f"criterion.diffusion_steps={num_steps}: the linear schedule needs at least 21 steps, its last "
            "one would leave nothing of the image. Set criterion.noise_schedule=squaredcos_cap_v2 for fewer"
        )
    return torch.linspace(scale * 1e-4, scale * 0.02, num_steps, dtype=torch.float64)


def cosine_betas(num_steps: int, largest: float = 0.999) -> Tensor:
    """Variances that make the share of signal follow a squared cosine, float64 [num_steps]."""
    signal = (
        torch.cos((torch.arange(num_steps + 1, dtype=torch.float64) / num_steps + 0.008) / 1.008 * math.pi / 2) ** 2
    )
    return (1 - signal[1:] / signal[:-1]).clamp(max=largest)


NOISE_SCHEDULES = {"linear": linear_betas, "squaredcos_cap_v2": cosine_betas}


def spaced_timesteps(num_timesteps: int, num_steps: int) -> list[int]:
    """`num_steps` of the timesteps, evenly spread, first and last included (for 1 step: the first)."""
    if not 1 <= num_steps <= num_timesteps:
        raise ConfigError(f"{num_steps} sampling steps asked for, but the process has 1 to {num_timesteps}.")
    stride = (num_timesteps - 1) / (num_steps - 1) if num_steps > 1 else 1.0
    # The official code adds the stride up, and a product would round differently here and there.
    return [round(place) for place in accumulate(chain([0.0], repeat(stride, num_steps - 1)))]


def ddim_timesteps(num_timesteps: int, num_steps: int) -> list[int]:
    """`num_steps` of the timesteps at a whole-numbered distance, from 0 on."""
    for stride in range(1, num_timesteps + 1):
        if len(range(0, num_timesteps, stride)) == num_steps:
            return list(range(0, num_timesteps, stride))
    raise ConfigError(f"No whole stride through {num_timesteps} timesteps gives {num_steps} steps.")


class Step(NamedTuple):
    """What the network says about one step back from x_t: all [B, C, S, S]."""

    mean: Tensor
    log_variance: Tensor
    clean: Tensor  # the image x_0 that it believes in
    noise: Tensor


class GaussianDiffusion(nn.Module):
    """A diffusion process with `num_timesteps` steps; tables are float32 buffers that are in no checkpoint.

    Args: betas: float64 [T], variance added per step. timesteps: those of the original process that are kept
          (default all); the network is asked at the original numbers.
    """

    def __init__(self, betas: Tensor, timesteps: list[int] | None = None) -> None:
        super().__init__()
        kept = torch.arange(len(betas)) if timesteps is None else torch.tensor(sorted(set(timesteps)))
        signal = torch.cumprod(1 - betas, 0)[kept]  # share of variance that is still image
        before = torch.cat([torch.ones(1, dtype=torch.float64), signal[:-1]])
        betas = 1 - signal / before
        variance = betas * (1 - before) / (1 - signal)
        if len(variance) > 1:
            variance = torch.cat([variance[1:2], variance[1:]])  # the true one at t=0 is 0: no logarithm
        tables = {
            "signal": signal,
            "signal_before": before,
            "sqrt_signal": signal.sqrt(),
            "sqrt_noise": (1 - signal).sqrt(),
            "sqrt_recip_signal": (1 / signal).sqrt(),
            "sqrt_recip_minus_one": (1 / signal - 1).sqrt(),
            "log_variance_low": variance.clamp(min=1e-20).log(),
            "log_variance_high": betas.log(),
            "log_variance_fixed": torch.cat([variance[:1], betas[1:]]).log(),
            "clean_weight": betas * before.sqrt() / (1 - signal),
            "noisy_weight": (1 - before) * (1 - betas).sqrt() / (1 - signal),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)
        self.register_buffer("timesteps", kept, persistent=False)
        self.num_timesteps = len(kept)

    def _at(self, name: str, t: Tensor) -> Tensor:
        return getattr(self, name)[t][:, None, None, None]

    def add_noise(self, clean: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t, drawn from q(x_t | x_0) with the given standard normal noise."""
        return self._at("sqrt_signal", t) * clean + self._at("sqrt_noise", t) * noise

    def _posterior_mean(self, clean: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return self._at("clean_weight", t) * clean + self._at("noisy_weight", t) * x

    def step_back(self, output: Tensor, x: Tensor, t: Tensor, clip: bool = False) -> Step:
        """Read the network's output at x_t as a distribution of x_{t-1}; `clip` keeps the believed image in [-1, 1]."""
        noise, spread = output.split(x.shape[1], dim=1) if output.shape[1] == 2 * x.shape[1] else (output, None)
        if spread is None:
            log_variance = self._at("log_variance_fixed", t).expand_as(x)
        else:
            share = (spread + 1) / 2  # -1 is the lower bound, 1 the upper
            log_variance = share * self._at("log_variance_high", t) + (1 - share) * self._at("log_variance_low", t)
        clean = self._at("sqrt_recip_signal", t) * x - self._at("sqrt_recip_minus_one", t) * noise
        if clip:
            clean = clean.clamp(-1, 1)
            noise = (self._at("sqrt_recip_signal", t) * x - clean) / self._at("sqrt_recip_minus_one", t)
        return Step(self._posterior_mean(clean, x, t), log_variance, clean, noise)

    def training_losses(self, denoise: Denoiser, clean: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """The hybrid loss per image, float32 [B] each: "mse" of the noise, "vb" (learned variance only), their "loss".

        "vb" is the term of the variational bound at t in bits per value. It teaches the variance only: the mean in it
        is detached.
        """
        x = self.add_noise(clean, t, noise)
        output = denoise(x, self.timesteps[t]).float()
        predicted, *spread = output.split(x.shape[1], dim=1)
        losses = {"mse": (noise - predicted).square().flatten(1).mean(1)}
        if spread:
            losses["vb"] = self._bound(torch.cat([predicted.detach(), *spread], dim=1), clean, x, t)
        return {"loss": sum(losses.values()), **losses}

    def _bound(self, output: Tensor, clean: Tensor, x: Tensor, t: Tensor) -> Tensor:
        step = self.step_back(output, x, t)
        kl = _normal_kl(
            self._posterior_mean(clean, x, t), self._at("log_variance_low", t), step.mean, step.log_variance
        )
        likelihood = _discrete_log_likelihood(clean, step.mean, 0.5 * step.log_variance)
        per_value = torch.where((t == 0)[:, None, None, None], -likelihood, kl)
        return per_value.flatten(1).mean(1) / math.log(2)

    @torch.no_grad()
    def sample(self, denoise: Denoiser, x: Tensor, clip: bool = False, eta: float | None = None) -> Tensor:
        """Walk from noise x [B, C, S, S] to images of the same shape, through all timesteps of this process.

        Args: eta: None for ancestral sampling; for DDIM its share of fresh noise (0: none, x decides everything).
        Fresh noise comes from torch's default generator, one draw of x's shape per step, the last step included.
        """
        for i in reversed(range(self.num_timesteps)):
            t = torch.full((len(x),), i, device=x.device)
            step = self.step_back(denoise(x, self.timesteps[t]).float(), x, t, clip)
            fresh = torch.randn_like(x)
            if eta is None:
                x = step.mean + (i > 0) * torch.exp(0.5 * step.log_variance) * fresh
            else:
                x = self._ddim_step(step, t, eta, fresh if i > 0 else torch.zeros_like(fresh))
        return x

    def _ddim_step(self, step: Step, t: Tensor, eta: float, fresh: Tensor) -> Tensor:
        signal, before = self._at("signal", t), self._at("signal_before", t)
        sigma = eta * ((1 - before) / (1 - signal)).sqrt() * (1 - signal / before).sqrt()
        return step.clean * before.sqrt() + (1 - before - sigma**2).sqrt() * step.noise + sigma * fresh


def build_diffusion(
    num_steps: int = 1000, noise_schedule: str = "linear", sampling_steps: int | None = None, ddim: bool = False
) -> GaussianDiffusion:
    """The process of `num_steps` steps, or, for sampling, `sampling_steps` of them."""
    if noise_schedule not in NOISE_SCHEDULES:
        raise ConfigError(f"criterion.noise_schedule={noise_schedule} is none of {', '.join(NOISE_SCHEDULES)}.")
    betas = NOISE_SCHEDULES[noise_schedule](num_steps)
    if sampling_steps is None:
        return GaussianDiffusion(betas)
    choose = ddim_timesteps if ddim else spaced_timesteps
    return GaussianDiffusion(betas, choose(num_steps, sampling_steps))


def sample_classes(
    model: nn.Module,
    diffusion: GaussianDiffusion,
    labels: Tensor,
    cfg_scale: float,
    clip: bool = False,
    eta: float | None = None,
    cfg_channels: int | None = 3,
) -> Tensor:
    """One image for each of `labels` [B], drawn with the default generator: [B, in_channels, S, S] on their device.

    A cfg_scale other than 1 guides (classifier-free) and needs a DiT that was trained with class dropout.
    The draws are those of the official script, so that its seeds give its images.
    """
    noise = torch.randn(len(labels), model.in_channels, model.input_size, model.input_size, device=labels.device)
    if cfg_scale == 1:
        return diffusion.sample(lambda x, t: model(x, t, labels), noise, clip, eta)
    if model.class_dropout_prob <= 0:
        raise ConfigError(
            'This DiT was trained with model.class_dropout_prob=0 and knows no "no class": use a guidance scale of 1.'
        )
    both = torch.cat([labels, torch.full_like(labels, model.num_classes)])

    def guided(x: Tensor, t: Tensor) -> Tensor:
        return model.forward_with_cfg(x, t, both, cfg_scale, cfg_channels)

    return diffusion.sample(guided, torch.cat([noise, noise]), clip, eta).chunk(2)[0]


def _normal_kl(mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """KL divergence, in nats, of the first diagonal normal distribution from the second, elementwise."""
    difference = log_variance2 - log_variance1
    return 0.5 * (difference - 1 + torch.exp(-difference) + (mean1 - mean2).square() * torch.exp(-log_variance2))


def _discrete_log_likelihood(values: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Log probability, in nats, of 8-bit values scaled to [-1, 1]: the mass of the normal over each value's bin.

    The outermost bins reach to infinity. The distribution function is the usual tanh approximation.
    """
    half_bin, smallest = 1 / 255, 1e-12

    def cdf(edge: Tensor) -> Tensor:
        z = (edge - mean) * torch.exp(-log_scale)
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    above, below = cdf(values + half_bin), cdf(values - half_bin)
    mass = torch.where(values < -0.999, above, torch.where(values > 0.999, 1 - below, above - below))
    return mass.clamp(min=smallest).log()
