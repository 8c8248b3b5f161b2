"""Batches for training and validation, and where in the data a run is.

Owns: the settings of the section `dataset`, the position in an epoch, its state in a checkpoint.
The order is data_order's, reading is data_workers'. Must not know: the Trainer, process groups, devices. Rank and
number of ranks are plain arguments, so that anybody can ask what any rank would read.

    itr = EpochBatchIterator(dataset, cfg.dataset, seed, epoch=1, update_freq=2, rank=0, world_size=4)
    while itr.epoch <= max_epoch:
        for samples in itr.next_epoch_itr():        # a list: one collated micro-batch for each of update_freq
            trainer.train_step(samples)             # itr.state_dict() is the position behind these samples
        ...                                         # validate, save: the state is (epoch, all samples)
        itr.finish_epoch()                          # the state is (epoch + 1, 0)
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

import numpy as np

from trainer.data_order import (
    Batching,
    UpdatePlan,
    batch_list,
    epoch_order,
    micro_batch_indices,
    num_updates_left,
    sample_order,
    update_plans,
)
from trainer.data_workers import DatasetError, Fetcher, WorkerPool, collation_of
from trainer.errors import ConfigError
from trainer.foreign.position import ELSEWHERE, position_here

logger = logging.getLogger(__name__)

BEYOND_AN_EPOCH = (
    "optimization.global_batch_size=%d is more than the %d samples of dataset.train_subset=%s: an update has a whole epoch"
)

__all__ = [
    "BatchIterator",
    "DataChangedError",
    "DatasetConfig",
    "DatasetError",
    "DummyBatch",
    "EpochBatchIterator",
    "batch_list",
    "micro_batch_indices",
    "sample_order",
    "valid_batches",
    "valid_subsets",
]

_RESET = "checkpoint.reset_dataloader=true"


def _setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass
class DatasetConfig:
    """The section `dataset`."""

    num_workers: int = _setting(0, "processes of each rank that read samples; 0: the trainer's own process reads")
    prefetch_factor: int = _setting(2, "micro-batches that each worker reads ahead, at least 1")
    batch_size: Optional[int] = _setting(None, "samples of one rank in one micro-batch, at least 1; null: no limit")
    max_tokens: Optional[int] = _setting(
        None, "padded tokens of one rank in one micro-batch, at least 1 (the dataset must have `sizes` or `num_tokens(i)`); null: no limit"
    )
    required_batch_size_multiple: int = _setting(
        1, "batches have a multiple of this many samples, at least 1; only what is left over is smaller"
    )
    batch_size_valid: Optional[int] = _setting(None, "batch_size of validation, at least 1; null: as in training")
    train_subset: str = _setting("train", "the split that is trained on")
    valid_subset: Optional[str] = _setting("valid", "splits to validate on, separated by commas; null or empty: none")
    validate_interval: int = _setting(1, "validate after every so many epochs; 0: not at the end of epochs")
    validate_interval_updates: int = _setting(0, "validate after every so many updates too; 0: not between epochs")

    def problems(self) -> list[str]:
        """Sentences on values that cannot work. Any object with these attributes may stand for self."""
        lowest = {"num_workers": 0, "prefetch_factor": 1, "batch_size": 1, "max_tokens": 1, "batch_size_valid": 1}
        lowest |= {"required_batch_size_multiple": 1, "validate_interval": 0, "validate_interval_updates": 0}
        found = []
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and value < low:
                found.append(f"dataset.{name} is {value}, but must be at least {low}: set dataset.{name}={low} or more")
        multiple = self.required_batch_size_multiple
        for name in ("batch_size", "batch_size_valid"):
            value = getattr(self, name)
            if value and not self.max_tokens and multiple > 0 and value % multiple:
                found.append(
                    f"dataset.{name} is {value}, not a multiple of dataset.required_batch_size_multiple={multiple}: "
                    f"set dataset.{name}={max(value - value % multiple, multiple)}"
                )
        return found


class DataChangedError(ConfigError):
    """The checkpoint's position was taken in other data than what is here now."""

    def __init__(self, what: str, saved: Any, now: Any) -> None:
        super().__init__(what, saved, now)
        self.what, self.saved, self.now = what, saved, now

    def __str__(self) -> str:
        return (
            f"the training data changed: {self.what} was {self.saved!r} when the checkpoint was saved and is "
            f"{self.now!r} now, so its position means nothing here. To start the data again from epoch 1, add: {_RESET}"
        )


