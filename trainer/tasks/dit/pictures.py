"""Samples as a picture: a grid of images in one PNG.

Owns: the layout of the grid and the scale at which small images can be seen. Must not know: models, the Trainer.
"""

from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ConfigError

SMALLEST_TILE = 48  # pixels: smaller images are enlarged


def grid_image(images: Tensor, columns: int, gap: int = 1) -> Tensor:
    """Images [N, C, S, S] in [-1, 1], row by row, to one picture uint8 [height, width, 3] with white lines between.

    One channel is grey, three are colour, of four or more (latents) the first three are taken for colours.
    """
    images = images.detach().float().cpu()
    colours = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images[:, :3]
    colours = torch.cat([colours, torch.ones(len(images), 3 - colours.shape[1], *images.shape[2:])], dim=1)
    scale = math.ceil(SMALLEST_TILE / images.shape[-1])
    if scale > 1:  # smoothly: strokes of a few large squares are hard to read
        colours = F.interpolate(colours.clamp(-1, 1), scale_factor=scale, mode="bicubic")
    tiles = ((colours.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    rows, side = math.ceil(len(tiles) / columns), tiles.shape[-1] + gap
    picture = torch.full((rows * side + gap, columns * side + gap, 3), 255, dtype=torch.uint8)
    for i, tile in enumerate(tiles):
        top, left = gap + i // columns * side, gap + i % columns * side
        picture[top : top + side - gap, left : left + side - gap] = tile.permute(1, 2, 0)
    return picture


def write_grid(images: Tensor, path: str | os.PathLike, columns: int) -> None:
    """Write images [N, C, S, S] in [-1, 1] as a PNG with `columns` images in a row; folders are made as needed."""
    image_class = pillow().fromarray(grid_image(images, columns).numpy())
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    image_class.save(path, format="PNG")


def pillow():
    """The module PIL.Image, or a ConfigError that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("Images need Pillow: pip install 'fairtrain[images]'") from error
    return Image
