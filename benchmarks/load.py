"""Time and memory of loading one file, or the folder of sharded ranks, on several ranks, by both ways of reading, over what else could be done.

    python benchmarks/load.py --ranks 2 --mib 256

All fill the same warm memory of a model with two moments for each parameter, take turns in the same processes, and are
timed from barrier to barrier; a ratio is the median of its turns. Processor time is what a busy machine hardly changes.
Files are in the page cache. `raw` reads nothing but the tensors' bytes from a fresh map, at offsets that it was told,
and checks nothing; `floor` broadcasts as many bytes from memory to memory, in the bucket size that is the faster of
two. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import mmap
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

from local_ranks import run_on_ranks  # noqa: E402

import checkpoint_file  # noqa: E402
import distributed_utils  # noqa: E402
from checkpoint_file import ShardedTensor  # noqa: E402
from checkpoint_file.sources import FileSource  # noqa: E402

WIDTH = 768
BLOCK = {"qkv": (3 * WIDTH, WIDTH), "proj": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
GOALS = {
    "all ranks / raw": 1.2, "all ranks / torch.load": 1.0, "all ranks / DCP": 1.0, "all ranks, sharded / raw": 1.2,
    "raw and rounds, sharded / raw": 1.2, "from rank 0 / floor": 1.2, "from rank 0, sharded / floor": 1.2, "from rank 0 / fairseq's": 0.5,
    "folder / raw": 1.2, "folder / DCP": 1.0, "folder, sharded / raw": 1.2, "folder from rank 0 / floor": 1.2,
}  # fmt: skip


class State(nn.Module):
    """Blocks of a transformer, each parameter with the two moments of Adam as buffers: about `mib` MiB."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        block_bytes = 3 * 4 * sum(rows * columns + rows for rows, columns in BLOCK.values())
        for number in range(max(1, round(mib * 2**20 / block_bytes))):
            for name, (rows, columns) in BLOCK.items():
                for kind, shape in (("weight", (rows, columns)), ("bias", (rows,))):
                    for part in ("", "_exp_avg", "_exp_avg_sq"):
                        self.register_buffer(f"block{number}_{name}_{kind}{part}", torch.rand(shape))


# ------------------------------------------------------------------------------------------------------------ contenders


def ours(path: str, targets: dict, on_all_ranks: bool) -> None:
    with checkpoint_file.open_checkpoint(path, on_all_ranks=on_all_ranks) as reader:
        reader.copy([(reader.skeleton["model"][name], target) for name, target in targets.items()])


def raw(path: str, targets: list[tuple[int, Tensor]]) -> None:
    fd = os.open(path, os.O_RDONLY)
    data = torch.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    os.close(fd)
    for offset, target in targets:
        target.view(-1).view(torch.uint8).copy_(data[offset : offset + target.nbytes])


def raw_with_rounds(path: str, targets: list[tuple[int, Tensor]]) -> None:
    """The least that a checked load can be: the ranks agree on the file, on who wants what, and on the checksums."""
    for _ in range(2):
        distributed_utils.all_gather_list(len(targets))
    raw(path, targets)
    distributed_utils.answer_of_rank_0(len(targets), sum)


def torch_load(path: str, module: State) -> None:
    module.load_state_dict(torch.load(path, weights_only=True, map_location="cpu")["model"])


def dcp_load(folder: str, module: State) -> None:
    dcp.load(module.state_dict(), checkpoint_id=folder)


def floor(targets: list[Tensor], step: int) -> None:
    for target in targets:
        flat = target.view(-1).view(torch.uint8)
        for begin in range(0, len(flat), step):
            dist.broadcast(flat[begin : begin + step], 0)


def fairseqs(path: str, module: State) -> None:
    """Its scheme: rank 0 loads all; a nest of placeholders goes pickled, each tensor by itself into fresh memory."""
    is_source = dist.get_rank() == 0
    tensors: list[Tensor] = []
    nest = None
    if is_source:
        state = torch.load(path, weights_only=True, map_location="cpu")
        tensors = list(state["model"].values())
        nest = {**state, "model": {name: ("placeholder", i) for i, name in enumerate(state["model"])}}
    nest = broadcast_pickled(nest)
    facts = broadcast_pickled([(tensor.shape, str(tensor.dtype)) for tensor in tensors])
    for number, (shape, dtype) in enumerate(facts):
        if not is_source:
            tensors.append(torch.zeros(shape.numel(), dtype=getattr(torch, dtype.removeprefix("torch."))))
        dist.broadcast(tensors[number], 0)
        tensors[number] = tensors[number].view(shape)
    module.load_state_dict({name: tensors[number] for name, (_, number) in nest["model"].items()})


def broadcast_pickled(value):
    if dist.get_rank() == 0:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        message = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
        length = torch.tensor([len(message)])
        dist.broadcast(length, 0)
        dist.broadcast(message, 0)
        return value
    length = torch.tensor([0])
    dist.broadcast(length, 0)
    message = torch.zeros(int(length), dtype=torch.uint8)
    dist.broadcast(message, 0)
    return torch.load(io.BytesIO(message.numpy().tobytes()), weights_only=True)


# ------------------------------------------------------------------------------------------------------------ measuring


def shard(tensor: Tensor) -> ShardedTensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    begin, end = rank * tensor.numel() // ranks, (rank + 1) * tensor.numel() // ranks
    return ShardedTensor(tensor.dtype, tensor.shape, tensor.stride(), ((begin, tensor.view(-1)[begin:end]),))


