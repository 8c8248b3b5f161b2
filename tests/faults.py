"""Runs in which one rank fails or stands still at a chosen place: `run(folder, world_size, fault, …)`.

Each rank is a process as torchrun would start it, forked from the harness's server: it joins, trains and ends through
`launch.run`, so that what is told and how it ends are the real thing. `Story` has the statuses and all that was printed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint_file import archive, writing
from tests.dist.harness import run_ranks_to_any_end
from trainer import Trainer

NUM_SAMPLES = 48
MOMENTS = (
    "start-up",
    "dataset",
    "collate",
    "forward",
    "backward",
    "optimizer",
    "validation",
    "saving",
    "loading",
    "task",
)


def sleep_holding_the_interpreter(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)


DEEDS = {
    "sleep": lambda: time.sleep(600),
    "compute": lambda: [None for _ in iter(int, 1)],
    "hold the interpreter": lambda: sleep_holding_the_interpreter(600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda: (_ for _ in ()).throw(KeyError("item k")),
    "memory": lambda: (_ for _ in ()).throw(MemoryError("no room for the batch")),
    "torch memory": lambda: (_ for _ in ()).throw(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    ),
    "exit": lambda: sys.exit(3),
    "slow": lambda: time.sleep(1.0),
    "none": lambda: None,
}


class Faulty(Trainer):
    """A linear model. On one rank `deed` is done at one `moment`, from the given count of that moment on."""

    def _at(self, moment: str) -> None:
        task = self.cfg.task
        if task.moment == moment and self.data_parallel_rank == task.rank:
            self.counts = {**getattr(self, "counts", {})}
            self.counts[moment] = self.counts.get(moment, 0) + 1
            if self.counts[moment] >= task.count:
                (Path(self.cfg.run_dir).parent / "done_at").write_text(repr(time.monotonic()))
                DEEDS[task.deed]()

    def build_model(self):
        self._at("start-up")
        return torch.nn.Linear(4, 1)

    def build_dataset(self, split):
        return Rows(self._at, self.cfg.task.get("num_valid", 8) if split == "valid" else self.cfg.task.num_samples)

    def compute_loss(self, sample):
        self._at("forward" if self.model.training else "validation")
        loss = self.model(sample).square().sum()
        if loss.requires_grad:
            loss.register_hook(lambda grad: self._at("backward"))
        return loss, len(sample), {"loss": loss.detach()}

    def set_num_updates(self, num_updates):
        self._at("optimizer")
        super().set_num_updates(num_updates)

    def after_validate(self, stats):
        self._at("task")

    def task_state_dict(self):
        self._at("saving")
        if self.cfg.task.get("slow_disk") == self.data_parallel_rank:
            writing.write_all = write_slowly
        return {"n": 1}

    def load_task_state_dict(self, state):
        self._at("loading")


def write_slowly(fd: int, data: memoryview, offset: int) -> None:
    """A disk that gets on, by little."""
    step = -(-len(data) // 4)
    for begin in range(0, len(data), step):
        archive.write_all(fd, data[begin : begin + step], offset + begin)
        time.sleep(0.5)


class Rows:
    def __init__(self, at: Any, num_samples: int) -> None:
        self._at, self._num_samples = at, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self._at("dataset")
        return torch.full((4,), index / 100)

    def collater(self, samples):
        self._at("collate")
        return torch.stack(samples)


def config(folder: Path, moment: str, deed: str, rank: int, count: int, overrides: dict[str, dict]) -> dict:
    cfg = {
        "run_dir": str(folder / "run"),
        "task_name": "faulty",
        "task": {
            "_target_": "tests.faults.Faulty",
            "moment": moment,
            "deed": deed,
            "rank": rank,
            "count": count,
            "num_samples": NUM_SAMPLES,
        },
        "common": {"cpu": True, "log_format": "none", "num_threads": 1},
        "dataset": {"batch_size": 2, "valid_subset": None},
        "optimization": {"max_update": 6, "lr": 1e-3},
        "checkpoint": {"save_interval_updates": 3},
        "distributed_training": {"heartbeat_timeout": 3.0},
    }
    for section, values in overrides.items():
        cfg[section] = {**cfg[section], **values}
    return cfg


@dataclass
class Story:
    """How a run ended. seconds: since the deed was done last, None if it was not. output: stderr of all ranks. log: of all ranks."""

    statuses: list[int | None]
    output: str
    seconds: float | None
    log: str
    folder: Path

    def of(self, rank: int) -> list[str]:
        """The lines in which `rank` says that it ends because of another."""
        return [line for line in self.output.splitlines() if line.startswith(f"rank {rank} ends: ")]


def run(
    folder: Path,
    world_size: int,
    moment: str = "",
    deed: str = "none",
    rank: int = 1,
    count: int = 3,
    timeout: float = 60.0,
    per_rank: dict[int, dict[str, dict]] | None = None,
    **overrides: dict,
) -> Story:
    """Train on `world_size` ranks, where `rank` does `deed` at `moment`. per_rank: further overrides of one rank."""
    cfg = config(folder, moment, deed, rank, count, overrides)
    outcomes = run_ranks_to_any_end(
        train_rank,
        world_size,
        cfg,
        str(folder),
        per_rank or {},
        timeout=timeout,
        init=False,
        peers_may_finish=20.0,
        env={"TORCHELASTIC_RUN_ID": "faults"},
    )
    ended, done_at = time.monotonic(), folder / "done_at"
    seconds = ended - float(done_at.read_text()) if done_at.exists() else None
    hung = [outcome.rank for outcome in outcomes if outcome.hung]
    output = (folder / "output").read_text()
    assert not hung, (hung, output, [outcome.stack for outcome in outcomes])
    log = "".join(path.read_text() for path in sorted((folder / "run").glob("*.log")))
    return Story([o.exitcode for o in outcomes], output, seconds, log, folder)


def within(seconds: float) -> float:
    """`seconds` of a machine with little else to do, in those of this one."""
    return seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


def train_rank(cfg: dict, folder: str, per_rank: dict[int, dict[str, dict]]) -> None:
    """In the process of a rank: train as the command does, and leave with its status."""
    descriptor = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    from trainer import launch, train
    from trainer.config import complete_config

    for section, values in per_rank.get(int(os.environ["RANK"]), {}).items():
        cfg[section] = {**cfg[section], **values}
    complete = complete_config(cfg)
    heartbeat = launch.Heartbeat()
    main = lambda: train.main(complete, (), heartbeat)  # noqa: E731
    launch.leave(launch.run(main, complete.distributed_training, [], cpu=True, heartbeat=heartbeat))
