"""Whether a run on this machine's accelerator continues bit by bit, in every precision and sharding that fits it.

    python benchmarks/accelerator.py                 what there is: an accelerator, or the CPU in its place
    python benchmarks/accelerator.py --ranks 2       two ranks, an accelerator each where there are as many

Each line is three runs of task=digits in processes of their own: one of 40 updates, and one of 20 that is continued to
40. Compared are all logged numbers and every tensor of the last checkpoint. On an accelerator the peak of its memory
after the resume is put over that of the run that never stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
HALF = 20
COMMON = [
    "task=digits", "lr_scheduler=fixed", "common.deterministic=true", "common.log_format=none", "common.num_threads=1",
    "dataset.batch_size=32", "dataset.valid_subset=null", "checkpoint.save_interval=0", "task.samples_per_class=0",
]  # fmt: skip
KINDS = {
    "fp32": [],
    "bf16": ["common.bf16=true"],
    "fp16": ["common.fp16=true"],
    "asynchronous saves": ["checkpoint.write_checkpoints_asynchronously=true", "checkpoint.save_interval_updates=5"],
    "zero_sharding=os": ["distributed_training.zero_sharding=os"],
    "fully_sharded": ["distributed_training.ddp_backend=fully_sharded"],
    "every rank reads": ["checkpoint.load_checkpoint_on_all_dp_ranks=true"],
}
SEVERAL_RANKS = ("zero_sharding=os", "fully_sharded", "every rank reads")
# The training process itself, with a last line on the memory of its device.
PROGRAM = """
import atexit, json, sys, torch
from trainer import cli
def tell():
    if torch.accelerator.is_available():
        print("PEAK", torch.accelerator.max_memory_allocated(), file=sys.stderr, flush=True)
end = __import__("os")._exit
__import__("os")._exit = lambda status: (tell(), end(status))
cli.main()
"""


def train(run_dir: Path, num_updates: int, overrides: list[str], ranks: int) -> int:
    """One session to `num_updates`; returns the peak bytes of the device's memory, 0 where it has none."""
    words = [*COMMON, *overrides, f"optimization.max_update={num_updates}", f"run_dir={run_dir}"]
    command = [sys.executable, "-c", PROGRAM, *words]
    if ranks > 1:
        command = [sys.executable, "-m", "trainer", *words, f"distributed_training.distributed_world_size={ranks}"]
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}\nstatus {done.returncode}")
    peaks = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("PEAK ")]
    return max(peaks, default=0)


def numbers(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "wall"} for line in lines if line["event"] == "train"]


def tensors(nest, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        return {path: nest}
    items = nest.items() if isinstance(nest, dict) else enumerate(nest) if isinstance(nest, (list, tuple)) else ()
    return {name: tensor for key, value in items for name, tensor in tensors(value, f"{path}.{key}").items()}


def first_difference(one: Path, other: Path) -> str | None:
    for mine, theirs in zip(numbers(one), numbers(other), strict=True):
        if mine != theirs:
            return f"update {mine['num_updates']}: {mine} against {theirs}"
    files = [tensors(torch.load(d / "checkpoints" / "checkpoint_last.pt", weights_only=True)) for d in (one, other)]
    assert files[0].keys() == files[1].keys() and len(files[0]) > 100
    for name, tensor in files[0].items():
        if not torch.equal(tensor.reshape(-1).view(torch.uint8), files[1][name].reshape(-1).view(torch.uint8)):
            return f"checkpoint_last.pt: {name}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=None, choices=list(KINDS))
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    print(f"torch {torch.__version__}, device {device}, {args.ranks} rank(s)", flush=True)
    different = 0
    for kind in args.kinds or [kind for kind in KINDS if args.ranks > 1 or kind not in SEVERAL_RANKS]:
        with tempfile.TemporaryDirectory() as folder:
            whole, stopped = Path(folder) / "whole", Path(folder) / "stopped"
            fresh = train(whole, 2 * HALF, KINDS[kind], args.ranks)
            train(stopped, HALF, KINDS[kind], args.ranks)
            resumed = train(stopped, 2 * HALF, KINDS[kind], args.ranks)
            difference = first_difference(whole, stopped)
        memory = f", peak of device memory {resumed / fresh:.3f} of the fresh run's" if fresh else ""
        print(f"{kind}: {'equal bit by bit' if difference is None else 'DIFFERENT: ' + difference}{memory}", flush=True)
        different += difference is not None
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