def contenders(folder: str, module: State) -> dict[str, Callable[[], None]]:
    path, state = str(Path(folder, "a.pt")), module.state_dict()
    shards = {name: shard(tensor) for name, tensor in state.items()}
    with checkpoint_file.open_local_checkpoint(path) as reader:
        source: FileSource = reader._source
        offset = {name: source.places[ref._record].offset for name, ref in reader.skeleton["model"].items()}
    whole = [(offset[name], tensor) for name, tensor in state.items()]
    parts = [(offset[name] + 4 * begin, values) for name, one in shards.items() for begin, values in one.pieces]
    found = {
        "all ranks": lambda: ours(path, state, True),
        "raw": lambda: raw(path, whole),
        "torch.load": lambda: torch_load(path, module),
        "folder": lambda: ours(f"{folder}/folder", state, True),
        "DCP": lambda: dcp_load(str(Path(folder, "dcp")), module),
    }
    if dist.get_world_size() > 1:
        found |= {
            "all ranks, sharded": lambda: ours(path, shards, True),
            "raw, sharded": lambda: raw(path, parts),
            "raw and rounds, sharded": lambda: raw_with_rounds(path, parts),
            "from rank 0": lambda: ours(path, state, False),
            "from rank 0, sharded": lambda: ours(path, shards, False),
            "folder, sharded": lambda: ours(f"{folder}/folder", shards, True),
            "folder from rank 0": lambda: ours(f"{folder}/folder", state, False),
            "floor": lambda: floor([flat_bytes(state)], 8 << 20),
            "floor, 32 MiB": lambda: floor([flat_bytes(state)], 32 << 20),
            "fairseq's": lambda: fairseqs(path, module),
        }
    return found


def flat_bytes(state: dict[str, Tensor]) -> Tensor:
    """Memory of as many bytes as the state has: all parts of State lie in one storage."""
    first = next(iter(state.values()))
    return torch.empty(0).set_(first.untyped_storage())


def timed(act: Callable[[], None]) -> tuple[float, float]:
    """Seconds until the last rank has done it, and seconds of processor time of all ranks together."""
    dist.barrier()
    begin, busy = time.perf_counter(), time.process_time()
    act()
    busy = torch.tensor([time.process_time() - busy])
    dist.barrier()
    seconds = time.perf_counter() - begin
    dist.all_reduce(busy)
    return seconds, float(busy)


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def peak_of(act: Callable[[], None]) -> int:
    """Bytes of anonymous memory that this rank holds during `act` beyond what it held before."""
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    before, seen, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen[0] = max(seen[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    seen[0] = max(seen[0], anonymous_bytes())
    done.set()
    watcher.join()
    return max(0, seen[0] - before)


def in_one_storage(module: State) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in module.buffers()])
    for name, tensor in list(module.named_buffers()):
        module._buffers[name], flat = flat[: tensor.numel()].view(tensor.shape), flat[tensor.numel() :]


def rank_main(rank: int, ranks: int, folder: str, mib: int, turns: int) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = State(mib)
    if rank == 0:
        torch.save(
            {"format_version": 1, "model": {k: v.clone() for k, v in module.state_dict().items()}}, Path(folder, "a.pt")
        )
    dcp.save(module.state_dict(), checkpoint_id=str(Path(folder, "dcp")))
    shards = {name: shard(tensor) for name, tensor in module.state_dict().items()}
    checkpoint_file.write_checkpoint_folder({"format_version": 1, "model": shards}, f"{folder}/folder")
    in_one_storage(module)
    dist.barrier()
    acts = contenders(folder, module)
    peaks = {name: peak_of(act) for name, act in acts.items()}  # the first turn, which warms the page cache too
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
    for _ in range(turns):
        for name, act in acts.items():
            times[name].append(timed(act))
    gathered = [None] * ranks
    dist.all_gather_object(gathered, peaks)
    if rank == 0:
        report(times, {name: max(one[name] for one in gathered) for name in acts}, ranks, module)


def report(times: dict[str, list[tuple[float, float]]], peaks: dict[str, int], ranks: int, module: State) -> None:
    nbytes = sum(tensor.nbytes for tensor in module.buffers())
    print(
        f"{ranks} rank(s), {nbytes / 2**20:.0f} MiB in {len(module.state_dict())} tensors: medians, peak extra memory"
    )
    for name, turns in times.items():
        seconds, busy = map(median, zip(*turns))
        print(f"  {name:24}{seconds:7.3f} s, {busy:7.3f} s of all processors, {peaks[name] / 2**20:5.0f} MiB")
    if "floor, 32 MiB" in times:
        times["floor"] = min(
            times["floor"], times["floor, 32 MiB"], key=lambda turns: median(seconds for seconds, _ in turns)
        )
    for pair, goal in GOALS.items():
        mine, other = pair.split(" / ")
        peer = "raw, sharded" if pair.endswith("sharded / raw") else other
        if mine in times and peer in times:
            ratio, busy = (median(a[i] / b[i] for a, b in zip(times[mine], times[peer])) for i in (0, 1))
            print(f"  {pair:28} {ratio:.2f} (goal {goal}); of processor time {busy:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where the files are written; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run_on_ranks(rank_main, args.ranks, args.ranks, folder, args.mib, args.turns, group_of_one=True)


if __name__ == "__main__":
    main()
