"""Peak extra memory of a rank while it saves and while it loads, in every arrangement, beyond what stays.

    python benchmarks/peak_memory.py --ranks 2

A model of `--mib` MiB of parameters with two moments and a moving average is saved by one session and loaded by the next,
in processes of their own. Anonymous memory (RssAnon) is sampled every 2 ms; printed is the worst rank's peak above what
it holds before a save, and above what it holds after a load. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

from local_ranks import run_on_ranks  # noqa: E402

from trainer import Trainer  # noqa: E402

MIB = 2**20
WIDTH = 1024
LIMIT_MIB = 64
KINDS = {
    "data parallel": {},
    "zero_sharding=os": {"zero_sharding": "os"},
    "fully_sharded": {"ddp_backend": "fully_sharded"},
    "folder, zero_sharding=os": {"zero_sharding": "os", "use_sharded_state": True},
    "folder, fully_sharded": {"ddp_backend": "fully_sharded", "use_sharded_state": True},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x)


class Wide(Trainer):
    def build_model(self):
        layers = round(self.cfg.task.mib * MIB / (4 * WIDTH * WIDTH))
        return nn.Sequential(*(Block() for _ in range(max(1, layers))))

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(64, WIDTH))

    def compute_loss(self, sample):
        loss = F.mse_loss(self.model(sample[0]), sample[0], reduction="sum")
        return loss, len(sample[0]), {"loss": loss.detach()}


def make_config(run_dir: str, mib: int, distributed: dict, on_all_ranks: bool) -> dict:
    return {
        "run_dir": run_dir,
        "task_name": "wide",
        "task": {"_target_": f"{Wide.__module__}.Wide", "mib": mib},
        "common": {"cpu": True, "num_threads": 1},
        "dataset": {"batch_size": 8, "valid_subset": None},
        "optimization": {"max_update": 10, "lr": 1e-4},
        "checkpoint": {"load_checkpoint_on_all_dp_ranks": on_all_ranks},
        "distributed_training": distributed,
        "ema": {"store_ema": True},
    }


def rss_anon() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class Peak:
    """The highest anonymous memory while the block runs; `before` and `after` are taken with nothing left to free."""

    def __enter__(self) -> Peak:
        self.before = settled()
        self.highest, self._done = self.before, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.is_set():
            self.highest = max(self.highest, rss_anon())
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.highest = max(self.highest, rss_anon())
        self._done.set()
        self._thread.join()
        self.after = settled()


def settled() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss_anon()


def session(rank: int, cfg: dict, path: str, resume: bool, results) -> None:
    trainer = Wide(cfg)
    itr = trainer.get_train_iterator(1)
    if resume:
        with Peak() as peak:
            trainer.load_checkpoint(path)
        extra, stays = peak.highest - max(peak.before, peak.after), peak.after
    else:
        trainer.train_step(next(iter(itr.next_epoch_itr())))
        with Peak() as peak:
            trainer.save_checkpoint(path)
        extra, stays = peak.highest - peak.before, peak.before
    results[rank] = (extra / MIB, stays / MIB)


def run(ranks: int, cfg: dict, path: str, resume: bool) -> tuple[float, float]:
    """The worst rank's (peak extra MiB, MiB that it holds in any case)."""
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        run_on_ranks(session, ranks, cfg, path, resume, results)
        return max(results[rank] for rank in range(ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=192, help="MiB of parameters; the state is four times as large")
    args = parser.parse_args()
    for name, distributed in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "a" if distributed.get("use_sharded_state") else "a.pt"))
            configs = [make_config(folder, args.mib, distributed, way) for way in (True, False)]
            told = [("save", run(args.ranks, configs[0], path, False))]
            told += [(way, run(args.ranks, cfg, path, True)) for way, cfg in zip(("all read", "rank 0 reads"), configs)]
        shown = ", ".join(f"{what} {extra:.0f} (of {stays:.0f})" for what, (extra, stays) in told)
        print(f"{args.ranks} rank(s), {name}: peak extra MiB: {shown}; goal {LIMIT_MIB}", flush=True)


if __name__ == "__main__":
    main()