@dataclass
class DummyBatch:
    """Stands where this rank has no samples for a micro-batch that other ranks have: run it, count nothing of it.

    `sample` is the first samples of the global batch, two where there are two, collated.
    """

    sample: Any


class EpochBatchIterator:
    """The training batches of one rank, epoch after epoch, from any position on.

    Args:
        dataset: map-style. May have `sizes` or `num_tokens(i)` (needed for max_tokens), `collater` or `collate_fn`,
            `set_epoch(epoch)`, `fingerprint` (text, number, or a method that gives one), and `uses_rng`: False
            promises that reading draws no random numbers, which saves seeding three generators for each sample.
        cfg: a DatasetConfig, or a DictConfig with its fields.
        epoch: the first epoch, counted from 1.
        update_freq: micro-batches of each rank in an update.
        global_batch_size: samples in an update, whatever the number of ranks; update_freq follows from it. 0: none.
        skip_remainder_batch: leave out the last update of an epoch where it has fewer samples than the others.
        pin_memory: workers' batches go to pinned memory; for accelerators only.
    Raises: ConfigError where these cannot make an update of the data.
    """

    def __init__(
        self,
        dataset,
        cfg: DatasetConfig,
        seed: int,
        epoch: int = 1,
        update_freq: int = 1,
        rank: int = 0,
        world_size: int = 1,
        collate_fn: Callable | None = None,
        skip_remainder_batch: bool = False,
        pin_memory: bool = False,
        global_batch_size: int = 0,
    ) -> None:
        _check_settings(cfg)
        self.dataset, self.seed, self.rank, self.world_size = dataset, seed, rank, world_size
        self.update_freq, self.skip_remainder_batch, self.pin_memory = update_freq, skip_remainder_batch, pin_memory
        self.num_samples = _length_of(dataset, cfg.train_subset)
        self.num_workers, self.prefetch_factor = cfg.num_workers, cfg.prefetch_factor
        self.batching = Batching(cfg.max_tokens, cfg.batch_size, cfg.required_batch_size_multiple)
        self._items_per_micro_batch = cfg.batch_size if cfg.max_tokens is None else 1
        self.items_per_update = self._items_per_micro_batch * update_freq * world_size
        if global_batch_size:
            self.items_per_update = global_batch_size
            self.update_freq = -(-global_batch_size // (self._items_per_micro_batch * world_size))
        self.epoch = epoch
        self.samples_in_epoch = 0
        self.last_indices: list[list[int]] = []
        self._earlier: list[tuple[Batching, int]] = []
        self._fetch = Fetcher(dataset, collation_of(dataset, collate_fn), seed)
        self._sizes: np.ndarray | None = None
        self._orders: dict[tuple, Any] = {}  # at most one: the order that is being walked
        self._pool: WorkerPool | None = None
        self._current: _Updates | None = None
        self._items_of_an_epoch = self._count_items(cfg.train_subset)
        self._check_that_an_epoch_has_updates()
        if rank == 0 and global_batch_size > self.num_samples:
            logger.warning(BEYOND_AN_EPOCH, global_batch_size, self.num_samples, cfg.train_subset)

    # ---- positions, by arithmetic

    @property
    def unit(self) -> str:
        """What positions count: "samples", or "batches" of the list that max_tokens makes."""
        return "samples" if self.batching.max_tokens is None else "batches"

    @property
    def num_updates_per_epoch(self) -> int:
        """The updates of a whole epoch, the same for all epochs and ranks."""
        return num_updates_left(self._items_of_an_epoch, 0, self.items_per_update, self.skip_remainder_batch)

    def updates_left(self) -> int:
        """How many updates this epoch still has."""
        num_items = self._items_of_an_epoch if not self._earlier else len(self._order())
        return num_updates_left(num_items, self.samples_in_epoch, self.items_per_update, self.skip_remainder_batch)

    def end_of_epoch(self) -> bool:
        """Whether this epoch has no further update. What is owed at its end may still be to do."""
        return self.updates_left() == 0

    @property
    def next_epoch_idx(self) -> int:
        """The epoch of which `next_epoch_itr` gives the updates."""
        return self.epoch + 1 if self.end_of_epoch() else self.epoch

    # ---- iterating

    def next_epoch_itr(self) -> _Updates:
        """The updates from here to the end of the epoch, or of the next one where this one has none left.

        Each item is a list: one collated micro-batch, or DummyBatch, for each of update_freq (fewer in the last
        update of an epoch). The position moves when an item is taken, however far workers have read ahead.
        An iterator given out before is ended by this.
        """
        self._drop_current()
        if self.end_of_epoch():
            self.finish_epoch()
        self._fetch.set_epoch(self.epoch)
        if self.num_workers and self._pool is None:
            self._pool = WorkerPool(self._fetch, self.num_workers, self.prefetch_factor, self.pin_memory)
        self._current = _Updates(self, self._plans(), self._fetch, self._pool)
        return self._current

    def finish_epoch(self) -> None:
        """Move on to the start of the next epoch: all that was owed at the end of this one is done."""
        self.start_epoch(self.epoch + 1)

    def start_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, wherever this was."""
        self._drop_current()
        self.epoch, self.samples_in_epoch, self._earlier = epoch, 0, []

    def close(self) -> None:
        """End the workers. They end too when this object, or its process, goes."""
        self._drop_current()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _plans(self) -> Iterator[UpdatePlan]:
        return update_plans(
            self._order(),
            self.samples_in_epoch,
            self._items_per_micro_batch,
            self.items_per_update,
            self.rank,
            self.world_size,
            self.skip_remainder_batch,
        )

    def _order(self) -> np.ndarray | list[list[int]]:
        key = (self.epoch, tuple(self._earlier))
        if key not in self._orders:
            arguments = (self.seed, self.epoch, self.num_samples, self.batching, self._token_counts, self._earlier)
            self._orders = {key: epoch_order(*arguments)}
        return self._orders[key]

    def _token_counts(self) -> np.ndarray:
        if self._sizes is None:
            self._sizes = _sizes_of(self.dataset, self.num_samples)
        return self._sizes

    def _drop_current(self) -> None:
        """Workers that still read for an iterator nobody will ask are ended: quicker than waiting for them."""
        if self._current is not None:
            self._current.end()
            self._current = None
        if self._pool is not None and self._pool.outstanding:
            self._pool.close()
            self._pool = None

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The position: plain values, the same on all ranks, whatever ranks, workers and update_freq are.

        `samples_in_epoch` counts items of the epoch's order that all ranks together have trained on: samples, or
        batches where `unit` says so (max_tokens); then `batching` tells of which list, and `earlier` what other
        lists gave out in this epoch before it.
        """
        return {
            "epoch": self.epoch,
            "samples_in_epoch": self.samples_in_epoch,
            "unit": self.unit,
            "num_samples": self.num_samples,
            "fingerprint": fingerprint_of(self.dataset),
            "batching": asdict(self.batching) if self.unit == "batches" else None,
            "earlier": [
                {"batching": asdict(old) if old.max_tokens is not None else None, "taken": taken}
                for old, taken in self._earlier
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Reads no sample. What was being iterated is ended.

        max_tokens, batch_size and required_batch_size_multiple may differ from the saved ones: what the old settings
        had given out of the epoch stays given out, the rest of it follows the new ones.
        A position of another program's run (trainer/foreign/position.py) is told in samples of this run.
        Raises: DataChangedError where the data is not what the position was taken in.
        """
        if ELSEWHERE in state:
            state = position_here(state[ELSEWHERE], self.num_samples, (self.batching.batch_size or 0) * self.world_size)
        for key in ("epoch", "samples_in_epoch", "num_samples"):
            if not isinstance(state.get(key), int):
                raise ConfigError(f"the saved data position has no {key}. To start at epoch 1, add: {_RESET}")
        if state["num_samples"] != self.num_samples:
            raise DataChangedError("its number of samples", state["num_samples"], self.num_samples)
        saved, now = state.get("fingerprint"), fingerprint_of(self.dataset)
        if saved is not None and now is not None and saved != now:
            raise DataChangedError("its fingerprint", saved, now)
        self._drop_current()
        self.epoch, self.samples_in_epoch = state["epoch"], state["samples_in_epoch"]
        self._earlier = [(_batching_from(part["batching"]), part["taken"]) for part in state.get("earlier", ())]
        self._follow_new_batching(_batching_from(state.get("batching")))
        self.last_indices = []

    def _follow_new_batching(self, old: Batching) -> None:
        if self.samples_in_epoch == 0 and not self._earlier:
            return
        same = old.max_tokens is None and self.batching.max_tokens is None  # then batch_size cuts nothing in advance
        if not same and old != self.batching:
            self._earlier.append((old, self.samples_in_epoch))
            self.samples_in_epoch = 0

    # ---- what the constructor checks

    def _count_items(self, subset: str) -> int:
        if self.num_samples == 0:
            raise ConfigError(f"the dataset of dataset.train_subset={subset} is empty")
        if self.world_size > self.num_samples:
            raise ConfigError(
                f"{self.world_size} ranks, but the dataset of dataset.train_subset={subset} has only "
                f"{self.num_samples} samples: set distributed_training.distributed_world_size={self.num_samples}"
            )
        if self.batching.max_tokens is not None:
            return len(self._order())
        if self.batching.batch_size > self.num_samples:
            raise ConfigError(
                f"dataset.batch_size={self.batching.batch_size} is more than the {self.num_samples} samples of "
                f"dataset.train_subset={subset}: set dataset.batch_size={self.num_samples} or less"
            )
        return self.num_samples

    def _check_that_an_epoch_has_updates(self) -> None:
        if self.update_freq < 1:
            raise ConfigError(f"optimization.update_freq is {self.update_freq}, but must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not one of {self.world_size} ranks")
        if self.num_updates_per_epoch:
            return
        raise ConfigError(
            f"an epoch has no update: it has {self._items_of_an_epoch} {self.unit}, one update takes "
            f"{self.items_per_update} ({self.world_size} ranks x update_freq {self.update_freq} x "
            f"{self._items_per_micro_batch}), and optimization.skip_remainder_batch=true leaves out what is less. "
            "Set optimization.skip_remainder_batch=false, or a smaller optimization.update_freq, dataset.batch_size or "
            "optimization.global_batch_size"
        )


class _Updates:
    """The rest of an epoch: yields lists of micro-batches and moves the position of its owner with each."""

    def __init__(
        self, owner: EpochBatchIterator, plans: Iterator[UpdatePlan], fetch: Fetcher, pool: WorkerPool | None
    ) -> None:
        self._owner, self._plans, self._fetch, self._pool = owner, plans, fetch, pool
        self._epoch = owner.epoch
        self._ahead: deque[UpdatePlan] = deque()  # what workers were asked for, in whole or in part
        self._requests = self._requests_of_plans()
        self._ended = False

    def __iter__(self) -> _Updates:
        return self

    def __len__(self) -> int:
        """The updates that are still to come."""
        return 0 if self._ended else self._owner.updates_left()

    def __next__(self) -> list:
        if self._ended:
            raise StopIteration
        if self._pool is None:
            plan = next(self._plans)
            batches = self._fetch.fetch_here(self._epoch, _requests_of(plan))
        else:
            plan, batches = self._take_from_workers()
        if plan.first:
            batches = [batch if own else DummyBatch(batch) for batch, own in zip(batches, plan.indices)]
        self._owner.samples_in_epoch = plan.end
        self._owner.last_indices = plan.indices
        return batches

    def end(self) -> None:
        """Nothing more is given out: the owner's position is somebody else's to move now."""
        self._ended = True
        self._plans = self._requests = iter(())

    def _take_from_workers(self) -> tuple[UpdatePlan, list]:
        self._keep_workers_busy()
        if not self._ahead:
            raise StopIteration
        batches = []
        try:
            for _ in self._ahead[0].indices:
                batches.append(self._pool.take())
                self._keep_workers_busy()
        except BaseException:
            self._owner.close()  # the other answers under way belong to no whole update; a worker may be dead
            raise
        return self._ahead.popleft(), batches

    def _keep_workers_busy(self) -> None:
        while self._pool.outstanding < self._pool.capacity:
            indices = next(self._requests, None)
            if indices is None:
                return
            self._pool.submit(self._epoch, indices)

    def _requests_of_plans(self) -> Iterator[list[int]]:
        for plan in self._plans:
            self._ahead.append(plan)
            yield from _requests_of(plan)


def _requests_of(plan: UpdatePlan) -> list[list[int]]:
    return [indices or plan.first for indices in plan.indices]


class BatchIterator:
    """Validation batches of one rank, in the order of the dataset; iterate it as often as wanted.

    Batch j goes to rank j % world_size, so ranks may have one more or fewer, or none. What a sample draws depends on
    (seed, index): it is the same each time, for any batch size and number of ranks. Workers stay between iterations.
    """

    def __init__(
        self,
        fetch: Fetcher,
        batches: list[list[int]],
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self._fetch, self._batches = fetch, batches
        self._num_workers = min(num_workers, len(batches))
        self._worker_settings = (prefetch_factor, pin_memory)
        self._pool: WorkerPool | None = None
        self.last_indices: list[int] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return self._with_workers() if self._num_workers else self._by_itself()

    def first(self) -> Any:
        """The first batch, read in this process."""
        return self._fetch.fetch_here(None, self._batches[:1])[0]

    def _by_itself(self) -> Iterator[Any]:
        for indices in self._batches:
            (batch,) = self._fetch.fetch_here(None, [indices])
            self.last_indices = indices
            yield batch

    def _with_workers(self) -> Iterator[Any]:
        if self._pool is not None and self._pool.outstanding:  # an iteration that was broken off
            self.close()
        if self._pool is None:
            self._pool = WorkerPool(self._fetch, self._num_workers, *self._worker_settings)
        pool, to_ask = self._pool, iter(self._batches)
        for indices in self._batches:
            while pool.outstanding < pool.capacity and (request := next(to_ask, None)) is not None:
                pool.submit(None, request)
            try:
                batch = pool.take()
            except BaseException:
                self.close()
                raise
            self.last_indices = indices
            yield batch

    def close(self) -> None:
        """End the workers. They end too when this object, or its process, goes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def valid_batches(
    dataset,
    cfg: DatasetConfig,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    collate_fn: Callable | None = None,
    pin_memory: bool = False,
) -> BatchIterator:
    """The validation batches of `rank`: by batch_size_valid, else as training is batched. An empty dataset has none."""
    _check_settings(cfg)
    num_samples = _length_of(dataset, "valid")
    batch_size = cfg.batch_size_valid or cfg.batch_size
    if cfg.max_tokens is not None:
        batching = Batching(cfg.max_tokens, batch_size, cfg.required_batch_size_multiple)
        batches = batch_list(range(num_samples), _sizes_of(dataset, num_samples), batching)[rank::world_size]
    else:
        begins = range(rank * batch_size, num_samples, world_size * batch_size)
        batches = [list(range(begin, min(begin + batch_size, num_samples))) for begin in begins]
    fetch = Fetcher(dataset, collation_of(dataset, collate_fn), seed, stream="valid")
    return BatchIterator(fetch, batches, cfg.num_workers, cfg.prefetch_factor, pin_memory)


def dummy_batches(dataset, cfg: DatasetConfig, rank: int, world_size: int, max_batches: int | None) -> list[DummyBatch]:
    """What `rank` must run besides its validation batches in order to run as many as rank 0, which has the most."""
    counts = [len(valid_batches(dataset, cfg, 0, r, world_size)) for r in (0, rank)]
    most, own = (count if max_batches is None else min(count, max_batches) for count in counts)
    if most == own:
        return []
    first = valid_batches(dataset, cfg, 0, 0, world_size).first()
    return [DummyBatch(first)] * (most - own)


def valid_subsets(cfg: DatasetConfig) -> list[str]:
    """The names in dataset.valid_subset, in its order."""
    return [name.strip() for name in (cfg.valid_subset or "").split(",") if name.strip()]


# ---- facts about a dataset


def _check_settings(cfg: DatasetConfig) -> None:
    problems = DatasetConfig.problems(cfg)
    if cfg.batch_size is None and cfg.max_tokens is None:
        problems.append("neither dataset.batch_size nor dataset.max_tokens is set: set dataset.batch_size=32, say")
    if problems:
        raise ConfigError("\n".join(problems))


def _length_of(dataset, subset: str) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"the dataset of subset {subset} is {type(dataset).__name__}, without __len__ or __getitem__: batches are "
            "a function of the position, so it must be map-style (give samples by index)"
        )
    return len(dataset)


def _sizes_of(dataset, num_samples: int) -> np.ndarray:
    """Tokens of each sample, int [num_samples]; fairseq's pairs (source, target) count as their longer side."""
    if getattr(dataset, "sizes", None) is not None:
        sizes = np.asarray(dataset.sizes)
        sizes = sizes.max(axis=1) if sizes.ndim == 2 else sizes
    elif hasattr(dataset, "num_tokens"):
        sizes = np.fromiter((dataset.num_tokens(index) for index in range(num_samples)), np.int64, num_samples)
    else:
        raise ConfigError(
            f"dataset.max_tokens needs to know the length of each sample, and {type(dataset).__name__} has neither "
            "`sizes` nor `num_tokens(index)`: set dataset.max_tokens=null and dataset.batch_size"
        )
    if sizes.shape != (num_samples,):
        raise ConfigError(f"`sizes` of {type(dataset).__name__} has shape {sizes.shape}, for {num_samples} samples")
    return sizes


def fingerprint_of(dataset) -> str | int | None:
    value = getattr(dataset, "fingerprint", None)
    value = value() if callable(value) else value
    if value is not None and not isinstance(value, (str, int)):
        raise ConfigError(f"`fingerprint` of {type(dataset).__name__} is {type(value).__name__}, not text or a number")
    return value


def _batching_from(saved: dict[str, Any] | None) -> Batching:
    return Batching(**saved) if saved else Batching()
