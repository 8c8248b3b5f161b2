"""A long life: 10,000 updates with 500 saves and validations. Nothing may grow: memory, handles, threads, children, time.

    python benchmarks/endurance.py
    python benchmarks/endurance.py --updates 2000 --ranks 2 --async -o endurance.png

Measured from inside, after each update. The last tenth of the run over the first (after a warm-up of 2 %): the median time
of an update without a save (paired: update i of one over update i of the other), anonymous memory (RssAnon), the number of
descriptors, threads and child processes. `-o` draws the curves. Needs Linux.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

COUNTS = ("descriptors", "threads", "children")
LIMITS = {"time of an update": 1.05, "memory": 1.02, **dict.fromkeys(COUNTS, 1.0)}


def make_config(run_dir: str, updates: int, every: int, asynchronous: bool, folder: bool = False) -> dict:
    return {
        "run_dir": run_dir,
        "task_name": "toy",
        "task": {"_target_": "tests.resume.task.Toy", "num_samples": 997},
        "common": {"seed": 7, "log_format": "none", "cpu": True, "num_threads": 1},
        "dataset": {"batch_size": 4, "batch_size_valid": 11, "validate_interval_updates": every},
        "optimization": {"max_update": updates, "lr": 1e-3, "clip_norm": 1.0},
        "distributed_training": {"use_sharded_state": folder},
        "checkpoint": {
            "save_interval_updates": every,
            "keep_interval_updates": 2,
            "keep_best_checkpoints": 1,
            "no_epoch_checkpoints": True,
            "save_interval": 0,
            "write_checkpoints_asynchronously": asynchronous,
        },
        "ema": {"store_ema": True, "ema_decay": 0.99},
    }


def facts() -> dict[str, int]:
    """Of this process, now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    tasks = Path("/proc/self/task").iterdir()
    children = sum(len((task / "children").read_text().split()) for task in tasks)
    return {
        "memory": int(status["RssAnon"].split()[0]) * 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "children": children,
        "python threads": threading.active_count(),
    }


def measured_session(cfg: dict, every: int) -> list[dict]:
    """Run it to its end; for each update its time, for each `every`-th the facts too, half way between two saves."""
    from tests.resume.task import Toy
    from trainer.config import complete_config
    from trainer.train import main

    seconds = array.array("d", bytes(8 * cfg["optimization"]["max_update"]))  # what is measured must not grow itself
    sampled: dict[int, dict] = {}
    step = Toy.train_step

    def train_step(self, samples):
        begun = time.perf_counter()
        stats = step(self, samples)
        update = self.get_num_updates()
        seconds[update - 1] = time.perf_counter() - begun
        if update % every == every // 2:
            sampled[update] = facts()
        return stats

    Toy.train_step = train_step
    assert main(complete_config(cfg)) == 0
    return [{"update": i, "seconds": s, **sampled.get(i, {})} for i, s in enumerate(seconds, 1)]


def growth(rows: list[dict]) -> dict[str, float]:
    """Each measure of the last tenth of the run over that of the first one after the warm-up."""
    warm = rows[max(1, len(rows) // 50) :]
    tenth = len(rows) // 10
    first, last = warm[:tenth], warm[-tenth:]
    found = {
        "time of an update": statistics.median(b["seconds"] / a["seconds"] for a, b in zip(first, last)),
        "memory": measure(last, "memory") / measure(first, "memory"),
    }
    for name in COUNTS:
        found[name] = (measure(last, name) + 1) / (measure(first, name) + 1)  # there may be no children at all
    return found


def measure(rows: list[dict], name: str) -> float:
    return statistics.median(row[name] for row in rows if name in row)


def draw(ranks: list[list[dict]], path: str) -> None:
    from trainer.plot import Curve, Panel, write_png

    panels = []
    for name in ("seconds", "memory", *COUNTS):
        curves = [
            Curve(f"rank {rank}", [(row["update"], row[name]) for row in rows if name in row])
            for rank, rows in enumerate(ranks)
        ]
        panels.append(Panel(name, "updates", curves))
    write_png(panels, Path(path), height=260)


def main() -> int:
    from tests.dist.harness import run_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--saves", type=int, default=500, help="of the whole run, each with a validation")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--async", dest="asynchronous", action="store_true")
    parser.add_argument("--folder", action="store_true", help="checkpoints are folders (use_sharded_state)")
    parser.add_argument("-o", "--output", help="a PNG of the curves, or with .json the numbers")
    args = parser.parse_args()
    every = max(1, args.updates // args.saves)
    with tempfile.TemporaryDirectory(prefix="endurance_") as folder:
        cfg = make_config(folder, args.updates, every, args.asynchronous, args.folder)
        ranks = run_ranks(measured_session, args.ranks, cfg, every, timeout=24 * 3600)
    failed = False
    for rank, rows in enumerate(ranks):
        for name, ratio in growth(rows).items():
            failed |= ratio > LIMITS[name]
            print(f"rank {rank}: {name:18} last tenth over first: {ratio:.3f} (limit {LIMITS[name]:.2f})")
        print(
            f"rank {rank}: memory {measure(rows, 'memory') / 2**20:.1f} MiB, median update {1e3 * statistics.median(r['seconds'] for r in rows):.2f} ms"
        )
    if args.output and args.output.endswith(".json"):
        Path(args.output).write_text(json.dumps(ranks))
    elif args.output:
        draw(ranks, args.output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
