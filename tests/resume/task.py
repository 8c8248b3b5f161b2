"""A small task in which everything that a resume can lose is there: dropout, per-sample noise, a buffer that training
changes, a tied weight, a frozen one, a criterion with a parameter, task state, EMA. And a way to be stopped at a point.

The environment variable TEST_STOP = "UPDATE:MICRO_BATCH:RANK:SIGNAL" sends SIGNAL to the rank itself while it computes
that micro-batch of that update (updates counted from 1); "valid:UPDATE:RANK:SIGNAL" does so during a validation.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trainer import Trainer

FEATURES = 6


class NoisyRows:
    """Rows of a fixed table, each with noise of its own per epoch."""

    def __init__(self, num_samples: int, seed: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, FEATURES, generator=generator)
        self.y = self.x @ torch.randn(FEATURES, 2, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index] + self.noise * torch.randn(FEATURES), self.y[index]


class Net(nn.Module):
    def __init__(self, follow_mean: bool = True) -> None:
        super().__init__()
        self.follow_mean = follow_mean
        self.first = nn.Linear(FEATURES, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.head = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.training and self.follow_mean:
            with torch.no_grad():
                self.mean.lerp_(h.float().mean(0), 0.1)
        h = F.dropout(torch.tanh(self.second(h - self.mean)), 0.2, self.training)
        return self.head(torch.tanh(self.tied(h)) + self.frozen) * self.scale


class Loss(nn.Module):
    def __init__(self, follow_scale: bool = True) -> None:
        super().__init__()
        self.follow_scale = follow_scale
        self.temperature = nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))  # follows the loss in training, and in training alone

    def forward(self, model: nn.Module, sample):
        x, y = sample
        error = F.dropout((model(x).float() - y).square().sum(-1), 0.1, self.training) / self.scale.clone()
        if self.training and self.follow_scale:
            self.scale.lerp_(error.detach().mean().clamp(0.5, 2.0), 0.1)
        loss = (error * torch.exp(-self.temperature) + self.temperature).sum()
        return loss, len(y), {"loss": loss.detach(), "error": error.detach().sum()}


class Toy(Trainer):
    @dataclass
    class Config:
        num_samples: int = 53
        num_valid: int = 11
        noise: float = 0.1
        follow_mean: bool = True  # a buffer that training changes: rank 0's micro-batches decide what it becomes

    num_seen = 0

    def build_model(self) -> nn.Module:
        return Net(self.cfg.task.follow_mean)

    def build_criterion(self) -> nn.Module:
        return Loss(self.cfg.task.follow_mean)

    def build_dataset(self, split: str) -> NoisyRows:
        task = self.cfg.task
        return NoisyRows(task.num_samples, 1, task.noise) if split == "train" else NoisyRows(task.num_valid, 2, task.noise)

    def train_step(self, samples):
        self._micro_batch = 0
        stats = super().train_step(samples)
        self.num_seen += 1
        return stats

    def compute_loss(self, sample):
        if self.model.training:
            stop_if_asked(self.get_num_updates() + 1, self._micro_batch, self.data_parallel_rank)
            self._micro_batch += 1
        else:
            stop_if_asked("valid", self.get_num_updates(), self.data_parallel_rank)
        return super().compute_loss(sample)

    def task_state_dict(self) -> dict:
        return {"num_seen": self.num_seen, "words": ["a", "b"], "table": torch.arange(3)}

    def load_task_state_dict(self, state: dict) -> None:
        self.num_seen = state["num_seen"]


class ModelOnly(Toy):
    """Without a criterion that has parameters of its own, as a model of another program comes."""

    def build_criterion(self) -> None:
        return None

    def compute_loss(self, sample):
        x, y = sample
        loss = (self.model(x).float() - y).square().sum()
        return loss, len(y), {"loss": loss.detach()}


def stop_if_asked(*place) -> None:
    *wanted, name = os.environ.get("TEST_STOP", ":").split(":")
    if wanted == [str(part) for part in place]:
        del os.environ["TEST_STOP"]  # once
        os.kill(os.getpid(), getattr(signal, name))


class ToyFromMeta(Toy):
    """The same, its model built without memory and filled by init_weights."""

    def init_weights(self, model: nn.Module) -> None:
        for layer in (model.first, model.second, model.tied, model.head):
            nn.init.kaiming_uniform_(layer.weight)
            nn.init.trunc_normal_(layer.bias, std=0.1)
        nn.init.ones_(model.scale)
        model.frozen.copy_(torch.randn(8))
        model.mean.zero_()
