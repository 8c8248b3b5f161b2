"""Cross entropy by fairseq's contract: (model, sample) -> (sum, sample size, sums to log).

Serves every model that gives one row of logits for each target. Must not know: the Trainer, the dataset, the model.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError


class CrossEntropy(nn.Module):
    """Negative log likelihood of the targets in nats, no parameters.

    Args: label_smoothing: share of the target's probability that is spread over all classes, in [0, 1); 0 is off.
              What is trained on is smoothed, `loss` in the log is not when the model is evaluated.
          ignore_index: targets of this value count nothing.
    """

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = -100) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"criterion.label_smoothing must be in [0, 1), got {label_smoothing}")
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index

    def forward(
        self, model: nn.Module, sample: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int | Tensor, dict[str, Tensor]]:
        """Sample: inputs as the model takes them, and targets int64 [...] for logits [..., classes].

        The sample size is the number of targets that count. Logits are taken as float32, also under autocast.
        """
        inputs, targets = sample
        logits = model(inputs).float().flatten(0, -2)
        targets = targets.flatten()
        smoothing = self.label_smoothing if model.training else 0.0
        loss = F.cross_entropy(
            logits, targets, reduction="sum", label_smoothing=smoothing, ignore_index=self.ignore_index
        )
        sample_size = (targets != self.ignore_index).sum()
        return loss, sample_size, {"loss": loss.detach()}
