"""A task of one's own: tell handwritten digits apart. All that fairtrain needs to know about it stands here."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trainer import Trainer


class Digits(Trainer):
    @dataclass
    class Config:  # what `task.<name>=` can set; mistyped names and wrong types are refused before anything is built
        hidden: int = 64
        dropout: float = 0.2
        noise: float = 0.1  # standard deviation, drawn anew for each image in each epoch

    def build_model(self):
        task = self.cfg.task
        hidden = nn.Linear(64, task.hidden), nn.ReLU(), nn.Dropout(task.dropout)
        return nn.Sequential(*hidden, nn.Linear(task.hidden, 10))

    def build_dataset(self, split):
        from sklearn.datasets import load_digits

        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        chosen = torch.arange(len(labels)) % 5 == 0
        chosen = ~chosen if split == "train" else chosen  # every fifth image is held out
        noise = self.cfg.task.noise if split == "train" else 0.0
        return Images(images[chosen].float() / 16, labels[chosen], noise)

    def compute_loss(self, sample):  # sums, not means: the Trainer divides by the global sample size
        images, labels = sample
        logits = self.model(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss, labels.numel(), {"loss": loss.detach(), "accuracy": (logits.argmax(-1) == labels).sum()}


class Images:
    def __init__(self, images, labels, noise):
        self.images, self.labels, self.noise = images, labels, noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index] + self.noise * torch.randn(64), self.labels[index]
