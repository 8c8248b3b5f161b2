"""What the Trainer costs a start: process start to the first finished update, over the same of a bare script.

    python benchmarks/startup.py

Both sides are whole processes, started in turns: `fairtrain` composes its config with Hydra, checks it, makes the run
folder, looks for a checkpoint, opens its log; the script imports torch and trains. Model, optimizer and data are equal.
The ratio is taken pair by pair; its median is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GOAL = 1.25

BARE = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)
x, y = torch.randn(512, 64), torch.randn(512, 8)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
rows = torch.randperm(512)[:32]
loss = F.mse_loss(net(x[rows]), y[rows], reduction="sum")
loss.backward()
for parameter in net.parameters():
    parameter.grad.div_(32)
nn.utils.clip_grad_norm_(net.parameters(), 1.0)
optimizer.step()
print(loss.item() / 32, flush=True)
import os
os._exit(0)
"""

TASK = """
import os

import torch
import torch.nn.functional as F
from torch import nn

from trainer import Trainer


class First(Trainer):
    def build_model(self):
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randn(512, 8))

    def compute_loss(self, sample):
        x, y = sample
        loss = F.mse_loss(self.model(x), y, reduction="sum")
        return loss, len(y), {"loss": loss.detach()}

    def train_step(self, samples):
        stats = super().train_step(samples)
        print(stats["loss"], flush=True)
        os._exit(0)
"""

OVERRIDES = [
    "+task._target_=first.First",
    "task_name=first",
    "common.cpu=true",
    "dataset.batch_size=32",
    "optimization.lr=1e-3",
    "optimization.clip_norm=1.0",
    "optimization.max_update=10",
]


def seconds(command: list[str], cwd: str) -> float:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    begin = time.perf_counter()
    subprocess.run(command, cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cwd:
        Path(cwd, "bare.py").write_text(BARE)
        Path(cwd, "first.py").write_text(TASK)
        times: dict[str, list[float]] = {"bare": [], "trainer": []}
        for pair in range(args.pairs + 1):
            times["bare"].append(seconds([sys.executable, "bare.py"], cwd))
            fairtrain = [sys.executable, "-m", "trainer", *OVERRIDES, f"run_dir=run{pair}"]
            times["trainer"].append(seconds(fairtrain, cwd))
    bare, trainer = times["bare"][1:], times["trainer"][1:]  # the first pair fills the caches
    ratio = statistics.median(ours / theirs for ours, theirs in zip(trainer, bare))
    print(
        f"start to first update: bare {statistics.median(bare):.2f} s, Trainer {statistics.median(trainer):.2f} s, "
        f"ratio {ratio:.2f} (goal {GOAL})"
    )


if __name__ == "__main__":
    main()
