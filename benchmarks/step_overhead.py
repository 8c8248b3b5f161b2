"""What the Trainer costs an update: its milliseconds over those of a bare PyTorch loop that does the same work.

    python benchmarks/step_overhead.py                    one process
    python benchmarks/step_overhead.py --ranks 2          two ranks over gloo; the bare loop is stock DDP

Both train the same model on the same batches from the same start, and every loss must be equal bit by bit. They take
turns in one process, CHUNK updates each, so that the machine's drift hits both; the ratio is taken turn by turn, and
its median is printed. The Trainer's side is the whole loop of a run: data position, seeds, log.jsonl, requests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

from local_ranks import run_on_ranks  # noqa: E402

from trainer import Trainer  # noqa: E402

CHUNK = 25
SIZES = {"1 ms": (32, 96, 4), "5 ms": (192, 256, 6), "20 ms": (256, 416, 8)}  # batch, width, layers
GOALS = {"1 ms": 1.10, "5 ms": 1.03, "20 ms": 1.01}


def build_rows(num_samples: int, width: int) -> TensorDataset:
    """A table in memory, which both sides index by whole batches: reading costs them next to nothing."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(num_samples, width, generator=generator), torch.randn(num_samples, 8, generator=generator)
    return TensorDataset(x, y)


def build_net(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*blocks, nn.Linear(width, 8))


class Regression(Trainer):
    def build_dataset(self, split):
        return build_rows(self.cfg.task.num_samples, self.cfg.task.width)

    def compute_loss(self, sample):
        x, y = sample
        loss = F.mse_loss(self.model(x), y, reduction="sum")
        return loss, len(y), {"loss": loss.detach()}


def make_config(run_dir: str, batch: int, width: int, num_updates: int, ranks: int) -> dict:
    return {
        "run_dir": run_dir,
        "task_name": "overhead",
        "task": {"_target_": f"{Regression.__module__}.Regression", "num_samples": 64 * batch * ranks, "width": width},
        "optimizer": {"_target_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.01},
        "lr_scheduler": {"_target_": "trainer.lr_scheduler.Fixed"},
        "common": {"cpu": True, "log_format": "none"},
        "dataset": {"batch_size": batch, "valid_subset": None},
        "optimization": {"max_update": num_updates, "lr": 1e-3, "clip_norm": clip_norm(ranks)},
        "checkpoint": {"no_save": True},
    }


def clip_norm(ranks: int) -> float:
    """The Trainer takes the norm of large gradients by rows, and at several ranks that of flat buckets: equal to rounding.

    So nothing is scaled by it, and losses stay equal; the norm is taken and looked at on both sides.
    """
    return 1e6


class BareLoop:
    """The loop that a person writes by hand: sums of losses, gradients divided by the global sample size."""

    def __init__(self, net: nn.Module, dataset: TensorDataset, batches, ranks: int) -> None:
        self.net, self.dataset, self.batches, self.ranks = net, dataset, batches, ranks
        self.model = nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
        self.parameters = list(net.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True, weight_decay=0.01)
        self.losses: list[float] = []

    def update(self) -> None:
        rows = next(self.batches)
        x, y = (tensor[rows] for tensor in self.dataset.tensors)
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y, reduction="sum")
        loss.backward()
        sums = torch.tensor([loss.item(), len(y)], dtype=torch.float64)
        if self.ranks > 1:
            torch.distributed.all_reduce(sums)
        total, sample_size = sums.tolist()
        for parameter in self.parameters:
            parameter.grad.mul_(self.ranks).div_(sample_size)  # DDP has divided by the ranks
        nn.utils.clip_grad_norm_(self.parameters, clip_norm(self.ranks))
        self.optimizer.step()
        self.losses.append(total / sample_size)


def measure(size: str, rounds: int, ranks: int) -> tuple[float, float, float]:
    """(median ms of the bare loop, of the Trainer, median of the paired ratios) of one size."""
    from trainer.config import complete_config
    from trainer.data import sample_order

    batch, width, layers = SIZES[size]
    num_updates = CHUNK * (rounds + 2)
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    with tempfile.TemporaryDirectory() as folder:
        folder = _shared(folder, ranks)
        cfg = complete_config(make_config(folder, batch, width, num_updates + 1, ranks))
        run = BenchmarkRun(cfg, build_net(width, layers))
        dataset = run.trainer.dataset("train")
        bare = BareLoop(build_net(width, layers), dataset, _batches(sample_order, dataset, batch, rank, ranks), ranks)
        updates = _updates(run)
        times: dict[str, list[float]] = {"bare": [], "trainer": []}
        for turn in range(rounds + 2):
            order = ("bare", "trainer") if turn % 2 else ("trainer", "bare")
            for side in order:
                times[side].append(_time(bare.update if side == "bare" else lambda: next(updates)))
        run.log.flush()
        if rank == 0:
            _check_losses(run, bare)
        run.close()
    bare_ms, trainer_ms = times["bare"][2:], times["trainer"][2:]
    ratios = [ours / theirs for ours, theirs in zip(trainer_ms, bare_ms)]
    return statistics.median(bare_ms), statistics.median(trainer_ms), statistics.median(ratios)


def BenchmarkRun(cfg, net):  # noqa: N802  stands for a class
    """A Run, prepared, that trains `net`."""
    from trainer.preemption import StopRequest
    from trainer.train import Run

    Regression.build_model = lambda self: net
    run = Run(cfg, (), StopRequest())
    run.prepare()
    return run


def _updates(run):
    while True:
        run.trainer.begin_epoch(run.itr.next_epoch_idx)
        for samples in run.itr.next_epoch_itr():
            run.update(samples)
            yield


def _batches(sample_order, dataset, batch: int, rank: int, ranks: int):
    epoch = 1
    while True:
        order = sample_order(1, epoch, len(dataset))
        for begin in range(rank * batch, len(dataset), batch * ranks):
            yield order[begin : begin + batch]
        epoch += 1


def _time(update) -> float:
    begin = time.perf_counter()
    for _ in range(CHUNK):
        update()
    return (time.perf_counter() - begin) * 1000 / CHUNK


def _shared(folder: str, ranks: int) -> str:
    import distributed_utils

    return distributed_utils.broadcast_object(folder) if ranks > 1 else folder


def _check_losses(run, bare: BareLoop) -> None:
    from trainer.logs import read_log

    log = Path(run.cfg.run_dir) / "log.jsonl"
    losses = [line["loss"] for line in read_log(log) if line["event"] == "train"]
    different = next((i for i, pair in enumerate(zip(losses, bare.losses)) if pair[0] != pair[1]), None)
    assert different is None, f"update {different}: losses {losses[different]!r} and {bare.losses[different]!r}"
    assert len(losses) == len(bare.losses), (len(losses), len(bare.losses))


def _rank_main(rank: int, args: argparse.Namespace) -> None:
    for size in args.sizes:
        bare, trainer, ratio = measure(size, args.rounds, args.ranks)
        if rank == 0:
            print(
                f"{args.ranks} rank(s), {size:>5}: bare {bare:6.2f} ms, Trainer {trainer:6.2f} ms, "
                f"ratio {ratio:.3f} (goal {GOALS[size]:.2f}); losses equal bit by bit",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30, help=f"turns of {CHUNK} updates for each side")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    args = parser.parse_args()
    run_on_ranks(_rank_main, args.ranks, args)


if __name__ == "__main__":
    main()
