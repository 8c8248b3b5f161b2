"""The Trainer: owns model, criterion, optimizer, LR scheduler and EMA, and tells the story of an update.

Methods stand in the order of a run: build, feed, update, validate, remember. A new task is a subclass that overrides
the hooks of the first part. Must not know: Hydra, the command line, when to validate, save or stop (train.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
import uuid
from typing import Any, Iterable, Mapping

import torch
from torch import Tensor, nn

import checkpoint_file
import checkpoint_utils
import distributed_utils
from trainer import alike, fully_sharded, health, loading, meta_build, optim, state
from trainer.buffers import WatchedBuffers
from trainer.config import complete_config, instantiate, to_plain
from trainer.data import DummyBatch, EpochBatchIterator, dummy_batches, valid_batches
from trainer.data_parallel import GradientReducer
from trainer.devices import choose_device, move
from trainer.ema import EMA
from trainer.errors import ConfigError
from trainer.lr_scheduler import adapt_scheduler, build_lr_scheduler
from trainer.metrics import EpochMeter, GlobalSums, LocalSums
from trainer.nonfinite import NonFinitePolicy
from trainer.partial_state import WHOLE, selection_of
from trainer.precision import build_precision
from trainer.randomness import derive_seed, seed_all
from trainer.sharding import described_state
from trainer.zero import shard_optimizer

logger = logging.getLogger(__name__)

# What a plain dictionary that leaves these sections out gets.
DEFAULT_OPTIMIZER = {"_target_": "torch.optim.AdamW"}
DEFAULT_LR_SCHEDULER = {"_target_": "trainer.lr_scheduler.Fixed"}


class Trainer:
    """Trains `model` as `cfg` says, on one process or on the ranks of the default process group.

    Args:
        cfg: the sections of design, as an OmegaConf config or a plain dictionary. Sections may be left out.
        model, criterion: used instead of `build_model()` and `build_criterion()` if given.
    Raises: ConfigError with all that is wrong in `cfg`.
    """

    evaluates_only = False  # True where nothing is trained and there may be no training data (fairtrain-eval)
    sample_unit = "samples"  # what `sample_size` counts, as the progress on the screen calls it

    def __init__(self, cfg: Any, model: nn.Module | None = None, criterion: nn.Module | None = None) -> None:
        self.cfg = complete_config(cfg, type(self))
        common = self.cfg.common
        self._seed = common.seed
        self._selection = selection_of(self.cfg.checkpoint)
        self._start_time = time.monotonic()
        self._previous_training_time = 0.0
        self.data_parallel_rank = distributed_utils.get_rank()
        self.data_parallel_world_size = distributed_utils.get_world_size()
        self.device = choose_device(common.cpu)
        if common.num_threads > 0:
            torch.set_num_threads(common.num_threads)
        if common.deterministic:
            torch.use_deterministic_algorithms(True)
        self.run_id = distributed_utils.broadcast_object(uuid.uuid4().hex)
        self.log: Any = None  # a RunLog, given by the run
        self.stop_after_seconds = math.inf  # of cumulative training time, given by the run
        self.requests: Any = None  # a preemption.StopRequest, given by the run
        self.saves: Any = None  # a background_saves.BackgroundSaves, given by the run
        self.heartbeat = distributed_utils.Heartbeat()  # watched where the run has given its own
        self._datasets: dict[str, Any] = {}
        self._valid_iterators: dict[str, Any] = {}

        self._is_fully_sharded = fully_sharded.is_wanted(self.cfg.distributed_training, self.data_parallel_world_size)
        # fairseq's default window for the loss scale: the same number of micro-batches whatever the arrangement.
        window = max(1, 2**14 // self._micro_batches_per_update())
        self.precision = build_precision(common, self.device, window)
        self._build_modules(model, criterion)
        self._named_parameters = [(name, p) for name, p in self._all_parameters() if p.requires_grad]
        if not self._named_parameters:
            raise ConfigError("the model has no parameter that requires a gradient: nothing to train")
        self._parameters = [p for _, p in self._named_parameters]
        self.optimizer = self.build_optimizer(self._named_parameters)
        optim.name_parameters(self.optimizer, self._named_parameters)
        self._reducer = self._build_reducer()
        optimization = self.cfg.optimization
        self.lr_scheduler = adapt_scheduler(self.build_lr_scheduler(self.optimizer), self.optimizer, optimization.lr)
        self.ema = EMA(self.model, self.cfg.ema) if self.cfg.ema.store_ema else None
        self._sums = GlobalSums(self.data_parallel_process_group, self.data_parallel_world_size, self.device)
        self._clip_norm = optimization.clip_norm
        self._replica_interval = common.check_replicas_every
        self.nonfinite = NonFinitePolicy(common, self.data_parallel_process_group)

        self.use_sharded_state = self.cfg.distributed_training.use_sharded_state
        self.best = checkpoint_utils.BestScore(maximize=self.cfg.checkpoint.maximize_best_checkpoint_metric)
        self.meter = EpochMeter()
        self.validated_at = 0  # num_updates of the last validation
        self._num_updates = 0
        self._optimizer_history: list[dict] = []
        self._train_iterator: EpochBatchIterator | None = None
        self._caller_extra_state: dict[str, Any] = {}
        self.load_report: state.LoadReport | None = None
        self._watched = WatchedBuffers(self._modules if self.data_parallel_world_size > 1 else [])
        self.lr_step_update()

    def _build_modules(self, model: nn.Module | None, criterion: Any) -> None:
        """Build model and criterion, equal on all ranks, on the device; sharded where that is wanted."""
        seed_all(derive_seed("build", self._seed))
        on_meta = model is None and self.init_weights is not None
        with torch.device("meta") if on_meta else contextlib.nullcontext():
            self.model = self.build_model() if model is None else model
        self.model = self.model if on_meta else self.model.to(self.device)
        self.criterion = self.build_criterion() if criterion is None else criterion
        if isinstance(self.criterion, nn.Module):
            self.criterion = self.criterion.to(self.device)
        named = [*self._all_parameters(), *(pair for module in self._modules for pair in module.named_buffers())]
        alike.check_model(named, self.data_parallel_process_group)
        self._follow_rank_0([tensor for _, tensor in named if not tensor.is_meta])
        if self.forward_is_collective:
            modules, distributed = self.fully_sharded_modules(self.model), self.cfg.distributed_training
            fully_sharded.wrap(self.model, modules, self.device, distributed, self.precision)
        if on_meta:
            meta_build.fill(self.model, self.init_weights, self.device, derive_seed("init", self._seed))

    # ---- build: a task overrides these ----

    def build_model(self) -> nn.Module:
        """The model that `cfg.model._target_` names."""
        if self.cfg.model is None:
            raise ConfigError(f"{type(self).__name__} has no build_model() and model._target_ is not given")
        return instantiate(self.cfg.model)

    # A method init_weights(model) that sets every parameter and buffer, where a task offers it. Then build_model() builds
    # without memory, and with ddp_backend=fully_sharded no rank ever holds more than its part.
    init_weights: Any = None

    def build_criterion(self) -> nn.Module | None:
        """The criterion that `cfg.criterion._target_` names, None where the task has none (it has compute_loss)."""
        return instantiate(self.cfg.criterion) if self.cfg.criterion is not None else None

    def build_optimizer(self, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of `cfg.optimizer` over (canonical name, parameter) pairs, in the model's order."""
        node = self.cfg.optimizer or DEFAULT_OPTIMIZER
        return optim.build_optimizer(node, named_parameters, self.cfg.optimization.lr)

    def _build_reducer(self) -> Any:
        """What adds up gradients over the ranks; with ZeRO the optimizer keeps to this rank's share of its layout."""
        cfg, group = self.cfg.distributed_training, self.data_parallel_process_group
        if self.data_parallel_world_size == 1:
            if cfg.zero_sharding == "os":
                logger.warning("distributed_training.zero_sharding=os: with one rank there is nothing to share out")
            return None
        ranks = (group, self.data_parallel_world_size, cfg.find_unused_parameters)
        if self.forward_is_collective:
            gradients = fully_sharded.ShardedGradients(self.model, self._named_parameters, self.device, *ranks)
            fully_sharded.step_on_rows(self.optimizer, gradients.rows, group)
            return gradients
        reducer = GradientReducer(self._named_parameters, *ranks)
        if cfg.zero_sharding == "os":
            shard_optimizer(self.optimizer, reducer, group)
        return reducer

    def build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """The schedule of `cfg.lr_scheduler`, see trainer.lr_scheduler for what it must offer."""
        node, optimization = self.cfg.lr_scheduler or DEFAULT_LR_SCHEDULER, self.cfg.optimization
        return build_lr_scheduler(node, optimizer, optimization.lr, optimization.max_update)

    def fully_sharded_modules(self, model: nn.Module) -> list[nn.Module]:
        """With ddp_backend=fully_sharded: the modules that are each gathered and freed as one, such as layers."""
        return fully_sharded.blocks_of(model)

    def build_dataset(self, split: str) -> Any:
        """A map-style dataset for `split`, a name from dataset.train_subset or dataset.valid_subset."""
        raise ConfigError(f"{type(self).__name__} must define build_dataset(split)")

    def compute_loss(self, sample: Any) -> tuple[Tensor, int | Tensor, dict]:
        """(loss, sample_size, logging_output) of one batch, all of them sums; fairseq's contract for criterions.

        loss: 0-dim, the sum over the batch. sample_size: what the sum is divided by, after adding up over all
        ranks and micro-batches. logging_output: sums under the names they are logged by, numbers or 0-dim tensors.
        """
        return self.criterion(self.model, sample)

    def reduce_metrics(self, logging_outputs: list[dict[str, float]]) -> dict[str, float]:
        """What is logged for global sums: each one divided by the global `sample_size`, under its own name."""
        totals: dict[str, float] = {}
        for output in logging_outputs:
            for name, value in output.items():
                totals[name] = totals.get(name, 0.0) + value
        sample_size = totals.pop("sample_size", 0.0) or 1.0
        return {name: value / sample_size for name, value in totals.items()}

    def after_validate(self, stats: dict[str, float]) -> None:
        """Called on all ranks after each validation, with the metrics of all subsets."""

    def after_train(self) -> None:
        """Called on all ranks when the run has reached its end and its last checkpoint is saved."""

    def upgrade_state_dict(self, state: dict) -> dict:
        """Mend old names in a loaded state, whose tensors are not read yet (each has shape and dtype)."""
        return state

    def task_state_dict(self) -> dict:
        """Whatever else the task must remember: plain values and tensors, equal on all ranks."""
        return {}

    def load_task_state_dict(self, state: dict) -> None:
        """Take back what `task_state_dict` gave."""

    # ---- facts ----

    def get_model(self) -> nn.Module:
        return self.model

    def get_criterion(self) -> nn.Module | None:
        return self.criterion

    @property
    def data_parallel_process_group(self) -> Any:
        return torch.distributed.group.WORLD if self.data_parallel_world_size > 1 else None

    @property
    def is_data_parallel_master(self) -> bool:
        return self.data_parallel_rank == 0

    @property
    def forward_is_collective(self) -> bool:
        """Whether ranks hold parts of the model, so that all of them must compute each forward pass together."""
        return self._is_fully_sharded

    @property
    def _modules(self) -> list[nn.Module]:
        """What has parameters, buffers and a mode: the model, and the criterion where it is a module."""
        return [self.model, self.criterion] if isinstance(self.criterion, nn.Module) else [self.model]

    def _buffers(self) -> list[Tensor]:
        return [buffer for module in self._modules for buffer in module.buffers()]

    def _set_training(self, mode: bool) -> None:
        for module in self._modules:
            if module.training != mode:
                module.train(mode)

    def _all_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        if isinstance(self.criterion, nn.Module):
            for name, parameter in self.criterion.named_parameters():
                yield f"criterion.{name}", parameter

    def get_num_updates(self) -> int:
        return self._num_updates

    def set_num_updates(self, num_updates: int) -> None:
        self._num_updates = num_updates

    def get_lr(self) -> float:
        return self.lr_scheduler.get_lr()

    def cumulative_training_time(self) -> float:
        """Seconds of training of this run over all its sessions; pauses between them do not count."""
        return self._previous_training_time + time.monotonic() - self._start_time

    def set_cumulative_training_time(self, seconds: float) -> None:
        self._previous_training_time, self._start_time = seconds, time.monotonic()

    def log_event(self, name: str, **fields: Any) -> None:
        """A line of log.jsonl, rank 0's. Without a run (a notebook, a test) there is no log and nothing is written."""
        if self.log is not None:
            self.log.event(name, **fields)

    # ---- feed ----

    def dataset(self, split: str) -> Any:
        """The dataset of `split`, built once."""
        if split not in self._datasets:
            seed_all(derive_seed("dataset", self._seed, split))
            try:
                self._datasets[split] = self.build_dataset(split)
            except (KeyError, FileNotFoundError):
                logger.error("build_dataset(%r) failed; splits are named by dataset.train_subset and valid_subset", split)
                raise
        return self._datasets[split]

    def get_train_iterator(self, epoch: int = 1) -> EpochBatchIterator:
        """The batches of training from the start of `epoch` (counted from 1); its position is part of the state.

        There is one, built once: calling this again moves it, and ends what is being iterated.
        """
        if self._train_iterator is not None:
            self._train_iterator.start_epoch(epoch)
            return self._train_iterator
        optimization, dataset = self.cfg.optimization, self.cfg.dataset
        self._train_iterator = EpochBatchIterator(
            self.dataset(dataset.train_subset),
            dataset,
            seed=self._seed,
            epoch=epoch,
            update_freq=optimization.update_freq,
            rank=self.data_parallel_rank,
            world_size=self.data_parallel_world_size,
            skip_remainder_batch=optimization.skip_remainder_batch,
            pin_memory=self.device.type != "cpu",
            global_batch_size=optimization.global_batch_size,
        )
        return self._train_iterator

    def _micro_batches_per_update(self) -> int:
        """Micro-batches of all ranks in a full update."""
        optimization, batch_size = self.cfg.optimization, self.cfg.dataset.batch_size
        if optimization.global_batch_size and batch_size:
            return -(-optimization.global_batch_size // batch_size)
        return self.data_parallel_world_size * optimization.update_freq

    def get_valid_iterator(self, subset: str) -> Any:
        """This rank's share of the batches of `subset`, each once over all ranks; can be iterated again."""
        if subset not in self._valid_iterators:
            self._valid_iterators[subset] = valid_batches(
                self.dataset(subset),
                self.cfg.dataset,
                self._seed,
                self.data_parallel_rank,
                self.data_parallel_world_size,
                pin_memory=self.device.type != "cpu",
            )
        return self._valid_iterators[subset]

    def begin_epoch(self, epoch: int) -> None:
        """Called before the first update of an epoch, and when a resumed run goes on inside it."""
        self._set_training(True)

    # ---- update ----

    def train_step(self, samples: list) -> dict[str, float] | None:
        """One update over `samples`, this rank's micro-batches. Returns the metrics, None if it was left out.

        All that is random in micro-batch i of rank r follows from (seed, num_updates, i * world_size + r).
        Raises: NonFiniteError on all ranks, before the step, if the loss or a gradient is not finite and the update is
            not left out (fp16, common.on_nonfinite=skip); health.DriftError.
        """
        self.zero_grad()
        sample_size, loss, outputs = self._forward_backward(samples)
        self.heartbeat.enter("optimizer")
        self._normalize_grads(sample_size)
        gnorm = self.clip_grad_norm(self._clip_norm)
        if not self._optimizer_step(float(gnorm), loss, samples):
            return None
        lr = self.get_lr()
        self.set_num_updates(self._num_updates + 1)
        self.lr_step_update()
        if self.ema is not None:
            self.ema.update(self.model, self._num_updates)
        if self._replica_interval and self._num_updates % self._replica_interval == 0:
            self.check_replicas()
        return self._update_stats(sample_size, outputs, lr, float(gnorm))

    def zero_grad(self) -> None:
        if self._reducer is not None:
            self._reducer.prepare()
        else:
            for parameter in self._parameters:
                parameter.grad = None

    def _forward_backward(self, samples: list) -> tuple[float, float, dict[str, float]]:
        """Gradients of the global batch, as sums; returns the global (sample_size, loss, logging outputs)."""
        self._sync_buffers()
        self.nonfinite.begin_update(self._buffers)
        self._set_training(True)
        local = LocalSums()
        last = len(samples) - 1
        for i, sample in enumerate(samples):
            kept = [(b, b.clone()) for b in self._buffers()] if isinstance(sample, DummyBatch) else []
            self.heartbeat.enter("forward")
            loss = self._forward(i, sample, local)
            self.heartbeat.enter("backward")
            if i == last:  # the sums travel while this backward runs, and it sends the gradients
                self._sums.start(local, **self._flags())
                if self._reducer is not None:
                    self._reducer.arm()
            self.precision.scale(loss).backward()
            with torch.no_grad():  # a batch that counts nothing leaves nothing; backward still needed what it changed
                for buffer, before in kept:
                    buffer.copy_(before)
        self.heartbeat.enter("reduction")
        if self._reducer is not None:
            self._reducer.finish()
        return self._sums.finish()

    def _forward(self, i: int, sample: Any, local: LocalSums) -> Tensor:
        self._seed_micro_batch(i)
        if isinstance(sample, DummyBatch):
            return self._dummy_forward(sample)
        with self.precision.autocast():
            loss, sample_size, logging_output = self.compute_loss(self._to_device(sample))
        local.add(loss, sample_size, logging_output)
        return loss

    def _dummy_forward(self, sample: DummyBatch) -> Tensor:
        """This rank has no samples here: it goes through the motions so that no other rank waits, and counts nothing."""
        with self.precision.autocast():
            return self.compute_loss(self._to_device(sample.sample))[0] * 0.0

    def _seed_micro_batch(self, i: int) -> None:
        j = i * self.data_parallel_world_size + self.data_parallel_rank
        seed_all(derive_seed("micro_batch", self._seed, self._num_updates, j))

    def _flags(self) -> dict[str, bool]:
        flags = {"buffers_changed": self._watched.have_changed()}
        requests, saves = self.requests, self.saves
        if requests is not None:
            flags["stop"] = requests.stop_requested or self.cumulative_training_time() >= self.stop_after_seconds
            flags["save"] = requests.save_requested
        if saves is not None:
            flags["written"], flags["write_failed"] = saves.is_written, saves.has_failed
        return flags

    def settle_saves(self) -> None:
        """Finish the save that is being written, if by the last update all ranks were done with it. All ranks call it."""
        if self.saves is not None:
            self.saves.settle(self._sums.all_written, self._sums.any_write_failed)

    @property
    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop, as all ranks learned in the last update."""
        return self._sums.stop_requested

    @property
    def save_requested(self) -> bool:
        """Whether any rank was asked to save, as all ranks learned in the last update."""
        return self._sums.save_requested

    def _to_device(self, sample: Any) -> Any:
        return sample if self.device.type == "cpu" else move(sample, self.device)

    def _normalize_grads(self, sample_size: float) -> None:
        """From sums to means over the global batch; the scale of fp16 losses goes in the same division."""
        divisor = (sample_size or 1.0) * self.precision.loss_scale
        gradients = self._flat_gradients()
        if gradients and divisor != 1.0:
            torch._foreach_div_(gradients, divisor)

    def _flat_gradients(self) -> list[Tensor]:
        if self._reducer is not None:
            return self._reducer.flats
        return [p.grad for p in self._parameters if p.grad is not None]

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint L2 norm is at most `max_norm`; 0 only measures. Returns the norm."""
        norm = self._reducer.global_norm() if self.forward_is_collective else None
        return optim.clip_grad_norm(self._flat_gradients(), max_norm, norm)

    def _optimizer_step(self, gnorm: float, loss: float, samples: list) -> bool:
        """Step unless the numbers are bad: fp16 shrinks its scale and skips, else it is as common.on_nonfinite says."""
        finite = math.isfinite(gnorm) and math.isfinite(loss)
        if not finite and not self.precision.can_overflow:
            self._leave_out(samples)
            return False
        self.precision.update(overflow=not finite, num_updates=self._num_updates + 1)
        if finite:
            self.optimizer.step()
        return finite

    def lr_step_update(self) -> float:
        """Set the learning rate of the next update, a function of the number of updates done."""
        return self.lr_scheduler.step_update(self._num_updates)

    def lr_step(self, epoch: int, val_loss: float | None = None) -> None:
        """Tell the schedule that `epoch` has ended with `val_loss`; only reduce_lr_on_plateau listens."""
        self.lr_scheduler.step(epoch, val_loss)
        self.lr_step_update()

    def _update_stats(self, sample_size: float, outputs: dict, lr: float, gnorm: float) -> dict[str, float]:
        self.meter.add(sample_size, outputs)
        stats = self.reduce_metrics([{**outputs, "sample_size": sample_size}])
        stats.update(lr=lr, gnorm=gnorm, sample_size=sample_size)
        if self.precision.loss_scale != 1.0:
            stats["loss_scale"] = self.precision.loss_scale
        return stats

    def _leave_out(self, samples: list) -> None:
        """Find what went bad by running the micro-batches once more, from their seeds, one at a time.

        Raises: NonFiniteError on all ranks, unless the update is skipped.
        """
        policy = self.nonfinite
        with self._reducer.isolated() if self.forward_is_collective else contextlib.nullcontext():
            error = policy.meet(samples, self._non_finite_in, self._all_parameters, self._num_updates)
        logger.error("%s UPDATE SKIPPED, number %d of at most %d (common.max_nonfinite)", error, policy.count, policy.limit)
        self.log_event("nonfinite", num_updates=self._num_updates, count=policy.count, what=error.what, rank=error.rank)

    def _non_finite_in(self, i: int, sample: Any) -> str | None:
        self.zero_grad()
        loss = self._forward(i, sample, LocalSums())
        loss.backward()
        return None if isinstance(sample, DummyBatch) else health.bad_of(loss, self._all_parameters())

    def _sync_buffers(self) -> None:
        """Take rank 0's buffers if training changed any since the last time, as all ranks learned with the sums."""
        if self._sums.buffers_changed:
            self._follow_rank_0([*self._buffers(), *(self.ema.copies if self.ema is not None else ())])
            self._watched.remember()
            self._sums.buffers_changed = False

    def _follow_rank_0(self, tensors: list[Tensor]) -> None:
        if self.data_parallel_world_size > 1:
            with torch.no_grad():
                distributed_utils.broadcast_tensors(tensors, 0, self.data_parallel_process_group)

    # ---- validate ----

    @torch.no_grad()
    def valid_step(self, sample: Any) -> tuple[Tensor, int | Tensor, dict]:
        """(loss, sample_size, logging_output) of one batch of this rank, sums as in `compute_loss`; no communication."""
        self._set_training(False)
        with self.precision.autocast():
            return self.compute_loss(self._to_device(sample))

    def validate(self, subset: str, max_batches: int | None = None) -> dict[str, float]:
        """Metrics of `subset` over all ranks, weighted by sample_size; one reduction at the end. EMA if so configured.

        Random numbers follow from (seed, subset, batch), so that validating changes nothing in training.
        """
        self._sync_buffers()
        local = LocalSums()
        swapped = self.ema is not None and self.cfg.ema.ema_validate
        with self.ema.swapped_in(self.model) if swapped else contextlib.nullcontext():
            for i, sample in enumerate(self._valid_samples(subset, max_batches)):
                self.heartbeat.enter("validation")
                seed_all(derive_seed("valid", self._seed, subset, i, self.data_parallel_rank))
                if isinstance(sample, DummyBatch):
                    self.valid_step(sample.sample)
                else:
                    local.add(*self.valid_step(sample))
        self._set_training(True)
        distributed_utils.barrier(self.data_parallel_process_group)  # the others may have had fewer batches, or more
        sums = GlobalSums(self.data_parallel_process_group, self.data_parallel_world_size, self.device)
        sums.start(local)
        sample_size, _, outputs = sums.finish()
        return self.reduce_metrics([{**outputs, "sample_size": sample_size}]) if sample_size else {}

    def _valid_samples(self, subset: str, max_batches: int | None) -> Iterable:
        """This rank's batches, and where forward is collective as many dummies as keep it in step with the others."""
        yield from itertools.islice(self.get_valid_iterator(subset), max_batches)
        if self.forward_is_collective:
            yield from dummy_batches(
                self.dataset(subset), self.cfg.dataset, self.data_parallel_rank, self.data_parallel_world_size, max_batches
            )

    # ---- remember ----

    def state_dict(self) -> dict:
        """All that a run needs to go on, as the file holds it: plain containers and full tensors, canonical names."""
        ema = self.ema
        trained = ema.training_state_dict(self.model) if ema is not None else described_state(self.model)
        extra_state = {
            "train_iterator": self._train_iterator.state_dict() if self._train_iterator is not None else None,
            "metrics": self.meter.state_dict(),
            "best": self.best.best,
            "val_loss": None,
            "patience": self.best.state_dict(),
            "validated_at": self.validated_at,
            "scaler": self.precision.state_dict(),
            "nonfinite": self.nonfinite.state_dict(),
            "num_threads": torch.get_num_threads(),
            "ranks": self.data_parallel_world_size,
            "previous_training_time": self.cumulative_training_time(),
        }
        if self.ema is not None:
            extra_state["ema"] = self.ema.state_dict()
        extra_state |= self._caller_extra_state
        save_optimizer = not self.cfg.checkpoint.no_save_optimizer_state
        return {
            "format_version": checkpoint_file.FORMAT_VERSION,
            "run_id": self.run_id,
            "cfg": to_plain(self.cfg),
            "model": trained,
            "criterion": described_state(self.criterion) if isinstance(self.criterion, nn.Module) else {},
            "optimizer_history": self._history(),
            "last_optimizer_state": optim.optimizer_state(self.optimizer) if save_optimizer else None,
            "task_state": self.task_state_dict(),
            "extra_state": extra_state,
        }

    def _history(self) -> list[dict]:
        now = {
            **state.class_names(self.criterion, self.optimizer, self.lr_scheduler),
            "lr_scheduler_state": self.lr_scheduler.state_dict(),
            "num_updates": self._num_updates,
        }
        past = self._optimizer_history
        if past and state.same_classes(past[-1], now):
            past = past[:-1]
        return [*past, now]

    def save_checkpoint(self, filename: str, extra_state: Mapping[str, Any] | None = None) -> int:
        """Write the whole state to `filename`, durable and complete or not at all. All ranks call it. Returns bytes.

        With use_sharded_state, a name without the suffix .pt becomes a folder, in which each rank writes its part.

        `extra_state`: plain values and tensors that `load_checkpoint` gives back. Raises: as `state_to_save`.
        """
        with self.begin_checkpoint(filename, extra_state) as publication:
            publication.write()
            return publication.finish()

    def begin_checkpoint(
        self, filename: str, extra_state: Mapping[str, Any] | None = None
    ) -> checkpoint_utils.Publication:
        """Begin to save under `filename`: all is planned and room is made, no byte of a tensor is written.

        `extra_state`: plain values and tensors that `load_checkpoint` gives back. Raises: as `state_to_save`, and
            CheckpointError on all ranks if the file cannot be written or a value has no place in it.
        """
        as_folder = self.use_sharded_state and not str(filename).endswith(".pt")
        publication = checkpoint_utils.FolderPublication if as_folder else checkpoint_utils.Publication
        return publication(self.state_to_save(extra_state), filename, self.data_parallel_process_group)

    def state_to_save(self, extra_state: Mapping[str, Any] | None = None) -> dict:
        """`state_dict()` with the caller's `extra_state`, after it was found fit to be saved. All ranks call it.

        Raises: NonFiniteError if a parameter is not finite (a healthy file is never replaced by such a one),
            TaskStateError or health.DriftError if the ranks' task states or whole parameters differ.
        """
        self._sync_buffers()
        checkpoint = self.state_dict()
        checkpoint["extra_state"].update(extra_state or {})
        self.nonfinite.check_parameters(self._all_parameters(), self._num_updates)
        self.check_replicas()
        state.check_equal_on_ranks(checkpoint["task_state"], self.data_parallel_process_group)
        return checkpoint

    def check_replicas(self) -> None:
        """Collective: parameters that every rank has whole must be the same on all. Raises: health.DriftError."""
        group = self.data_parallel_process_group
        health.check_replicas(health.replicas_of(self._all_parameters()), self._num_updates, group)

    def load_checkpoint(
        self,
        filename: str,
        reset_optimizer: bool = False,
        reset_lr_scheduler: bool = False,
        optimizer_overrides: Mapping | str | None = None,
        reset_meters: bool = False,
        whole: bool = False,
    ) -> dict:
        """Continue from `filename`; returns its extra_state. All ranks call it, and all raise if one of them fails.

        The flags: `reset_optimizer` drops the moments, `reset_lr_scheduler` the schedule's own state, `reset_meters`
        meters, best score and patience; nothing else. `optimizer_overrides` replaces hyperparameters. `whole` takes
        all of the file whatever checkpoint.load_* says, as a run does that goes on from its own checkpoint.
        Raises: CheckpointError (missing, damaged), state.ModelMismatchError, state.ClassMismatchError.
        """
        selection, report = WHOLE if whole else self._selection, state.LoadReport(path=filename)
        with self._open(filename) as reader:
            saved = self._layout_of(reader, selection, report)
            entry = saved["optimizer_history"][-1] if saved.get("optimizer_history") else {}
            state.check_classes(
                entry, self.criterion, self.optimizer, self.lr_scheduler, filename, reset_optimizer, reset_lr_scheduler
            )
            fresh = loading.fill_modules(self.model, self.criterion, saved, reader, selection, report)
            names = [name for name, _ in self._named_parameters]
            loading.fill_optimizer(self.optimizer, names, saved, reader, selection, fresh, reset_optimizer, report)
            loading.override_optimizer(self.optimizer, self.lr_scheduler, optimizer_overrides)
            if self.ema is not None:
                loading.fill_ema(self.ema, saved, reader, selection, fresh, report)
            self.set_num_updates(int(entry.get("num_updates", 0)))
            report.num_updates = self._num_updates
            self.lr_scheduler.load_state_dict({} if reset_lr_scheduler else entry.get("lr_scheduler_state") or {})
            (report.reset if reset_lr_scheduler else report.restored).append("lr scheduler")
            self._optimizer_history = list(saved["optimizer_history"])
            extra_state = reader.materialize({k: v for k, v in saved["extra_state"].items() if k != "ema"})
            self._load_counters(extra_state, reset_meters, report)
            if saved["task_state"] or saved["run_id"]:  # else another program's, which knows nothing of the task
                self.load_task_state_dict(reader.materialize(saved["task_state"]))
        self.run_id = saved["run_id"] or self.run_id
        report.saved_cfg = saved["cfg"]
        self.load_report = report
        self.lr_step_update()
        self._watched.remember()
        return extra_state

    def load_model(self, filename: str) -> None:
        """Take parameters and buffers of model and criterion from `filename`, nothing else (finetune_from_model).

        It may be of any program that trainer.foreign knows, a file or a folder.
        """
        self.load_report = state.LoadReport(path=filename)
        with self._open(filename) as reader:
            saved = self._layout_of(reader, self._selection, self.load_report)
            self.load_report.saved_cfg = saved.get("cfg") or {}
            loading.fill_modules(self.model, self.criterion, saved, reader, self._selection, self.load_report, False)
        if self.ema is not None:
            self.ema.restart()
        self._watched.remember()

    def _open(self, filename: str) -> Any:
        cfg, group = self.cfg.checkpoint, self.data_parallel_process_group
        return checkpoint_file.open_checkpoint(filename, group, cfg.load_checkpoint_on_all_dp_ranks, False, cfg.read_method)

    def _layout_of(self, reader: Any, selection: Any, report: state.LoadReport) -> dict:
        built = state.class_names(self.criterion, self.optimizer, self.lr_scheduler)
        return self.upgrade_state_dict(loading.own_layout(reader, self.model, built, selection, report))

    def _load_counters(self, extra_state: dict, reset_meters: bool, report: state.LoadReport) -> None:
        self.set_cumulative_training_time(float(extra_state.get("previous_training_time") or 0.0))
        self.validated_at = int(extra_state.get("validated_at") or 0)
        if extra_state.get("scaler"):
            self.precision.load_state_dict(extra_state["scaler"])
        self.nonfinite.load_state_dict(extra_state.get("nonfinite") or {})
        if reset_meters:
            report.reset.append("meters, best score, patience")
        else:
            self.best.load_state_dict(extra_state.get("patience") or {})
            if extra_state.get("metrics"):
                self.meter.load_state_dict(extra_state["metrics"])
            report.restored.append("meters, best score, patience")
        own = state.OWN_EXTRA_STATE
        self._caller_extra_state = {name: value for name, value in extra_state.items() if name not in own}
