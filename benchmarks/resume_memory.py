"""Memory right after a resume over that of a fresh run at the same update, for each rank and both ways of reading.

    python benchmarks/resume_memory.py --ranks 2

Counted is anonymous memory (RssAnon): pages of a mapped file are shared by the ranks and can be reclaimed. Each session
is a process group of its own. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

from local_ranks import run_on_ranks  # noqa: E402

from trainer import Trainer  # noqa: E402

GOAL = 1.02
WIDTH, LAYERS = 2048, 8  # 34 million parameters: 128 MiB, 640 MiB with gradients, moments and average


class Wide(Trainer):
    def build_model(self):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(256, WIDTH))

    def compute_loss(self, sample):
        loss = F.mse_loss(self.model(sample[0]), sample[0], reduction="sum")
        return loss, len(sample[0]), {"loss": loss.detach()}


def make_config(run_dir: str, on_all_ranks: bool) -> dict:
    return {
        "run_dir": run_dir,
        "task_name": "wide",
        "common": {"cpu": True, "num_threads": 1},
        "dataset": {"batch_size": 8, "valid_subset": None},
        "optimization": {"max_update": 10, "lr": 1e-4},
        "checkpoint": {"load_checkpoint_on_all_dp_ranks": on_all_ranks},
        "ema": {"store_ema": True},
    }


def anonymous_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def train(trainer: Wide, num_updates: int) -> None:
    updates = iter(trainer._train_iterator.next_epoch_itr())
    for _ in range(num_updates):
        trainer.train_step(next(updates))


def session(rank: int, cfg: dict, path: str, resume: bool, results) -> None:
    trainer = Wide(cfg)
    trainer.get_train_iterator(1)
    if resume:
        extra_state = trainer.load_checkpoint(path)
        trainer._train_iterator.load_state_dict(extra_state["train_iterator"])
    else:
        train(trainer, 2)
        trainer.save_checkpoint(path)
    train(trainer, 1)
    results[rank] = anonymous_bytes()


def run(ranks: int, cfg: dict, path: str, resume: bool) -> list[int]:
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        run_on_ranks(session, ranks, cfg, path, resume, results)
        return [results[rank] for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    ranks = parser.parse_args().ranks
    for on_all_ranks in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            cfg, path = make_config(folder, on_all_ranks), str(Path(folder, "a.pt"))
            fresh, resumed = run(ranks, cfg, path, False), run(ranks, cfg, path, True)
        worst = max(after / before for after, before in zip(resumed, fresh))
        way = "every rank reads" if on_all_ranks else "rank 0 reads"
        print(
            f"{ranks} rank(s), {way}: fresh {max(fresh) / 2**20:.0f} MiB, resumed {max(resumed) / 2**20:.0f} MiB, "
            f"largest ratio of a rank {worst:.3f} (goal {GOAL})",
            flush=True,
        )


if __name__ == "__main__":
    main()
