"""Images or latents in a folder of class folders, as a map-style dataset of (values [C, S, S], label).

    DATA/<class>/**/*.png …                    or, with a validation set of its own,
    DATA/train/<class>/…  and  DATA/val/<class>/…

Owns: which files count, their order, how an image is cropped and scaled. Must not know: the Trainer, models.
Files are images, or latents stored as .npy or .pt. Classes are numbered in the order of their names.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.randomness import derive_seed
from trainer.tasks.dit.pictures import pillow

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
LATENT_SUFFIXES = (".npy", ".pt")


class SampleFileError(ValueError):
    """A file of the dataset cannot be read or holds something else than it should; `path` names it."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


@dataclass
class Listing:
    """The files of a folder: `names` relative to `root`, sorted; `labels` int64 and `sizes` (bytes) beside them."""

    root: str
    classes: list[str]
    names: list[str]
    labels: np.ndarray
    sizes: np.ndarray

    @property
    def are_latents(self) -> bool:
        return self.names[0].lower().endswith(LATENT_SUFFIXES)

    def take(self, chosen: np.ndarray) -> Listing:
        """The files whose indices are in `chosen`, in that order."""
        return Listing(
            self.root, self.classes, [self.names[i] for i in chosen], self.labels[chosen], self.sizes[chosen]
        )


def list_files(root: str, classes: list[str] | None = None) -> Listing:
    """All images or latents below the class folders of `root`; hidden names and other files are passed over.

    `classes`: those that labels count in, where they are given by another folder (training).
    Raises: ConfigError if there are no class folders, a class has no file, or images and latents are mixed.
    """
    found = _folders(root)
    classes = found if classes is None else classes
    unknown = sorted(set(found) - set(classes))
    if not found or unknown:
        problem = (
            f"has classes that training has not: {', '.join(unknown[:10])}" if unknown else "holds no class folders"
        )
        raise ConfigError(
            f"task.data: {root} {problem}. Expected are images in {os.path.join(root, '<class>', '<file>')}."
        )
    files = []
    for name in found:
        of_class = sorted(_walk(root, name))
        if not of_class:
            raise ConfigError(f"task.data: the class folder {os.path.join(root, name)} holds no image and no latent.")
        files += [(path, classes.index(name), size) for path, size in of_class]
    kinds = {path.lower().endswith(LATENT_SUFFIXES): path for path, _, _ in files}
    if len(kinds) == 2:
        raise ConfigError(f"task.data: {root} mixes images ({kinds[False]}) with latents ({kinds[True]}).")
    names, labels, sizes = zip(*files)
    return Listing(root, classes, list(names), np.array(labels, dtype=np.int64), np.array(sizes, dtype=np.int64))


def list_split(data: str, split: str, valid_fraction: float, seed: int) -> Listing | None:
    """The files of `split`: "train", or any other name for those to validate on; None where there are none.

    A folder DATA/val is the validation set. Without it, `valid_fraction` of each class is held out, chosen by `seed`.
    """
    data = os.path.abspath(os.path.expanduser(data))
    if not os.path.isdir(data):
        raise ConfigError(f"task.data={data} is no folder.")
    train_root, valid_root = os.path.join(data, "train"), os.path.join(data, "val")
    train_root = train_root if os.path.isdir(train_root) else data
    if split != "train" and os.path.isdir(valid_root) and not _folders(train_root):
        return list_files(valid_root)  # evaluated without the training data: the classes are those that are there
    train = list_files(train_root)
    if os.path.isdir(valid_root):
        return train if split == "train" else list_files(valid_root, train.classes)
    held_out = _held_out(train.labels, valid_fraction, seed)
    if split != "train" and not held_out.any():
        return None
    return train.take(np.flatnonzero(~held_out if split == "train" else held_out))


