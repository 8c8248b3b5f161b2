"""Whether a save and a load grow as they should: times for more ranks and more state, over a straight line.

    python benchmarks/growth.py
    python benchmarks/growth.py --ranks 1 2 4 --gb 0.25 1 4

One state of a model and two moments, sharded over the ranks as by ZeRO, is saved, loaded by all ranks (the model whole,
of the moments each rank its own), and loaded by rank 0, which sends. Files are in the page cache, the times go from
barrier to barrier, medians of at least five turns. The line goes through the times at the smallest and the largest
state: what lies between should be on it (1.00), and seconds per GB at the largest state should not exceed those at the
smallest ("per GB"). A save is bound by the disk, whose own line, a bare write and fsync of as many bytes, stands beside.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

from local_ranks import run_on_ranks  # noqa: E402
from save import CHUNK_BYTES, State  # noqa: E402

import checkpoint_file  # noqa: E402
import checkpoint_utils  # noqa: E402

ACTS = ("raw write", "save", "load on all", "load from rank 0")


def acts_on(state: State, folder: str) -> dict[str, Callable[[], None]]:
    chunk = memoryview(torch.rand(CHUNK_BYTES // 4).view(torch.uint8).numpy())
    path, sharded = f"{folder}/ours.pt", state.sharded()

    def load(on_all_ranks: bool) -> None:
        with checkpoint_file.open_checkpoint(path, on_all_ranks=on_all_ranks) as reader:
            found = [reader.skeleton[part] for part in ("model", "moments")]
            targets = [sharded[part] for part in ("model", "moments")]
            reader.copy([(refs[name], target) for refs, part in zip(found, targets) for name, target in part.items()])

    return {
        "raw write": lambda: write_raw(f"{folder}/raw", chunk, state.rank * state.own_bytes(), state.own_bytes()),
        "save": lambda: checkpoint_utils.publish_checkpoint(sharded, path),
        "load on all": lambda: load(True),
        "load from rank 0": lambda: load(False),
    }


def write_raw(path: str, chunk: memoryview, offset: int, nbytes: int) -> None:
    """The same bytes over and over, so that nothing but the disk is measured."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    end = offset + nbytes
    while offset < end:
        offset += os.pwrite(fd, chunk[: end - offset], offset)
    os.fsync(fd)
    os.close(fd)


def seconds_of(act: Callable[[], None]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begun


def measure(rank: int, ranks: int, gb: float, turns: int, folder: str, results) -> None:
    state = State(round(gb * 1e9) >> 20, rank, ranks)
    acts = acts_on(state, folder)
    times: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(turns + 1):  # the first one warms up
        for name, act in acts.items():
            if rank == 0 and name in ("raw write", "save"):
                for entry in os.scandir(folder):
                    if name == "save" or entry.name == "raw":
                        os.unlink(entry)
                os.sync()
            seconds = seconds_of(act)
            if turn:
                times[name].append(seconds)
    if rank == 0:
        results[ranks, gb] = state.own_bytes() * ranks, {name: statistics.median(one) for name, one in times.items()}


def over_line(points: list[tuple[float, float]]) -> list[float]:
    """Each (bytes, seconds) over the line through the first and the last."""
    (first_x, first_y), (last_x, last_y) = points[0], points[-1]
    slope = (last_y - first_y) / (last_x - first_x) if len(points) > 1 else 0.0
    return [y / (first_y + slope * (x - first_x)) for x, y in points]


def report(results: dict, all_ranks: list[int], sizes: list[float]) -> None:
    print(f"{'':18}{'ranks':>6}" + "".join(f"{f'{gb:g} GB':>10}{'over line':>11}" for gb in sizes) + f"{'per GB':>8}")
    for name in ACTS:
        for ranks in all_ranks:
            points = [(results[ranks, gb][0] / 1e9, results[ranks, gb][1][name]) for gb in sizes]
            cells = [f"{y:8.3f} s{ratio:11.2f}" for (_, y), ratio in zip(points, over_line(points))]
            (first_x, first_y), (last_x, last_y) = points[0], points[-1]
            print(f"{name:18}{ranks:>6}" + "".join(cells) + f"{last_y / last_x / (first_y / first_x):8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gb", type=float, nargs="+", default=[0.25, 1, 4], help="of state, over all ranks, ascending")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to measure; the system's temporary one by default")
    args = parser.parse_args()
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        for ranks in args.ranks:
            for gb in args.gb:
                with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                    run_on_ranks(measure, ranks, ranks, gb, args.turns, folder, results, group_of_one=True)
        report(dict(results), args.ranks, args.gb)


if __name__ == "__main__":
    main()
