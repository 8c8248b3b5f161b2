"""The run of one rank: epochs, validation, when to save and when to stop.

    prepare:   Trainer, run folder, checkpoint, log
    repeat:    for each update of the epoch
                   train_step
                   between updates: validate? end of the epoch? save? stop?
    at the end: after_train

Decisions are functions of the position (epoch, num_updates, end of the epoch?) and of what was done at it before, so
a run that was stopped between an update and the work that follows it does that work first when it continues.
Must not know: Hydra, how the ranks were started.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shlex
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Sequence

import torch
from omegaconf import DictConfig, OmegaConf

import checkpoint_utils
import distributed_utils
from checkpoint_utils.file_system import sync_names
from trainer import alike, optim, run_folder, start_report
from trainer.background_saves import BackgroundSaves
from trainer.config import get_target, to_plain
from trainer.data import valid_subsets
from trainer.errors import ConfigError, NonFiniteError, NothingSavedError
from trainer.logs import RunLog, setup_logging
from trainer.preemption import StopRequest
from trainer.progress import Progress
from trainer.remote_saves import RemoteSaves, together
from trainer.rollback import roll_back
from trainer.time_limit import TimeLimit, seconds_until_the_job_ends
from trainer.trainer import Trainer

logger = logging.getLogger(__name__)

DONE, START_ME_AGAIN = 0, 75


def main(
    cfg: DictConfig,
    typed: Sequence[str] = (),
    heartbeat: distributed_utils.Heartbeat | None = None,
    watch: Callable[[Run], None] | None = None,
) -> int:
    """Run this rank to its end. Returns the exit status: 0 done, 75 stopped by a request with a checkpoint saved.

    Args:
        cfg: a complete config (trainer.config.complete_config).
        typed: the overrides of the command line, to tell them from defaults in the report of a resume.
        heartbeat: takes the beats of this rank, for who watches them.
        watch: given the run when it is ready to train, for whoever wants to see what it computes.
    Raises: ConfigError, CheckpointError and StateError for bad input before the first update, StoppedAtStartError for a
        stop before it; whatever goes wrong later.
    """
    with StopRequest() as requests:
        run = Run(cfg, typed, requests, heartbeat)
        try:
            try:
                run.prepare()
            except BaseException:
                run.discard()
                raise
            try:
                if watch is not None:
                    watch(run)
                return run.train()
            except BaseException as error:
                run.saves.leave(error)
                if getattr(error, "must_not_write", False):
                    run.log = None  # nor what waits to be written
                raise
        finally:
            run.close()


def validation_due(dataset_cfg: Any, epoch: int, num_updates: int, end_of_epoch: bool, is_end: bool) -> bool:
    """Whether to validate after this update: each `validate_interval` epochs or `validate_interval_updates`, at the end."""
    interval, epochs = dataset_cfg.validate_interval_updates, dataset_cfg.validate_interval
    return is_end or _interval_ends(interval, epochs, epoch, num_updates, end_of_epoch)


def save_due(checkpoint_cfg: Any, epoch: int, num_updates: int, end_of_epoch: bool, is_end: bool) -> bool:
    """Whether to save after this update: each `save_interval` epochs or `save_interval_updates`, at the end."""
    interval, epochs = checkpoint_cfg.save_interval_updates, checkpoint_cfg.save_interval
    return is_end or _interval_ends(interval, epochs, epoch, num_updates, end_of_epoch)


def _interval_ends(interval: int, epochs: int, epoch: int, num_updates: int, end_of_epoch: bool) -> bool:
    """Whether `interval` updates or `epochs` epochs are full at this position; 0 of either never are."""
    by_updates = interval > 0 and num_updates > 0 and num_updates % interval == 0
    return by_updates or (end_of_epoch and epochs > 0 and epoch % epochs == 0)


class Run:
    """One session of a run on one rank."""

    def __init__(
        self,
        cfg: DictConfig,
        typed: Sequence[str],
        requests: StopRequest,
        heartbeat: distributed_utils.Heartbeat | None = None,
    ) -> None:
        self.cfg, self.typed, self.requests = cfg, list(typed), requests
        self.heartbeat = heartbeat or distributed_utils.Heartbeat()
        self.is_master = distributed_utils.is_master()
        self.subsets = valid_subsets(cfg.dataset)
        self.log: RunLog | None = None
        self.progress: Progress | None = None
        self.folder: Any = None
        self.save_folder: Any = None  # the folder of checkpoints, where it lies outside
        self._made: list[Path] = []  # the folders that were made for checkpoints, innermost first
        # Read after each update: a field of an OmegaConf node costs as much as a line of the log.
        self.dataset_cfg, self.checkpoint_cfg = _plain(cfg.dataset), _plain(cfg.checkpoint)
        self.optimization_cfg = _plain(cfg.optimization)
        self.remote = RemoteSaves(cfg)
        self._log_interval = cfg.common.log_interval

    # ---- prepare: all that can be refused is refused here ----

    def prepare(self) -> None:
        cfg = self.cfg
        logs = setup_logging(cfg.run_dir, distributed_utils.get_rank(), cfg.common.log_format)
        task = get_target(cfg.task, Trainer)
        alike.check_start(cfg, task)
        self.trainer = task(cfg)
        self.trainer.requests, self.trainer.heartbeat = self.requests, self.heartbeat
        self.trainer.saves = self.saves = BackgroundSaves(self.checkpoint_cfg.max_failed_saves, self._log_save)
        self.trainer.get_train_iterator(1)
        for subset in self.subsets:
            self.trainer.dataset(subset)
        names = [cfg.dataset.train_subset, *self.subsets]
        alike.check_data({name: self.trainer.dataset(name) for name in names})
        self.folder = together(lambda: run_folder.prepare(cfg.run_dir, cfg, self.is_master, self.typed))
        together(self._make_save_dir)
        self._check_shared()
        together(self._leave_if_told)
        self.time_limit = self._end_of_job()
        self.heartbeat.enter("loading")
        self.remote.begin()
        extra_state, self.itr = checkpoint_utils.load_checkpoint(self.remote.section, self.trainer)
        self.heartbeat.enter("start-up", self.trainer.get_num_updates())
        self._check_metric()
        together(self.folder.write_config)
        logs.open_file()  # after what may be refused for want of room: it is not taken away again
        self.log = self.trainer.log = RunLog(cfg.run_dir, cfg.common, self.is_master, run_id=self.trainer.run_id)
        num_updates = self.trainer.get_num_updates()
        self.log.cut_after(num_updates)
        self._report_start(extra_state)
        self._say_room()
        rank, unit = distributed_utils.get_rank(), self.trainer.sample_unit
        self.progress = Progress(self._total_updates(), cfg.common.log_format, rank, num_updates, unit=unit)

    def _end_of_job(self) -> TimeLimit:
        """Rank 0 asks, all know whether there is an end. Where nothing can be saved nothing is gained by an early stop."""
        asked = self.is_master and not self.checkpoint_cfg.no_save
        limit = TimeLimit(distributed_utils.broadcast_object(seconds_until_the_job_ends() if asked else None))
        if limit.exists:
            logger.info("this Slurm job ends in %.0f s: the run stops and saves before that", limit.seconds_left)
        return limit

    def _make_save_dir(self) -> None:
        """Find out now that checkpoints can be written, not at the first save."""
        if self.checkpoint_cfg.no_save or not self.is_master:
            return
        save_dir = Path(self.remote.section.save_dir).expanduser()
        self._made = [folder for folder in (save_dir, *save_dir.parents) if not folder.exists()]
        held_by = run_folder.folder_of_checkpoints(save_dir, self.folder.path)
        if held_by is not None:
            self.save_folder = run_folder.RunFolder(held_by, self.cfg)
            self.save_folder.hold("checkpoint.save_dir")
        try:
            save_dir.mkdir(parents=True, exist_ok=True)
            sync_names(str(save_dir))
            tempfile.TemporaryFile(dir=save_dir).close()
            # The folder is ours: whoever stood still within a save, and was taken over, must not end it when he wakes.
            checkpoint_utils.remove_stale_temporaries(str(save_dir), is_written=lambda path: False)
        except OSError as error:
            raise ConfigError(
                f"checkpoint.save_dir={save_dir} cannot be written ({error.strerror}). "
                "Choose another with checkpoint.save_dir=..., or train without checkpoints: checkpoint.no_save=true"
            ) from error

    def _check_shared(self) -> None:
        """Collective: where each rank writes its part of a folder, all must see what rank 0 writes there."""
        if self.checkpoint_cfg.no_save or not self.trainer.use_sharded_state:
            return
        save_dir = Path(self.remote.section.save_dir).expanduser()
        mark = together(lambda: tempfile.NamedTemporaryFile(dir=save_dir) if self.is_master else None)
        name = distributed_utils.broadcast_object(mark and os.path.basename(mark.name))
        seen = distributed_utils.all_gather_list(run_folder.is_seen(save_dir / name))
        if mark is not None:
            mark.close()
        if not all(seen):
            raise ConfigError(
                f"checkpoint.save_dir={save_dir}: rank {seen.index(False)} does not see the folder of rank 0, and folders "
                "need one that all ranks share. Choose such a one with checkpoint.save_dir=FOLDER, or leave out "
                "distributed_training.use_sharded_state=true"
            )

    def _total_updates(self) -> int | None:
        """The last update of the run as far as the limits tell."""
        optimization = self.cfg.optimization
        by_epochs = optimization.max_epoch * self.itr.num_updates_per_epoch
        return min((limit for limit in (optimization.max_update, by_epochs) if limit > 0), default=None)

    def _check_metric(self) -> None:
        """A trial validation of one batch: the metric that ranks checkpoints must be among what validation gives."""
        checkpoint = self.cfg.checkpoint
        if not self.subsets or (checkpoint.no_save and checkpoint.patience <= 0):
            return
        stats = self.trainer.validate(self.subsets[0], max_batches=1)
        metric = checkpoint.best_checkpoint_metric
        if stats and metric not in stats:
            raise ConfigError(
                f"checkpoint.best_checkpoint_metric={metric} is not among the metrics of {self.subsets[0]}: "
                f"{', '.join(sorted(stats))}"
            )

    def _report_start(self, extra_state: dict | None) -> None:
        """Say what the run starts from, and after a resume what was restored, reset and changed."""
        report = self.trainer.load_report
        if report is None:
            logger.info("fresh run in %s", self.cfg.run_dir)
            return
        changed = start_report.changed_settings(report.saved_cfg, to_plain(self.cfg), self.typed)
        ranks = (extra_state or {}).get("ranks")
        changed = start_report.with_real_ranks(changed, ranks, self.trainer.data_parallel_world_size)
        kind = "continue" if extra_state is not None else "finetune"
        lines = start_report.lines_of(report, kind, self.itr.epoch, changed)
        lines += self._limits_of_equality(extra_state or {})
        logger.info("\n".join(lines))
        self.log.event(
            "resume",
            path=report.path,
            num_updates=self.trainer.get_num_updates(),
            **start_report.fields_of(report),
            changed=changed,
        )

    def _say_room(self) -> None:
        """Say how large a checkpoint will be and how many fit, while there is time to do something about it."""
        state = self.trainer.state_dict()
        if self.checkpoint_cfg.no_save or not self.is_master:
            return
        moments, tensors = 0.0, 0
        optimizer_state = state["last_optimizer_state"]
        if optimizer_state is not None and not optimizer_state["state"]:
            moments, per_parameter = optim.moments_per_parameter(self.trainer.optimizer)
            tensors = per_parameter * sum(len(group["params"]) for group in optimizer_state["param_groups"])
        not_yet_there = int(moments * checkpoint_utils.bytes_of_state(state["model"]))
        boxes = 0
        if self.trainer.use_sharded_state:
            boxes = self.trainer.data_parallel_world_size if self.trainer.forward_is_collective else 1
        checkpoint_utils.say_room(self.checkpoint_cfg, state, not_yet_there, tensors, boxes)

    def _limits_of_equality(self, extra_state: dict) -> list[str]:
        """What keeps this session from continuing bit by bit, if anything does."""
        lines = []
        ranks, now = extra_state.get("ranks"), self.trainer.data_parallel_world_size
        if ranks is not None and ranks != now:
            lines.append(
                f"  ranks: saved {ranks}, now {now}, with {self.itr.update_freq} micro-batches in an update of "
                f"{self.itr.items_per_update} {self.itr.unit} in all: numbers go on to rounding"
            )
        saved, now = extra_state.get("num_threads"), torch.get_num_threads()
        if saved is not None and saved != now:
            lines.append(
                f"  threads of a rank: saved {saved}, now {now}: sums may differ in their last bits "
                f"(common.num_threads={saved} keeps them)"
            )
        if self.trainer.device.type != "cpu" and not self.cfg.common.deterministic:
            lines.append("  numbers go on to rounding: bit by bit needs common.deterministic=true on an accelerator")
        return lines

    # ---- train ----

    def train(self) -> int:
        """Epoch after epoch until a limit is reached or somebody asks to stop."""
        reason = self._end_reason() or self._time_reason()
        if reason is not None and not self._work_is_owed(reason):
            return self._already_finished(reason)
        together(self._leave_if_told)
        self._set_time_limit()
        while True:
            try:
                status = self._train_epoch()
            except NonFiniteError as error:
                status = self._roll_back(error)
            if status is not None:
                return status

    def _roll_back(self, error: NonFiniteError) -> None:
        """Where common.on_nonfinite says so, go back to the newest healthy checkpoint; otherwise raise the error."""
        trainer = self.trainer
        if not trainer.nonfinite.goes_back:
            raise error
        self.saves.flush()
        path = roll_back(self.remote.section, trainer, self.itr, error)
        num_updates, count = trainer.get_num_updates(), trainer.nonfinite.count
        self.log.cut_after(num_updates)
        self.log.event("rollback", num_updates=num_updates, count=count, path=path, what=error.what, bad_update=error.num_updates)

    def _train_epoch(self) -> int | None:
        trainer = self.trainer
        self.heartbeat.enter("data", trainer.get_num_updates())
        trainer.begin_epoch(self.itr.next_epoch_idx)
        if self._work_is_owed(self._end_reason()):
            status = self._between_updates()
            if status is not None:
                return status
        for samples in self.itr.next_epoch_itr():
            status = self.update(samples)
            if status is not None:
                return status
        return None

    def update(self, samples: list) -> int | None:
        """One update and the work behind it. Returns the exit status where the session ends here, else None."""
        if self.is_master and not self.time_limit.has_time_for_updates():
            self.requests.request_stop(because=str(self.time_limit))
        try:
            with self.time_limit.measured("update"):
                stats = self.trainer.train_step(samples)
        except ArithmeticError as error:
            self._add_samples(error)
            raise
        self.folder.check()
        if stats is not None:
            self._log_update(stats)
        self.heartbeat.enter("saving", self.trainer.get_num_updates())
        self.trainer.settle_saves()
        status = self._between_updates(stepped=stats is not None)
        self.heartbeat.enter("data")
        return status

    def _add_samples(self, error: ArithmeticError) -> None:
        """The Trainer knows the micro-batch that went bad, the iterator which samples were in it."""
        micro_batch = getattr(error, "micro_batch", None)
        if micro_batch is not None and self.itr.last_indices:
            indices = list(self.itr.last_indices[micro_batch])
            shown = ", ".join(map(str, indices[:16])) + (", …" if len(indices) > 16 else "")
            error.args = (f"{error} Epoch {self.itr.epoch}, samples of that batch: {shown}.",)

    def _log_update(self, stats: dict[str, float]) -> None:
        num_updates = self.trainer.get_num_updates()
        if num_updates % self._log_interval == 0 or num_updates == 1:
            wall = self.trainer.cumulative_training_time()
            self.log.train({"epoch": self.itr.epoch, "num_updates": num_updates, **stats, "wall": wall})
        self.progress.update(num_updates, self.itr.epoch, stats)

    def _between_updates(self, stepped: bool = True) -> int | None:
        """The work between two updates. Returns the exit status where the session ends here, else None."""
        trainer, itr = self.trainer, self.itr
        epoch, num_updates, end_of_epoch = itr.epoch, trainer.get_num_updates(), itr.end_of_epoch()
        reason = self._end_reason()
        if trainer.stop_requested and reason is None:
            reason = self._time_reason()
            if reason is None:
                return self._stop()
        if not (stepped or end_of_epoch):
            return None
        val_loss = None
        if self.subsets and trainer.validated_at != num_updates:
            if validation_due(self.dataset_cfg, epoch, num_updates, end_of_epoch, reason is not None):
                if not self._has_time_for_validation():
                    return self._stop()
                with self.time_limit.measured("validation"):
                    val_loss = self._validate()
                reason = reason or self._patience_reason()
        if end_of_epoch:
            self._end_epoch(epoch, val_loss)
        is_best = val_loss is not None and trainer.best.best_num_updates == num_updates
        is_due = is_best or save_due(self.checkpoint_cfg, epoch, num_updates, end_of_epoch, reason is not None)
        if is_due or trainer.save_requested:
            with trainer.nonfinite.saving(num_updates if is_due else None):
                self._save(val_loss, ending=reason is not None)
        return self._finish(reason) if reason is not None else None

    def _work_is_owed(self, reason: str | None) -> bool:
        """Whether the run was stopped between the update it stands at and the work that follows that update."""
        num_updates, itr = self.trainer.get_num_updates(), self.itr
        if num_updates == 0:
            return False
        if itr.end_of_epoch():
            return True
        due = validation_due(self.dataset_cfg, itr.epoch, num_updates, False, reason is not None)
        return bool(self.subsets) and due and self.trainer.validated_at != num_updates

    def _end_epoch(self, epoch: int, val_loss: float | None) -> None:
        trainer = self.trainer
        trainer.lr_step(epoch, val_loss)
        meter = trainer.meter
        if meter.num_updates:
            stats = trainer.reduce_metrics([{**meter.sums, "sample_size": meter.sample_size}])
            self.log.event("epoch", epoch=epoch, num_updates=trainer.get_num_updates(), **stats)
        meter.reset()
        self.itr.finish_epoch()

    # ---- validate and save ----

    def _has_time_for_validation(self) -> bool:
        """Whether rank 0 sees time for a validation before the job ends; else the next start makes it."""
        limit = self.time_limit
        if not limit.exists or distributed_utils.broadcast_object(limit.has_time_for_validation()):
            return True
        self.requests.request_stop(because=f"{limit}, too soon for a validation")
        return False

    def _validate(self) -> float | None:
        """Validate all subsets; the score is the first one's best_checkpoint_metric, None where there is none."""
        trainer, num_updates = self.trainer, self.trainer.get_num_updates()
        all_stats: dict[str, float] = {}
        score = None
        for i, subset in enumerate(self.subsets):
            stats = trainer.validate(subset)
            if not stats:
                logger.warning("validation subset %s has no samples: no metrics from it", subset)
            self.log.valid(subset, {"epoch": self.itr.epoch, "num_updates": num_updates, **stats})
            all_stats.update({(f"{subset}_{name}" if i else name): value for name, value in stats.items()})
            if i == 0:
                score = stats.get(self.cfg.checkpoint.best_checkpoint_metric)
        trainer.validated_at = num_updates
        if score is not None and not math.isfinite(score):
            logger.warning("%s is %s: not ranked", self.cfg.checkpoint.best_checkpoint_metric, score)
        trainer.best.update(score, num_updates)
        self.progress.validated(all_stats)
        self.heartbeat.enter("task")
        trainer.after_validate(all_stats)
        return score

    def _save(self, val_loss: float | None, ending: bool = False, stopping: bool = False) -> bool:
        """Save under all names that this position has. False if there was nothing to save.

        ending: nothing is trained after it, so that it is waited for. stopping: somebody asked for that.
        """
        self._check_folders()
        self.heartbeat.enter("saving")
        self.log.flush()
        self.requests.clear_save()
        self._save_begun = time.monotonic()
        self.remote.check()
        cfg, trainer, itr = self.remote.section, self.trainer, self.itr
        if self.checkpoint_cfg.write_checkpoints_asynchronously and not ending:
            return self.saves.begin(cfg, trainer, itr, val_loss)
        return self.saves.save(cfg, trainer, itr, val_loss, last=ending, stopping=stopping)

    def _check_folders(self) -> None:
        """On rank 0: raise if another start has taken them over."""
        for folder in (self.folder, self.save_folder):
            if folder is not None:
                folder.check(surely=True)

    def _log_save(self, saved: checkpoint_utils.SavedCheckpoint) -> None:
        self._check_folders()
        self.time_limit.took("save", time.monotonic() - self._save_begun + self.remote.seconds)
        self.remote.push()
        self.log.event("checkpoint", path=saved.paths[0], **dataclasses.asdict(saved))

    # ---- stop ----

    def _leave_if_told(self) -> None:
        """A stop that was asked for before the first update needs no save."""
        if self.requests.stop_requested:
            raise distributed_utils.StoppedAtStartError(self.requests.signal_name)

    def _stop(self) -> int:
        num_updates = self.trainer.get_num_updates()
        try:
            if not self._save(None, ending=True, stopping=True):
                raise NothingSavedError(num_updates)
        except NonFiniteError as error:
            if not self.trainer.nonfinite.can_go_back:
                raise
            logger.error("%s The next start goes on from the newest checkpoint, as a rollback would", error)
            self.progress.close()
            return START_ME_AGAIN
        self.remote.finish()
        self.progress.close()  # nothing comes behind the last words
        logger.info(
            "stopped by %s at update %d, checkpoint saved: start the same command to go on", self.requests.reason, num_updates
        )
        return START_ME_AGAIN

    def _end_reason(self) -> str | None:
        """The limit that the run has reached, as the override that set it."""
        optimization, itr = self.optimization_cfg, self.itr
        epochs_done = itr.epoch if itr.end_of_epoch() else itr.next_epoch_idx - 1
        if 0 < optimization.max_update <= self.trainer.get_num_updates():
            return f"optimization.max_update={optimization.max_update}"
        if 0 < optimization.max_epoch <= epochs_done:
            return f"optimization.max_epoch={optimization.max_epoch}"
        return self._patience_reason()

    def _patience_reason(self) -> str | None:
        patience = self.checkpoint_cfg.patience
        return f"checkpoint.patience={patience}" if 0 < patience <= self.trainer.best.runs_without_improvement else None

    def _set_time_limit(self) -> None:
        hours = self.optimization_cfg.stop_time_hours
        self.trainer.stop_after_seconds = hours * 3600 if hours > 0 else math.inf

    def _time_reason(self) -> str | None:
        """The limit of time, if it is reached; rank 0's clock decides for all."""
        hours = self.optimization_cfg.stop_time_hours
        if hours <= 0 or not distributed_utils.broadcast_object(self.trainer.cumulative_training_time() >= hours * 3600):
            return None
        return f"optimization.stop_time_hours={hours}"

    def _already_finished(self, reason: str) -> int:
        num_updates = self.trainer.get_num_updates()
        if not distributed_utils.broadcast_object(self.log.is_done(num_updates)):  # killed during its last words
            return self._finish(reason)
        self.remote.finish()
        self.progress.close()
        logger.info(
            "this run is finished: %s is reached (update %d, %s). To go on, type a higher limit, for example: %s",
            reason,
            num_updates,
            self.cfg.run_dir,
            self._extension(reason),
        )
        return DONE

    def _finish(self, reason: str) -> int:
        self.heartbeat.enter("saving")
        self.saves.flush()
        self.remote.finish()
        self.progress.close()
        logger.info("done: %s reached at update %d", reason, self.trainer.get_num_updates())
        self.heartbeat.enter("task")
        self.trainer.after_train()
        self.log.event("done", num_updates=self.trainer.get_num_updates(), reason=reason)
        resume = shlex.quote(f"resume={self.cfg.run_dir}")
        logger.info("train on: fairtrain %s %s", resume, self._extension(reason))
        return DONE

    def _extension(self, reason: str) -> str:
        """The override that gives the run as long again as it has had, or as its limit allowed."""
        key, limit = reason.split("=")
        reached = {
            "optimization.max_update": self.trainer.get_num_updates(),
            "optimization.max_epoch": self.itr.epoch,
            "optimization.stop_time_hours": self.trainer.cumulative_training_time() / 3600,
            "checkpoint.patience": self.trainer.best.runs_without_improvement,
        }[key]
        return f"{key}={2 * max(float(limit), reached):.10g}"

    def discard(self) -> None:
        """The run is refused before its first update: leave no trace of it."""
        if self.save_folder is not None:
            self.save_folder.discard()
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                break  # somebody has put something in it, or it was never made
        if self.folder is not None:
            self.folder.discard()

    def close(self) -> None:
        for part in (self.progress, self.log, self.remote, self.save_folder, self.folder):
            if part is not None:
                part.close()


def _plain(section: DictConfig) -> SimpleNamespace:
    return SimpleNamespace(**OmegaConf.to_container(section, resolve=True))
