"""Tensors of an open checkpoint as tensors of a file that is to be written, values passed on piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from checkpoint_file import TensorRef
from checkpoint_file.nests import map_leaves
from trainer.tools.opened import Checkpoint
from trainer.tools.streamed import Computed


def copied(checkpoint: Checkpoint, nest: Any, dtype: torch.dtype | None = None) -> Any:
    """The nest with a Computed tensor for each tensor of the checkpoint; what was one tensor is one again.

    dtype: of floating-point tensors, None leaves them as they are.
    """
    made: dict[tuple, Computed] = {}

    def computed(ref: TensorRef) -> Computed:
        key = (ref._record, ref._offset, tuple(ref.shape), ref._stride, ref.dtype)
        if key not in made:
            changed = dtype if dtype is not None and ref.dtype.is_floating_point else ref.dtype
            made[key] = Computed(changed, tuple(ref.shape), lambda begin, end: _elements(checkpoint, ref, begin, end))
        return made[key]

    return map_leaves(nest, (TensorRef,), computed)


def _elements(checkpoint: Checkpoint, ref: TensorRef, begin: int, end: int) -> Iterator[Tensor]:
    return checkpoint.pieces(ref, begin, end)
