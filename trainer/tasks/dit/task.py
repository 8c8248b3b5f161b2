"""Class-conditional diffusion on a folder of images or latents: a DiT, the diffusion loss, pictures on the way.

Owns: how the data and the model are made to agree, what is drawn after a validation.
Must not know: how an image is read (images.py), what the network and the loss compute (model.py, diffusion.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from trainer import Trainer
from trainer.data import valid_subsets
from trainer.errors import ConfigError
from trainer.meta_build import init_weights_of
from trainer.randomness import derive_seed, seed_all
from trainer.tasks.dit.diffusion import build_diffusion, sample_classes
from trainer.tasks.dit.images import FolderDataset, Listing, list_split, read_latent
from trainer.tasks.dit.model import DiT
from trainer.tasks.dit.pictures import write_grid

logger = logging.getLogger(__name__)


def _setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


class DiffusionTask(Trainer):
    """What the diffusion tasks share: drawing samples from the model that is being trained, always the same ones."""

    @property
    def init_weights(self) -> Callable[[torch.nn.Module], None] | None:
        return init_weights_of(self.cfg.model, DiT)

    def draw(self, labels: list[int], steps: int, cfg_scale: float, clip: bool) -> Tensor:
        """One image per label [N, C, S, S] on the CPU, from the average of the weights where there is one.

        A function of the weights, common.seed, num_updates and the arguments: not of how the run got here. It draws
        from the default generators, which are seeded anew before each update.
        """
        criterion = self.criterion
        diffusion = build_diffusion(criterion.diffusion_steps, criterion.noise_schedule, steps).to(self.device)
        cfg_scale = cfg_scale if self.model.class_dropout_prob > 0 else 1.0  # without "no class" nothing guides
        averaged = self.ema is not None
        was_training = self.model.training
        with self.ema.swapped_in(self.model) if averaged else contextlib.nullcontext():
            self.model.eval()
            seed_all(derive_seed("sample", self.cfg.common.seed, self.get_num_updates()))
            try:
                with self.precision.autocast():
                    images = sample_classes(
                        self.model, diffusion, torch.tensor(labels, device=self.device), cfg_scale, clip
                    )
            finally:
                self.model.train(was_training)
        return images.float().cpu()

    def write_picture(self, images: Tensor, name: str, columns: int) -> str:
        """Write images as `name` in the folder of the run; returns its path."""
        path = os.path.join(self.cfg.run_dir, name)
        write_grid(images, path, columns)
        return path


class ClassConditionalImages(DiffusionTask):
    """Learn to draw the classes of a folder: DATA/<class>/<image or latent>, see images.py.

    model.input_size, in_channels and num_classes follow from the data where they are null, else they must agree.
    """

    @dataclass
    class Config:
        data: Optional[str] = _setting(None, "folder with one folder of images (or latents: .npy, .pt) for each class")
        image_size: Optional[int] = _setting(
            None, "images: side in pixels they are cropped to, null: model.input_size; latents: null, their own size"
        )
        valid_fraction: float = _setting(
            0.0, "share of each class held out to validate on where there is no DATA/val, 0 up to below 1; 0: none"
        )
        flip: bool = _setting(True, "mirror half of the training images; of latents stored in variants draw one")
        latent_scale: float = _setting(
            1.0, "what stored latents are multiplied by; 0.18215 for those of the usual autoencoder, if not yet scaled"
        )
        sample_num_classes: int = _setting(
            8, "classes in the picture that is written after a validation; 0: no picture"
        )
        sample_steps: int = _setting(50, "steps of sampling for that picture, 1 up to criterion.diffusion_steps")
        sample_cfg_scale: float = _setting(4.0, "classifier-free guidance of that picture; 1: none")

    # ---- build ----

    def build_model(self) -> torch.nn.Module:
        task = self.cfg.task
        problems = config_problems(task, self.cfg.criterion)
        if problems:
            raise ConfigError("; ".join(problems))
        split = valid_subsets(self.cfg.dataset)[0] if self.evaluates_only else self.cfg.dataset.train_subset
        fit_model_to_data(self.cfg.model, task.image_size, self._listing(split), self.evaluates_only)
        return super().build_model()

    def build_dataset(self, split: str) -> Any:
        listing = self._listing(split)
        if listing is None:
            return []
        task, model = self.cfg.task, self.cfg.model
        logger.info(
            "%s: %d %s of %d classes in %s",
            split,
            len(listing.names),
            "latents" if listing.are_latents else "images",
            len(listing.classes),
            listing.root,
        )
        augment = task.flip and split == self.cfg.dataset.train_subset
        return FolderDataset(listing, model.input_size, model.in_channels, augment, task.latent_scale)

    def _listing(self, split: str) -> Listing | None:
        task = self.cfg.task
        name = "train" if split == self.cfg.dataset.train_subset else split
        return list_split(task.data, name, task.valid_fraction, self.cfg.common.seed)

    # ---- report ----

    def after_validate(self, stats: dict[str, float]) -> None:
        """Rank 0 writes samples/update_N.png: the first classes, one image each."""
        task, model = self.cfg.task, self.model
        if task.sample_num_classes == 0 or not (self.is_data_parallel_master or self.forward_is_collective):
            return
        labels = list(range(min(task.sample_num_classes, model.num_classes)))
        images = self.draw(labels, task.sample_steps, task.sample_cfg_scale, clip=model.in_channels in (1, 3))
        if not self.is_data_parallel_master:
            return
        num_updates = self.get_num_updates()
        try:
            path = self.write_picture(images, f"samples/update_{num_updates}.png", columns=4)
        except OSError as error:  # a picture is not worth a run: a full disk is for the next checkpoint to report
            logger.warning("the picture of update %d was not written: %s", num_updates, error)
            return
        self.log_event("sample", num_updates=num_updates, path=path)
        logger.info("samples at update %d: %s", num_updates, path)


def config_problems(task: Any, criterion: Any) -> list[str]:
    """Sentences on values of the section `task` that cannot work."""
    problems = []
    if not task.data:
        problems.append("task.data is not given: the folder with one folder of images for each class")
    if not 0 <= task.valid_fraction < 1:
        problems.append(f"task.valid_fraction is {task.valid_fraction}, it must be 0 or more and below 1")
    if task.image_size is not None and task.image_size < 1:
        problems.append(f"task.image_size is {task.image_size}, it must be 1 or more")
    if task.sample_num_classes < 0:
        problems.append(f"task.sample_num_classes is {task.sample_num_classes}, it must be 0 or more")
    return problems + sampling_problems(task.sample_steps, criterion)


def sampling_problems(sample_steps: int, criterion: Any) -> list[str]:
    """A sentence where more steps of sampling are asked for than the process of cfg.criterion has."""
    if criterion is None:
        return ["criterion is not given: set criterion=diffusion"]
    steps = criterion.get("diffusion_steps", 1000)
    if 1 <= sample_steps <= steps:
        return []
    return [f"task.sample_steps is {sample_steps}, it must be 1 to criterion.diffusion_steps={steps}"]


def fit_model_to_data(model: Any, image_size: int | None, listing: Listing | None, has_some_classes: bool = False) -> None:
    """Fill in what is null of model.input_size, in_channels and num_classes, or say what does not agree.

    `model`: the config's section, changed in place, so that a checkpoint holds what was really built.
    """
    if listing is None:
        raise ConfigError("task.data has nothing to evaluate on: a folder DATA/val, or task.valid_fraction above 0")
    if listing.are_latents:
        shape = read_latent(os.path.join(listing.root, listing.names[0])).shape
        found = {"in_channels": shape[-3], "input_size": shape[-1]}
        what = f"latents of shape {tuple(shape)}"
        if image_size is not None and image_size != shape[-1]:
            raise ConfigError(
                f"task.data holds {what}, which are not resized: task.image_size={image_size} cannot be. "
                "Set task.image_size=null"
            )
    else:
        found = _sizes_for_images(model, image_size)
        what = f"images, cropped to {found['input_size']} x {found['input_size']} pixels"
    if not has_some_classes or model.get("num_classes") is None:  # what is evaluated on need not have all of them
        found["num_classes"] = len(listing.classes)
    reasons = {"num_classes": f"{len(listing.classes)} class folders in {listing.root}"}
    problems = []
    for name, value in found.items():
        if model.get(name) is None:
            model[name] = value
        elif model[name] != value:
            problems.append(
                f"model.{name} is {model[name]}, but task.data has {reasons.get(name, what)}: set model.{name}={value}"
            )
    if problems:
        raise ConfigError("; ".join(problems))


def _sizes_for_images(model: Any, image_size: int | None) -> dict[str, int]:
    size = image_size or model.get("input_size")
    if size is None:
        raise ConfigError(
            "task.data holds images: say to how many pixels they are cropped, for example task.image_size=64"
        )
    return {"in_channels": 1 if model.get("in_channels") == 1 else 3, "input_size": size}
