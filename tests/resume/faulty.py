"""The toy task, in which chosen places of the data make numbers that are not finite, or ranks that drift apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

import distributed_utils
from tests.resume.task import Loss, Net, Toy
from trainer.sharding import local_of

BAD = float("nan")


class NetWithBuffer(Net):
    """Its buffer takes up whatever goes through, NaN too, as the statistics of a batch norm do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not bool(torch.isfinite(x).all()):
            with torch.no_grad():
                self.mean.add_(x.mean())
        return super().forward(x)


class Faulty(Toy):
    @dataclass
    class Config(Toy.Config):
        bad: list[str] = field(
            default_factory=list
        )  # EPOCH:SAMPLES:KIND, the position behind the bad update; KIND of what

    def build_model(self) -> nn.Module:
        return NetWithBuffer()

    def build_criterion(self) -> nn.Module:
        return Loss()

    def _fault(self) -> str:
        itr = self._train_iterator
        here = f"{itr.epoch}:{itr.samples_in_epoch}:"
        return next((place[len(here) :] for place in self.cfg.task.bad if place.startswith(here)), "")

    def compute_loss(self, sample):
        fault = self._fault() if self.model.training else ""
        is_last_rank = self.data_parallel_rank == self.data_parallel_world_size - 1
        if fault == "input" and is_last_rank:
            x, y = sample
            sample = x * BAD, y
        loss, sample_size, output = super().compute_loss(sample)
        if fault == "gradient" and is_last_rank:
            loss = loss + 0 * torch.sqrt(self.model.scale - self.model.scale.detach())
        return loss, sample_size, output

    def train_step(self, samples):
        stats = super().train_step(samples)
        fault = self._fault()
        with torch.no_grad():
            if fault == "parameter":
                for parameter in self.model.parameters():
                    local_of(parameter).fill_(BAD)
            if fault == "drift" and distributed_utils.get_rank() == 1:
                self.model.head.weight[0, 0] += 0.01
        return stats
