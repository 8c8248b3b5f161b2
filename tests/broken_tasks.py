"""Tasks that do not continue exactly, each for one reason, which fairtrain-verify-resume must find; and one that does."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from torch import nn

from trainer import Trainer


class Rows:
    """Rows of a fixed table; `shift` is added to what is read."""

    def __init__(self) -> None:
        self.x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index] + self.shift(index)

    def shift(self, index: int) -> float | torch.Tensor:
        return 0.1 * torch.randn(3)  # from the position, as it should be


class Sound(Trainer):
    """Exact: dropout and noise from the global generators, a counter that is saved."""

    num_seen = 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def build_dataset(self, split: str) -> Rows:
        return Rows()

    def scale(self) -> float:
        return 1.0

    def compute_loss(self, sample: torch.Tensor):
        loss = self.model(sample).square().sum() * self.scale()
        if self.model.training:
            self.num_seen += 1
        return loss, len(sample), {"loss": loss.detach()}

    def task_state_dict(self) -> dict:
        return {"num_seen": self.num_seen}

    def load_task_state_dict(self, state: dict) -> None:
        self.num_seen = state["num_seen"]


class ForgetsCounter(Sound):
    """A curriculum that counts updates by itself and does not save the count."""

    difficulty = 0

    def scale(self) -> float:
        if self.model.training:
            self.difficulty += 1
        return 1.0 + 0.1 * self.difficulty


class ForgetsBehindAttributes(Sound):
    """As before, but in a list inside a plain object."""

    def build_model(self) -> nn.Module:
        self.memory = type("Memory", (), {})()
        self.memory.losses = [1.0]
        return super().build_model()

    def scale(self) -> float:
        if self.model.training:
            self.memory.losses.append(self.memory.losses[-1] + 0.5)
        return self.memory.losses[-1]


class OwnGenerator(Sound):
    """Draws noise from a generator that is seeded once."""

    def build_model(self) -> nn.Module:
        self.generator = torch.Generator().manual_seed(5)
        return super().build_model()

    def scale(self) -> float:
        return 1.0 + torch.rand((), generator=self.generator).item()


class DatasetWithGenerator(Sound):
    """The dataset draws from numpy's generator of its own."""

    class Noisy(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.generator = np.random.default_rng(3)

        def shift(self, index: int) -> float:
            return float(self.generator.normal())

    def build_dataset(self, split: str) -> Rows:
        return self.Noisy()


class OrderOfSet(Sound):
    """The order of samples is that of a set of names."""

    class Named(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.order = [int(name.rpartition("_")[2]) for name in {f"sample_{i}" for i in range(24)}]

        def shift(self, index: int) -> torch.Tensor:
            return self.x[self.order[index]]

    def build_dataset(self, split: str) -> Rows:
        return self.Named()


class KnowsItsWorker(Sound):
    """What a sample is depends on how many this worker has read before."""

    class Counting(Rows):
        num_read = 0

        def shift(self, index: int) -> float:
            if torch.utils.data.get_worker_info() is None and os.getpid() == self.parent:
                return 0.0
            self.num_read += 1
            return 0.1 * self.num_read

    def build_dataset(self, split: str) -> Rows:
        made = self.Counting()
        made.parent = os.getpid()
        return made


class RacingKernel(Sound):
    """Stands for a kernel that adds up in any order unless it is told not to."""

    def scale(self) -> float:
        return 1.0 if torch.are_deterministic_algorithms_enabled() else 1.0 + os.urandom(1)[0] * 1e-3


class ReadsClock(Sound):
    """The loss follows the time of day."""

    def scale(self) -> float:
        return 1.0 + time.time() % 1


class FreshEntropy(Sound):
    """Draws from a generator that the system seeds."""

    def scale(self) -> float:
        return 1.0 + os.urandom(1)[0] * 1e-3


class SpoilsWeights(Sound):
    """Changes a weight whenever it loads: what is trained on is not what was saved."""

    def load_task_state_dict(self, state: dict) -> None:
        super().load_task_state_dict(state)
        with torch.no_grad():
            self.model[0].weight[0, 0] += 1.0
