"""Which samples an update reads: pure functions of (seed, epoch, position).

Owns: the order of an epoch, the batches of a list made by max_tokens, the dealing of micro-batches to ranks.
Knows nothing of datasets, workers or configuration; reads no sample. No generator but its own is touched.

The words: an *order* is what one epoch hands out: a numpy array of sample indices, or a list of batches (lists of
sample indices). A *position* counts the items of the order that all ranks together have used. Micro-batch j of an
update, j = i * world_size + rank for the i-th of that rank, takes the items from position + j * batch_size on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from trainer.errors import ConfigError
from trainer.randomness import derive_seed


@dataclass(frozen=True)
class Batching:
    """What a list of batches depends on. Without `max_tokens` there is no list: the order is one of samples."""

    max_tokens: int | None = None
    batch_size: int | None = None
    multiple: int = 1


class UpdatePlan(NamedTuple):
    """What one rank reads for one update: sample indices per micro-batch, empty where the rank has no samples."""

    indices: list[list[int]]
    first: list[int]  # where a micro-batch of this rank is empty, what stands in for it; else nothing
    end: int  # the position once the update has taken its batch


def sample_order(seed: int, epoch: int, num_samples: int) -> torch.Tensor:
    """The permutation of epoch `epoch`: int64 [num_samples]."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def batch_list(indices: Sequence[int], sizes: np.ndarray, batching: Batching) -> list[list[int]]:
    """Cut `indices` into batches of samples of like length, shortest first, ties in the order given.

    A batch costs the length of its longest sample times its samples (what padding makes of it), at most
    `max_tokens`; it has at most `batch_size` samples, and a multiple of `multiple` or fewer than that.
    Args: sizes, int [num_samples], the tokens of every sample of the dataset.
    """
    assert batching.max_tokens is not None
    indices = np.asarray(indices, dtype=np.int64)
    lengths = np.maximum(np.asarray(sizes)[indices], 1)
    by_length = np.argsort(lengths, kind="stable")
    indices, lengths = indices[by_length].tolist(), lengths[by_length].tolist()
    if lengths and lengths[-1] > batching.max_tokens:
        raise ConfigError(
            f"sample {indices[-1]} has {lengths[-1]} tokens, more than dataset.max_tokens={batching.max_tokens}: "
            f"shorten the samples or set dataset.max_tokens={lengths[-1]} or more"
        )
    batches, begin = [], 0
    while begin < len(indices):
        count = _longest_fit(lengths, begin, batching)
        batches.append(indices[begin : begin + count])
        begin += count
    return batches


def _longest_fit(lengths: list[int], begin: int, batching: Batching) -> int:
    """How many samples of the ascending `lengths` from `begin` on make one batch: at least 1."""
    low, high = 1, min(len(lengths) - begin, batching.max_tokens // lengths[begin])
    if batching.batch_size:
        high = min(high, batching.batch_size)
    while low < high:  # count * longest grows with count, so bisect
        middle = (low + high + 1) // 2
        if middle * lengths[begin + middle - 1] <= batching.max_tokens:
            low = middle
        else:
            high = middle - 1
    return low - low % batching.multiple if low >= batching.multiple else low


def epoch_order(
    seed: int,
    epoch: int,
    num_samples: int,
    batching: Batching,
    sizes: Callable[[], np.ndarray],
    earlier: Sequence[tuple[Batching, int]] = (),
) -> np.ndarray | list[list[int]]:
    """The order of an epoch, or of what is left of it after `earlier` arrangements each gave out some items.

    `earlier` makes a change of max_tokens in mid-epoch exact: what the old list had given out is not given out
    again, and the new list is made of the rest.
    """
    indices = sample_order(seed, epoch, num_samples).numpy()
    for old, taken in earlier:
        indices = _without(indices, _arrange(indices, old, sizes, seed, epoch)[:taken])
    return _arrange(indices, batching, sizes, seed, epoch)


def _arrange(indices: np.ndarray, batching: Batching, sizes: Callable, seed: int, epoch: int):
    if batching.max_tokens is None:
        return indices
    batches = batch_list(indices, sizes(), batching)
    generator = torch.Generator().manual_seed(derive_seed("batches", seed, epoch))
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _without(indices: np.ndarray, taken: np.ndarray | list[list[int]]) -> np.ndarray:
    given_out = np.concatenate(taken) if isinstance(taken, list) and taken else np.asarray(taken, dtype=np.int64)
    return indices[~np.isin(indices, given_out)]


def micro_batch_indices(
    order: np.ndarray | torch.Tensor | list, position: int, j: int, batch_size: int, end: int | None = None
) -> list[int]:
    """The samples of micro-batch j of the update at `position`; fewer than `batch_size`, or none, at the end.

    end: the position where the update ends, None for the end of the order.
    """
    begin = position + j * batch_size
    items = order[begin : begin + batch_size if end is None else min(begin + batch_size, max(begin, end))]
    if isinstance(items, list):
        return [index for batch in items for index in batch]
    return items.tolist()


def num_updates_left(num_items: int, position: int, items_per_update: int, skip_remainder: bool) -> int:
    """How many updates the items from `position` on make; the last, smaller one counts unless it is skipped."""
    left = max(num_items - position, 0)
    return left // items_per_update if skip_remainder else -(-left // items_per_update)


def update_plans(
    order: np.ndarray | list,
    position: int,
    batch_size: int,
    per_update: int,
    rank: int,
    world_size: int,
    skip_remainder: bool = False,
) -> Iterator[UpdatePlan]:
    """The updates from `position` to the end of the epoch, as rank `rank` of `world_size` sees them.

    An update has `per_update` items, dealt in micro-batches of `batch_size`. All ranks have the same number of
    micro-batches in it: as many rows as its items fill, so that only its last row can hold an empty one. Where the
    remainder is skipped, the last update ends at the end of the order: the epoch is over then, whatever a resume
    changes.
    """
    num_items, per_row = len(order), world_size * batch_size
    num_updates = num_updates_left(num_items, position, per_update, skip_remainder)
    for update in range(num_updates):
        filled = min(position + per_update, num_items)
        rows = -(-(filled - position) // per_row)
        indices = [micro_batch_indices(order, position, i * world_size + rank, batch_size, filled) for i in range(rows)]
        # Two samples of the global batch and not one: batch normalisation refuses to train on a single one.
        first = [] if all(indices) else micro_batch_indices(order, position, 0, batch_size, filled)[:2]
        end = num_items if update == num_updates - 1 else filled
        yield UpdatePlan(indices, first, end)
        position = end
