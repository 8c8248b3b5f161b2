"""What an update with ddp_backend=fully_sharded costs over a bare fully_shard loop, and what a load brings to a rank.

    python benchmarks/fully_sharded.py --ranks 2
    python benchmarks/fully_sharded.py --ranks 4 --sizes small --rounds 7

Both sides train the same net, wrapped alike, on the same batches, with AdamW, clipping and the sum of losses over ranks,
and take turns in one process, CHUNK updates each; the ratio is the median over turns. Then the Trainer saves and loads by
way of rank 0, and the bytes that other ranks receive are counted where they enter the process.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

from local_ranks import run_on_ranks  # noqa: E402

from checkpoint_file import ShardedTensor  # noqa: E402
from checkpoint_file.nests import leaves  # noqa: E402
from trainer import Trainer  # noqa: E402

CHUNK = 5
SIZES = {"small": (64, 192, 4), "medium": (256, 384, 6), "large": (512, 768, 8)}  # batch, width, blocks
GOAL = 1.05
RECEIVES = ("recv", "irecv", "broadcast")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Regression(Trainer):
    def compute_loss(self, sample):
        x, y = sample
        loss = F.mse_loss(self.model(x), y, reduction="sum")
        return loss, len(y), {"loss": loss.detach()}


class TrainerSide:
    def __init__(self, width: int, num_blocks: int) -> None:
        cfg = {
            "task": {"_target_": f"{Regression.__module__}.Regression"},
            "optimizer": {"_target_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.01},
            "common": {"cpu": True},
            "optimization": {"lr": 1e-3, "clip_norm": 1.0, "max_update": 10**6},
            "distributed_training": {"ddp_backend": "fully_sharded"},
        }
        self.trainer = Regression(cfg, Net(width, num_blocks))

    def update(self, batch: tuple) -> float:
        return self.trainer.train_step([batch])["loss"]


class BareSide:
    """The loop that a user of fully_shard writes."""

    def __init__(self, width: int, num_blocks: int) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model = Net(width, num_blocks)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, weight_decay=0.01, fused=True)

    def update(self, batch: tuple) -> float:
        x, y = batch
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y, reduction="sum")
        loss.backward()
        sums = torch.tensor([loss.item(), len(y)], dtype=torch.float64)
        dist.all_reduce(sums)
        torch._foreach_mul_([p.grad for p in self.parameters], dist.get_world_size() / sums[1].item())
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return (sums[0] / sums[1]).item()


def measure(size: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of an update, turn by turn, of each side."""
    batch, width, num_blocks = SIZES[size]
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [(torch.randn(batch, width, generator=generator), torch.randn(batch, 8, generator=generator)) for _ in range(8)]
    sides: dict[str, Any] = {"ours": TrainerSide(width, num_blocks), "bare": BareSide(width, num_blocks)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        losses = []
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            seconds, loss = _time(sides[name], batches)
            times[name].append(seconds)
            losses.append(loss)
        assert abs(losses[0] - losses[1]) <= 1e-3 * abs(losses[0]), losses
    return {name: turns[1:] for name, turns in times.items()}


def _time(side: Any, batches: list) -> tuple[float, float]:
    dist.barrier()
    begin, loss = time.perf_counter(), 0.0
    for i in range(CHUNK):
        loss = side.update(batches[i % len(batches)])
    return (time.perf_counter() - begin) * 1000 / CHUNK, loss


def load_bytes(size: str, folder: str) -> dict[str, int]:
    """Bytes that the last rank receives in a load from rank 0, those of the state that it owns, and of the whole."""
    _, width, num_blocks = SIZES[size]
    side = TrainerSide(width, num_blocks)
    side.update((torch.randn(4, width), torch.randn(4, 8)))
    side.trainer.save_checkpoint(f"{folder}/checkpoint.pt")
    received = _counted(lambda: side.trainer.load_checkpoint(f"{folder}/checkpoint.pt"))
    sharded = [leaf for leaf in leaves(side.trainer.state_dict(), (ShardedTensor,)) if isinstance(leaf, ShardedTensor)]
    owned = sum(values.nbytes for leaf in sharded for _, values in leaf.pieces)
    return {"received": received, "owned": owned, "whole": sum(leaf.nbytes for leaf in sharded)}


def _counted(do: Callable[[], Any]) -> int:
    """Bytes that enter this rank by torch.distributed while `do` runs."""
    total, originals = 0, {name: getattr(dist, name) for name in RECEIVES}

    def counting(name: str) -> Callable:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal total
            source = kwargs.get("src", args[0] if args else 0)
            total += tensor.nbytes if name != "broadcast" or source != dist.get_rank() else 0
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in RECEIVES:
        setattr(dist, name, counting(name))
    try:
        do()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return total


def _rank_main(rank: int, args: argparse.Namespace, folder: str) -> None:
    logging.disable(logging.WARNING)
    for size in args.sizes:
        times = measure(size, args.rounds)
        nbytes = load_bytes(size, folder)
        if rank == args.ranks - 1:
            _print(args.ranks, size, times, nbytes)


def _print(ranks: int, size: str, times: dict[str, list[float]], nbytes: dict[str, int]) -> None:
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["bare"]))
    medians = {name: statistics.median(turns) for name, turns in times.items()}
    print(
        f"{ranks} ranks, {size:>6}: ours {medians['ours']:6.2f} ms over bare {medians['bare']:6.2f} ms: {ratio:.3f} (goal {GOAL});"
        f" a load brings rank {ranks - 1} {nbytes['received']:,} bytes: {nbytes['received'] / nbytes['owned']:.3f} of its own,"
        f" which are {nbytes['owned'] / nbytes['whole']:.3f} of all",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help=f"turns of {CHUNK} updates for each side")
    parser.add_argument("--sizes", nargs="+", default=["small", "medium"], choices=list(SIZES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(_rank_main, args.ranks, args, folder)


if __name__ == "__main__":
    main()
