"""What ZeRO costs an update, and what it saves: milliseconds and bytes of optimizer state over plain data parallel's.

    python benchmarks/zero.py --ranks 2
    python benchmarks/zero.py --ranks 4 --sizes "5 ms"

Four sides train the same net on the same batches and take turns in one process, CHUNK updates each: the Trainer without
and with distributed_training.zero_sharding=os (all losses must be equal bit by bit), and torch's DDP with AdamW and
with ZeroRedundancyOptimizer. Each ratio is taken turn by turn against the same kind without ZeRO; the median is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

from local_ranks import run_on_ranks  # noqa: E402

from trainer import Trainer  # noqa: E402

CHUNK = 10
SIZES = {"1 ms": (32, 96, 4), "5 ms": (96, 224, 4), "20 ms": (256, 416, 8)}  # batch, width, layers
GOAL = 1.15
SETTINGS = {"lr": 1e-3, "weight_decay": 0.01, "fused": True}


class Regression(Trainer):
    def compute_loss(self, sample):
        x, y = sample
        loss = F.mse_loss(self.model(x), y, reduction="sum")
        return loss, len(y), {"loss": loss.detach()}


def build_net(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*blocks, nn.Linear(width, 8))


class TrainerSide:
    def __init__(self, width: int, layers: int, zero_sharding: str) -> None:
        cfg = {
            "task": {"_target_": f"{Regression.__module__}.Regression"},
            "optimizer": {"_target_": "torch.optim.AdamW", "fused": True, "weight_decay": SETTINGS["weight_decay"]},
            "common": {"cpu": True},
            "optimization": {"lr": SETTINGS["lr"], "clip_norm": 1.0, "max_update": 10**6},
            "distributed_training": {"zero_sharding": zero_sharding},
        }
        self.trainer, self.losses = Regression(cfg, build_net(width, layers)), []
        self.state = self.trainer.optimizer.state

    def update(self, batch: tuple) -> None:
        self.losses.append(self.trainer.train_step([batch])["loss"])


class TorchSide:
    def __init__(self, width: int, layers: int, zero: bool) -> None:
        net = build_net(width, layers)
        self.model = nn.parallel.DistributedDataParallel(net)
        self.parameters = list(net.parameters())
        if zero:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer: Any = ZeroRedundancyOptimizer(
                self.parameters, torch.optim.AdamW, parameters_as_bucket_view=True, **SETTINGS
            )
        else:
            self.optimizer = torch.optim.AdamW(self.parameters, **SETTINGS)
        self.state = self.optimizer.optim.state if zero else self.optimizer.state

    def update(self, batch: tuple) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y, reduction="sum")
        loss.backward()
        sums = torch.tensor([loss.item(), len(y)], dtype=torch.float64)
        dist.all_reduce(sums)
        for parameter in self.parameters:
            parameter.grad.mul_(dist.get_world_size() / sums[1].item())
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


def measure(size: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """(milliseconds of an update, turn by turn, bytes of optimizer state on the rank that has most) of each side."""
    batch, width, layers = SIZES[size]
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        (torch.randn(batch, width, generator=generator), torch.randn(batch, 8, generator=generator)) for _ in range(8)
    ]
    sides = {
        "plain": TrainerSide(width, layers, "none"),
        "zero": TrainerSide(width, layers, "os"),
        "ddp": TorchSide(width, layers, False),
        "torch zero": TorchSide(width, layers, True),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            times[name].append(_time(sides[name], batches))
    assert sides["plain"].losses == sides["zero"].losses, "the losses differ"
    return {name: turns[1:] for name, turns in times.items()}, {name: _most_bytes(s.state) for name, s in sides.items()}


def _time(side: Any, batches: list) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for i in range(CHUNK):
        side.update(batches[i % len(batches)])
    return (time.perf_counter() - begin) * 1000 / CHUNK


def _most_bytes(state: dict) -> int:
    tensors = [t for entry in state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    nbytes = torch.tensor(sum(t.numel() * t.element_size() for t in tensors))
    dist.all_reduce(nbytes, dist.ReduceOp.MAX)
    return int(nbytes)


def _rank_main(rank: int, args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    for size in args.sizes:
        times, nbytes = measure(size, args.rounds)
        if rank == 0:
            _print(args.ranks, size, times, nbytes)


def _print(ranks: int, size: str, times: dict[str, list[float]], nbytes: dict[str, int]) -> None:
    for name, base, note in (
        ("zero", "plain", f" (goal {GOAL})"),
        ("torch zero", "ddp", ""),
        ("zero", "torch zero", ""),
    ):
        ratio = statistics.median(a / b for a, b in zip(times[name], times[base]))
        medians = statistics.median(times[name]), statistics.median(times[base])
        share = nbytes[name] / (nbytes["plain"] / ranks)
        print(
            f"{ranks} ranks, {size:>5}: {name} {medians[0]:6.2f} ms over {base} {medians[1]:6.2f} ms: {ratio:.3f}{note};"
            f" state of the largest owner over total/{ranks}: {share:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help=f"turns of {CHUNK} updates for each side")
    parser.add_argument("--sizes", nargs="+", default=["1 ms", "5 ms"], choices=list(SIZES))
    args = parser.parse_args()
    run_on_ranks(_rank_main, args.ranks, args)


if __name__ == "__main__":
    main()
