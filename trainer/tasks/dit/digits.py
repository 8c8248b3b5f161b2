"""A small DiT on scikit-learn's handwritten digits: a whole generative run in two minutes on a laptop.

Owns: the split of the 1,797 digits, the picture at the end, and a number for its quality: the share of samples in
which a plain classifier, trained on the real digits, sees the digit that was asked for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.randomness import derive_seed
from trainer.tasks.dit.task import DiffusionTask, _setting, sampling_problems

logger = logging.getLogger(__name__)

NUM_CLASSES, SIDE, WHITE = 10, 8, 16  # classes, pixels, the largest grey value


def load_split(split: str, valid_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [N, 8, 8] from 0 to 16, and labels int64 [N]; a split other than "train" is the held-out part."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError("The digits come with scikit-learn: pip install 'fairtrain[digits]'") from error
    digits = load_digits()
    order = np.random.default_rng(derive_seed("digits", seed)).permutation(len(digits.target))
    held_out = round(valid_fraction * len(order))
    chosen = np.sort(order[held_out:] if split == "train" else order[:held_out])
    return digits.images[chosen].astype(np.float32), digits.target[chosen].astype(np.int64)


class DigitsDataset(torch.utils.data.Dataset):
    """Pairs of an image float32 [1, 8, 8] in [-1, 1] and its label."""

    uses_rng = False

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = torch.from_numpy(images / (WHITE / 2) - 1).unsqueeze(1)
        self.labels = torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class DigitsClassifier:
    """A support vector machine, fitted to real digits."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        from sklearn.svm import SVC

        self._model = SVC(C=10, gamma=0.001).fit(images.reshape(len(images), -1), labels)

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Share of images [N, 8, 8] (0 to 16) in which it sees the digit of the label."""
        return float((self._model.predict(images.reshape(len(images), -1)) == labels).mean()) if len(images) else 0.0


class Digits(DiffusionTask):
    """Learns to draw digits; ends with samples.png and the share of samples that a classifier recognises."""

    @dataclass
    class Config:
        valid_fraction: float = _setting(0.1, "share of the 1,797 digits that is held out, from 0 to below 1")
        samples_per_class: int = _setting(20, "digits of each class drawn at the end, to be judged; 0: none")
        pictured_per_class: int = _setting(12, "how many of them are in the picture, at least 1")
        sample_steps: int = _setting(50, "steps of sampling, 1 up to criterion.diffusion_steps")
        cfg_scale: float = _setting(2.0, "classifier-free guidance of the samples; 1: none")

    # ---- build ----

    def build_model(self) -> torch.nn.Module:
        problems = config_problems(self.cfg)
        if problems:
            raise ConfigError("; ".join(problems))
        return super().build_model()

    def build_dataset(self, split: str) -> DigitsDataset:
        name = "train" if split == self.cfg.dataset.train_subset else split
        return DigitsDataset(*load_split(name, self.cfg.task.valid_fraction, self.cfg.common.seed))

    # ---- report ----

    def after_train(self, *_: Any) -> None:
        """Rank 0 draws the digits, writes the picture, and has them judged."""
        task = self.cfg.task
        if task.samples_per_class == 0 or not (self.is_data_parallel_master or self.forward_is_collective):
            return
        images, labels = self.draw_digits(task.samples_per_class)
        if not self.is_data_parallel_master:
            return
        shown = min(task.pictured_per_class, task.samples_per_class)
        rows = images.unflatten(0, (NUM_CLASSES, task.samples_per_class))[:, :shown].flatten(0, 1)
        path = self.write_picture(rows, "samples.png", columns=shown)
        real, drawn = self._judge(images, labels)
        self.log_event(
            "sample",
            num_updates=self.get_num_updates(),
            path=path,
            accuracy=drawn,
            real_accuracy=real,
            num_samples=len(labels),
            cfg_scale=task.cfg_scale,
            steps=task.sample_steps,
        )
        logger.info("picture: %s (one row for each digit, 0 to 9)", path)
        logger.info(
            "quality: a classifier of real digits sees the digit that was asked for in %.1f %% of %d samples "
            "(held-out real digits: %.1f %%)",
            100 * drawn,
            len(labels),
            100 * real,
        )

    def draw_digits(self, per_class: int) -> tuple[Tensor, np.ndarray]:
        """Samples [10 * per_class, 1, 8, 8] in [-1, 1], class after class, and their labels."""
        labels = np.repeat(np.arange(NUM_CLASSES), per_class)
        return self.draw(labels.tolist(), self.cfg.task.sample_steps, self.cfg.task.cfg_scale, clip=True), labels

    def _judge(self, samples: Tensor, labels: np.ndarray) -> tuple[float, float]:
        """The classifier's accuracy on held-out real digits, and on the samples, brought to whole grey values first."""
        fraction, seed = self.cfg.task.valid_fraction, self.cfg.common.seed
        classifier = DigitsClassifier(*load_split("train", fraction, seed))
        grey = ((samples.squeeze(1) + 1) * (WHITE / 2)).round().clamp(0, WHITE).numpy()
        return classifier.accuracy(*load_split("valid", fraction, seed)), classifier.accuracy(grey, labels)


def config_problems(cfg: Any) -> list[str]:
    """Sentences on settings that cannot work with these digits."""
    task, model, problems = cfg.task, cfg.model, []
    if not 0 <= task.valid_fraction < 1:
        problems.append(f"task.valid_fraction is {task.valid_fraction}, it must be 0 or more and below 1")
    if task.samples_per_class < 0 or task.pictured_per_class < 1:
        problems.append("task.samples_per_class must be 0 or more, task.pictured_per_class 1 or more")
    problems += sampling_problems(task.sample_steps, cfg.criterion)
    wanted = {"input_size": SIDE, "in_channels": 1, "num_classes": NUM_CLASSES}
    problems += [
        f"model.{name} is {model[name]}, but the digits need model.{name}={value}"
        for name, value in wanted.items()
        if name in model and model[name] != value
    ]
    return problems
