"""How long a save blocks training, over a bare parallel write and fsync of the same bytes; and what others take.

    python benchmarks/save.py --ranks 2 --mib 1024
    python benchmarks/save.py --ranks 2 --form folder           # distributed_training.use_sharded_state
    python benchmarks/save.py --ranks 2 --mib 1024 --async      # over one warm copy of the rank's own part

The state is a model that every rank has whole (a third) and two moments that are sharded over the ranks. Each turn
runs all contestants, in an order that rotates; the ratio is taken turn by turn, its median printed. Everybody makes the
bytes durable: who does not call fsync (torch.save, fairseq) is given one. Page caches are warm, and nothing is being
written when a contestant starts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

from local_ranks import run_on_ranks  # noqa: E402

import checkpoint_utils  # noqa: E402
from checkpoint_file import HostBuffer, ShardedTensor  # noqa: E402

GOALS = {"raw": 1.2, "torch.save": 1.0, "fairseq": 1.0, "dcp": 1.0, "copy": 1.2}
LAYER_BYTES = 16 << 20
CHUNK_BYTES = 16 << 20


class State:
    """One state, in the form that each contestant takes."""

    def __init__(self, mib: int, rank: int, ranks: int) -> None:
        layers = max(1, (mib << 20) // (3 * LAYER_BYTES))
        rows = LAYER_BYTES // 4096
        self.rank, self.ranks = rank, ranks
        self.model = {f"layers.{i}.weight": torch.randn(rows, 1024) for i in range(layers)}
        self.model |= {f"layers.{i}.bias": torch.randn(1024) for i in range(layers)}
        self.moments: dict[str, torch.Tensor] = {}  # this rank's rows
        for name, weight in self.model.items():
            share = weight.shape[0] // ranks
            for moment in ("exp_avg", "exp_avg_sq"):
                self.moments[f"{name}.{moment}"] = torch.randn(share, *weight.shape[1:])

    def whole_shape(self, local: torch.Tensor) -> torch.Size:
        return torch.Size((local.shape[0] * self.ranks, *local.shape[1:]))

    def own_bytes(self) -> int:
        whole = sum(t.nbytes for t in self.model.values()) // self.ranks
        return whole + sum(t.nbytes for t in self.moments.values())

    def sharded(self) -> dict:
        def shard(local: torch.Tensor) -> ShardedTensor:
            shape = self.whole_shape(local)
            stride = torch.empty(shape, device="meta").stride()
            return ShardedTensor(local.dtype, shape, stride, ((self.rank * local.numel(), local.reshape(-1)),))

        moments = {name: shard(local) for name, local in self.moments.items()}
        return {"format_version": 1, "run_id": "r", "model": self.model, "moments": moments}

    def dtensors(self) -> dict:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (self.ranks,))
        moments = {name: DTensor.from_local(t, mesh, (Shard(0),), run_check=False) for name, t in self.moments.items()}
        return {"model": self.model, "moments": moments}

    def gathered(self) -> dict | None:
        """fairseq's way: rank 0 collects the parts of all, one rank after the other, into whole tensors."""
        if self.ranks == 1:
            return {"model": self.model, "moments": self.moments}
        parts = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(self.moments, parts)
        if self.rank != 0:
            return None
        moments = {name: torch.cat([part[name] for part in parts]) for name in self.moments}
        return {"model": self.model, "moments": moments}

    def whole(self) -> dict | None:
        """What torch.save is given: everything on rank 0 already, which is more than a sharded run can have."""
        if self.rank != 0:
            return None
        moments = {name: torch.randn(self.whole_shape(t)) for name, t in self.moments.items()}
        return {"model": self.model, "moments": moments}


