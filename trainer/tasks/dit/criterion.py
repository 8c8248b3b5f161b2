"""The loss of a diffusion model, by fairseq's contract: (model, sample) -> (sum, sample size, sums to log).

Owns: the draw of timestep and noise for each image. It draws from torch's default generator, which the Trainer seeds
by the position of the micro-batch. Must not know: the Trainer, the dataset.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.tasks.dit.diffusion import build_diffusion


class DiffusionCriterion(nn.Module):
    """Hybrid diffusion loss (noise MSE, plus the variational bound where the model learns its variance), no parameters.

    Args: diffusion_steps: steps of the process, at least 1; the official recipe has 1,000.
          noise_schedule: linear (official) or squaredcos_cap_v2.
    """

    def __init__(self, diffusion_steps: int = 1000, noise_schedule: str = "linear") -> None:
        super().__init__()
        self.diffusion_steps, self.noise_schedule = diffusion_steps, noise_schedule
        self.diffusion = build_diffusion(diffusion_steps, noise_schedule)

    def forward(self, model: nn.Module, sample: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Sample: images [B, C, S, S] and labels int64 [B]. The sample size is B; a loss is a mean over its values."""
        images, labels = sample
        t = torch.randint(0, self.diffusion.num_timesteps, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        losses = self.diffusion.training_losses(lambda x, t: model(x, t, labels), images, t, noise)
        sums = {name: values.sum() for name, values in losses.items()}
        return sums["loss"], len(images), {name: value.detach() for name, value in sums.items()}