def _held_out(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Which samples are kept for validation: bool [N], the same share of every class; one of each class stays."""
    generator = np.random.default_rng(derive_seed("held out", seed))
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        chosen[members[: min(round(fraction * len(members)), len(members) - 1)]] = True
    return chosen


def _folders(root: str) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(".") and e.name != "val")


def _walk(root: str, folder: str) -> list[tuple[str, int]]:
    """(name relative to root with '/', size in bytes) of the samples below root/folder."""
    found = []
    with os.scandir(os.path.join(root, folder)) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                found += _walk(root, name)
            elif entry.name.lower().endswith(IMAGE_SUFFIXES + LATENT_SUFFIXES):
                found.append((name, entry.stat().st_size))
    return found


class FolderDataset(torch.utils.data.Dataset):
    """The files of a listing as (values float32 [C, S, S], label int).

    Args:
        size: side of the square that images are cropped to; latents must have it.
        channels: 1 or 3 for images; latents must have as many.
        augment: draw a random flip (images) or one of the stored variants (latents) from the default generator.
        latent_scale: what stored latents are multiplied by.
    """

    def __init__(
        self, listing: Listing, size: int, channels: int, augment: bool = False, latent_scale: float = 1.0
    ) -> None:
        self.root, self.size, self.channels, self.latent_scale = listing.root, size, channels, latent_scale
        self.labels, self.are_latents = listing.labels, listing.are_latents
        self.augment = self.uses_rng = augment
        # One block of bytes: a list of a million strings is copied page by page into every worker as it is touched.
        encoded = [os.fsencode(name) for name in listing.names]
        self._ends = np.cumsum([len(name) for name in encoded])
        self._names = b"".join(encoded)
        content = (
            "\0".join([*listing.classes, *listing.names]).encode(errors="surrogateescape") + listing.sizes.tobytes()
        )
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        begin = self._ends[index - 1] if index else 0
        return os.path.join(self.root, os.fsdecode(self._names[begin : self._ends[index]]))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.path(index)
        values = self._latent(path) if self.are_latents else self._image(path)
        return values, int(self.labels[index])

    def _image(self, path: str) -> Tensor:
        pixels = read_image(path, self.size, self.channels)
        if self.augment and torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()) / 127.5 - 1

    def _latent(self, path: str) -> Tensor:
        latent = read_latent(path)
        if latent.ndim == 4:
            latent = latent[torch.randint(len(latent), ()) if self.augment else 0]
        expected = (self.channels, self.size, self.size)
        if tuple(latent.shape) != expected:
            raise SampleFileError(path, f"latent of shape {tuple(latent.shape)}, the model takes {expected}")
        return latent.float() * self.latent_scale


def read_image(path: str, size: int, channels: int) -> np.ndarray:
    """An image file as uint8 [size, size, channels], its centre, shrunk as in the ADM recipe."""
    image_module = pillow()
    try:
        with image_module.open(path) as image:
            image = image.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:  # what PIL raises
        raise SampleFileError(path, f"not a readable image ({type(error).__name__}: {error})") from error
    return centre_crop(image, size).reshape(size, size, channels)


def centre_crop(image: Any, size: int) -> np.ndarray:
    """Bring a PIL image's shorter side to `size` and cut out the centre square.

    Halved by box filter while that leaves at least `size`, then resized bicubically: the steps of Dhariwal and Nichol
    2021, arXiv:2105.05233, which the DiT recipe uses, so that pixels equal theirs.
    """
    resampling = pillow().Resampling
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resampling.BOX)
    factor = size / min(image.size)
    image = image.resize((round(image.width * factor), round(image.height * factor)), resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return np.asarray(image)[top : top + size, left : left + size]


def read_latent(path: str) -> Tensor:
    """A stored latent [C, S, S], or a stack of variants of one sample [K, C, S, S]. Runs no code from the file."""
    try:
        latent = (
            torch.from_numpy(np.load(path)) if path.lower().endswith(".npy") else torch.load(path, weights_only=True)
        )
    except Exception as error:  # unpickling a damaged file raises nearly anything
        raise SampleFileError(path, f"not a readable latent ({type(error).__name__}: {error})") from error
    if not isinstance(latent, Tensor) or latent.ndim not in (3, 4) or not latent.is_floating_point():
        raise SampleFileError(path, "a latent must be one tensor of floats [C, S, S] or [K, C, S, S]")
    return latent