def write_raw(path: str, source: memoryview, offset: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    for begin in range(0, len(source), CHUNK_BYTES):
        piece = source[begin : begin + CHUNK_BYTES]
        while len(piece):
            written = os.pwrite(fd, piece, offset + begin)
            piece, begin = piece[written:], begin + written
    os.fsync(fd)
    os.close(fd)


def save_durably(state: dict | None, path: str) -> None:
    if state is None:
        return
    with open(path, "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())


FORMS = {
    "file": (checkpoint_utils.Publication, "ours.pt"),
    "folder": (checkpoint_utils.FolderPublication, "ours"),
}


def contestants(state: State, folder: str, form: str) -> dict:
    own = memoryview(torch.randn(state.own_bytes() // 4).view(torch.uint8).numpy())
    whole, sharded = state.whole(), state.sharded()

    def dcp() -> None:
        import torch.distributed.checkpoint as checkpoint

        checkpoint.save(tensors, checkpoint_id=f"{folder}/dcp", no_dist=state.ranks == 1)

    tensors = state.dtensors() if state.ranks > 1 else whole
    return {
        "raw": lambda: write_raw(f"{folder}/raw", own, state.rank * len(own)),
        "ours": lambda: publish(sharded, folder, form),
        "torch.save": lambda: save_durably(whole, f"{folder}/torch.pt"),
        "fairseq": lambda: save_durably(state.gathered(), f"{folder}/fairseq.pt"),
        "dcp": dcp,
    }


def publish(state: dict, folder: str, form: str) -> None:
    kind, name = FORMS[form]
    with kind(state, f"{folder}/{name}") as publication:
        publication.write()
        publication.finish()


class Blocked:
    """The seconds for which an asynchronous save blocks training: its beginning, with the copy, and its end."""

    def __init__(self, state: State, folder: str, form: str) -> None:
        self.kind, name = FORMS[form]
        self.state, self.path, self.buffer = state.sharded(), f"{folder}/{name}", HostBuffer()

    def __call__(self) -> float:
        begun = time.perf_counter()
        publication = self.kind(self.state, self.path)
        publication.write_in_background(self.buffer)
        blocked = time.perf_counter() - begun
        publication.background.wait()  # while training goes on
        barrier(publication_ranks())
        begun = time.perf_counter()
        with publication:
            publication.finish()
        return blocked + time.perf_counter() - begun


class Copy:
    """One copy of the rank's own part, tensor by tensor into memory that is warm."""

    def __init__(self, state: State) -> None:
        share = [t.reshape(-1).chunk(state.ranks)[state.rank] for t in state.model.values()]
        self.sources = [*share, *state.moments.values()]
        self.targets = [torch.zeros_like(source) for source in self.sources]

    def __call__(self) -> None:
        torch._foreach_copy_(self.targets, self.sources)


def publication_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()


def seconds_of(act, folder: str, rank: int, ranks: int) -> float:
    """From the moment when all begin to the moment when all have ended; what is left behind is removed."""
    if rank == 0:
        for entry in os.scandir(folder):
            shutil.rmtree(entry) if entry.is_dir() else os.unlink(entry)
        os.sync()
    barrier(ranks)
    begun = time.perf_counter()
    blocked = act()
    barrier(ranks)
    return time.perf_counter() - begun if not isinstance(blocked, float) else blocked


def take_turns(acts: dict, turns: int, folder: str, rank: int, ranks: int) -> dict[str, list[float]]:
    names = list(acts)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 1):  # the first one warms up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds = seconds_of(acts[name], folder, rank, ranks)
            if turn:
                times[name].append(seconds)
    return times


def report(times: dict[str, list[float]], nbytes: int) -> None:
    ours = times["ours"]
    print(f"{'':12}{'seconds':>9}{'GB/s':>7}   ours over it (median of {len(ours)} paired turns, smallest to largest)")
    for name, seconds in times.items():
        ratios = sorted(our / its for our, its in zip(ours, seconds))
        median = statistics.median(seconds)
        compared = f"   {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), goal {GOALS.get(name)}"
        print(f"{name:12}{median:9.3f}{nbytes / median / 1e9:7.2f}{compared if name != 'ours' else ''}")


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    ranks = args.ranks
    state = State(args.mib, rank, ranks)
    if args.asynchronous:
        acts = {"copy": Copy(state), "ours": Blocked(state, folder, args.form)}
    else:
        acts = contestants(state, folder, args.form)
        acts = {name: act for name, act in acts.items() if name in ("raw", "ours", *args.against)}
    times = take_turns(acts, args.turns, folder, rank, ranks)
    if rank == 0:
        print(f"{ranks} ranks, {state.own_bytes() * ranks / 2**20:.0f} MiB of state, {state.own_bytes() >> 20} MiB a rank")
        report(times, state.own_bytes() * ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mib", type=int, default=1024, help="of the state, over all ranks")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--async", dest="asynchronous", action="store_true")
    parser.add_argument("--folder", default=None, help="on the disk to measure; the system's temporary one by default")
    parser.add_argument("--form", choices=list(FORMS), default="file", help="what ours saves")
    parser.add_argument("--against", nargs="*", default=["torch.save", "fairseq", "dcp"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run_on_ranks(run_rank, args.ranks, args, folder)


if __name__ == "__main__":
    main()
