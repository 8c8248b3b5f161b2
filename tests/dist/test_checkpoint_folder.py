"""Properties of folders of torch.distributed.checkpoint, written and read by several ranks.

Numbers in brackets are the invariants of docs/checkpoint.md.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import checkpoint_file
from checkpoint_file import ShardedTensor, archive, filling, folder_files, open_checkpoint, sending, sources, writing
from checkpoint_file.boxes import stride_in_order
from tests.dist.harness import run_ranks
from tests.test_checkpoint_file import as_bytes, assert_same, make_state, rss_anon

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex128)


def shrink_buffers(chunk: int = 256, bucket: int = 1024, most_open: int = 2) -> None:
    archive.CHUNK_BYTES, folder_files.MAX_OPEN = chunk, most_open
    sending.BUCKET_BYTES, sending.STRAIGHT_BYTES = bucket, bucket // 2


# ---- any state, any number of ranks before and after

cuts = st.lists(st.floats(0, 1), min_size=3, max_size=3).map(sorted)


@st.composite
def leaf_plans(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return {
        "shape": shape,
        "order": draw(st.permutations(range(len(shape)))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 99)),
        "saved": draw(st.sampled_from(["whole", "strided", "pieces"])),
        "loaded": draw(st.sampled_from(["whole", "strided", "pieces"])),
        "cuts": (draw(cuts), draw(cuts)),
    }


def whole_of(plan: dict) -> torch.Tensor:
    """The tensor of a plan, dense, its dimensions in memory in the plan's order."""
    shape, generator = plan["shape"], torch.Generator().manual_seed(plan["seed"])
    values = torch.randint(-100, 100, (math.prod(shape),), generator=generator).to(plan["dtype"])
    return values.as_strided(shape, stride_in_order(shape, plan["order"]))


def piece_of(whole: torch.Tensor, bounds: list[float], rank: int, world_size: int) -> ShardedTensor:
    numel = whole.numel()
    ends = [0, *(round(bound * numel) for bound in bounds[: world_size - 1]), numel]
    begin, end = ends[rank], ends[rank + 1]
    flat = whole.as_strided((numel,), (1,))
    pieces = ((begin, flat[begin:end].clone()),) if begin < end else ()
    return ShardedTensor(whole.dtype, whole.shape, whole.stride(), pieces)


def as_kind(whole: torch.Tensor, kind: str, bounds: list[float], rank: int, world_size: int):
    if kind == "pieces":
        return piece_of(whole, bounds, rank, world_size)
    if kind == "strided" and whole.dim():
        wide = torch.zeros((*whole.shape, 2), dtype=whole.dtype)
        wide[..., 1].copy_(whole)
        return wide[..., 1]
    return whole.clone()


def bits(leaf) -> list:
    return [(begin, as_bytes(t)) for begin, t in leaf.pieces] if isinstance(leaf, ShardedTensor) else [as_bytes(leaf)]


def blank(leaf):
    if isinstance(leaf, ShardedTensor):
        pieces = tuple((begin, torch.zeros_like(t)) for begin, t in leaf.pieces)
        return ShardedTensor(leaf.dtype, leaf.shape, leaf.stride, pieces)
    return leaf.clone().zero_() if leaf.is_contiguous() else as_kind(torch.zeros_like(leaf), "strided", [], 0, 1)


def save_and_load(folder, plans, group, written_by, read_by, on_all_ranks, read_method) -> None:
    rank = dist.get_rank()
    wholes = {f"t{number}": whole_of(plan) for number, plan in enumerate(plans)}
    if rank < written_by:
        leaves = {
            name: as_kind(whole, plan["saved"], plan["cuts"][0], rank, written_by)
            for (name, whole), plan in zip(wholes.items(), plans)
        }
        state = make_state(leaves, more=[leaves.get("t0"), 1.5, {"x": (None, 2)}], last=leaves.get("t1"))
        checkpoint_file.write_checkpoint_folder(state, folder, group[written_by])
    dist.barrier()
    if rank < read_by:
        with open_checkpoint(folder, group[read_by], on_all_ranks, read_method=read_method) as reader:
            wanted = {
                name: as_kind(whole, plan["loaded"], plan["cuts"][1], rank, read_by)
                for (name, whole), plan in zip(wholes.items(), plans)
            }
            targets = {name: blank(leaf) for name, leaf in wanted.items()}
            reader.copy([(reader.skeleton["model"][name], target) for name, target in targets.items()])
            rest = reader.materialize({key: value for key, value in reader.skeleton.items() if key != "model"})
        for name in wanted:
            assert bits(targets[name]) == bits(wanted[name]), name
        assert_same(rest["more"], [wholes.get("t0"), 1.5, {"x": (None, 2)}])
        assert_same(rest["last"], wholes.get("t1"))
    if rank == 0:
        into = {"model": {name: torch.zeros_like(whole) for name, whole in wholes.items()}}
        load_by_torch(into, folder)
        assert_same(into["model"], wholes)
        assert checkpoint_file.verify_checkpoint(folder) == []


def load_by_torch(into: dict, folder) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, checkpoint_id=folder, no_dist=True)


def many_examples(tmp_path, count) -> int:
    group, tried = {size: dist.new_group(list(range(size))) for size in (1, 2, 3, 4)}, []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,  # every rank draws the same examples
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(leaf_plans(), max_size=5),
        st.integers(1, 4),
        st.integers(1, 4),
        st.booleans(),
        st.sampled_from([(64, 1024, 1), (16, 256, 2), (4 << 20, 1 << 20, 64)]),
        st.sampled_from(checkpoint_file.READ_METHODS),
    )
    def examples(plans, written_by, read_by, on_all_ranks, buffers, read_method):
        shrink_buffers(*buffers)
        folder, problem = f"{tmp_path}/{len(tried)}", None
        tried.append(folder)
        try:
            save_and_load(folder, plans, group, written_by, read_by, on_all_ranks, read_method)
        except Exception as error:  # told to all, or they would wait in the next example
            problem = repr(error)
        problems = [None] * 4
        dist.all_gather_object(problems, problem)
        assert not any(problems), (problems, plans, written_by, read_by, on_all_ranks, buffers, read_method)
        if dist.get_rank() == 0:
            shutil.rmtree(folder)

    examples()
    return len(tried)


def test_any_state_written_by_any_ranks_is_read_by_any_ranks_and_by_torch(tmp_path):  # [D1] [D2] [R8]
    assert min(run_ranks(many_examples, 4, str(tmp_path), 50, timeout=150)) >= 50


# ---- folders of other programs


def saved_by_torch(path: str) -> dict:
    """Save, by torch alone, parameters of fully_shard whose rows do not divide and tensors sharded in other ways."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4, bias=False), torch.nn.LayerNorm(2))
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    wide = torch.arange(70).reshape(7, 10)
    state = {
        "model": model.state_dict(),
        "columns": distribute_tensor(wide, mesh, [Shard(1)]),
        "same": distribute_tensor(wide.bfloat16(), mesh, [Replicate()]),
        "optimizer": {"state": [{"exp_avg": torch.ones(3), "step": torch.tensor(4.0)}], "lr": 0.1},
        "words": ["a", ("b", None)],
        "strange": Strange(),
    }
    dcp.save(state, checkpoint_id=path)
    rest = {"columns": wide, "same": wide.bfloat16(), "words": ["a", ("b", None)], "optimizer": state["optimizer"]}
    return {"model": expected, **rest}


class Strange:
    """Neither a tensor nor plain data."""


def read_what_torch_saved(path: str) -> None:
    shrink_buffers()
    expected = saved_by_torch(path)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for on_all_ranks in (True, False):
        with open_checkpoint(path, on_all_ranks=on_all_ranks, own_format=False) as reader:
            found = reader.materialize(reader.skeleton)
            refs = [*reader.skeleton["model"].values(), reader.skeleton["columns"]]
            wholes = [*expected["model"].values(), expected["columns"]]
            wanted = [piece_of(whole, [0.2, 0.7], rank, world_size) for whole in wholes]
            targets = [blank(leaf) for leaf in wanted]
            reader.copy(list(zip(refs, targets)))
        assert_same({key: found[key] for key in expected}, expected)
        assert set(found) == set(expected), "what is neither a tensor nor plain data is left out"
        assert [bits(target) for target in targets] == [bits(leaf) for leaf in wanted]
    assert checkpoint_file.verify_checkpoint(path) == []


def test_folders_that_torch_saved_are_read_by_any_ranks(tmp_path):  # [D2]
    run_ranks(read_what_torch_saved, 3, str(tmp_path / "folder"), timeout=120)


# ---- what one rank meets, all raise


def caught(act) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failures_of_one_rank(folder: str) -> dict[str, str]:
    shrink_buffers()
    rank = dist.get_rank()
    whole = torch.arange(5000.0)
    state = make_state({"w": piece_of(whole, [0.5], rank, 2), "all": torch.ones(300)})
    found = {}

    def fail(*_):
        raise OSError(28, "No space left on device")

    def write(name: str, path: str) -> None:
        found[name] = caught(lambda: checkpoint_file.write_checkpoint_folder(state, path))

    write_all = writing.write_all
    writing.write_all = fail if rank == 1 else write_all
    write("full disk", f"{folder}/full")
    writing.write_all = write_all
    write("not shared", f"{folder}/own{rank}")
    os.makedirs(f"{folder}/own1", exist_ok=True)
    dist.barrier()
    write("not shared, but there", f"{folder}/own{rank}")
    other = {**state, "bad": {1, 2}} if rank == 1 else state
    found["value"] = caught(lambda: checkpoint_file.write_checkpoint_folder(other, f"{folder}/value"))
    write("good", f"{folder}/good")

    def load(name: str, on_all_ranks: bool) -> None:
        def copy() -> None:
            with open_checkpoint(f"{folder}/good", on_all_ranks=on_all_ranks) as reader:
                target = piece_of(torch.zeros(5000), [0.5], rank, 2)
                reader.copy([(reader.skeleton["model"]["w"], target)])
                assert bits(target) == bits(state["model"]["w"])

        found[f"{name} {on_all_ranks}"] = caught(copy)

    finish = filling.Plan.finish
    for on_all_ranks in (True, False):
        load("sound", on_all_ranks)
        filling.Plan.finish = fail if rank == 1 else finish
        load("fill", on_all_ranks)
        filling.Plan.finish = finish
    dist.barrier()
    if rank == 1:  # in the part that rank 1 alone needs
        part = Path(folder, "good", "__1_0.distcp")
        raw = bytearray(part.read_bytes())
        raw[raw.index(whole[4000:4016].numpy().tobytes()) + 9] ^= 16
        part.write_bytes(raw)
    dist.barrier()
    for on_all_ranks in (True, False):
        load("flipped", on_all_ranks)
    found["problems"] = str(checkpoint_file.verify_checkpoint(f"{folder}/good"))
    return found


def test_what_goes_wrong_on_one_rank_is_raised_on_all(tmp_path):  # [R8] [R2]
    for found in run_ranks(failures_of_one_rank, 2, str(tmp_path)):
        assert found["good"] == found["sound True"] == found["sound False"] == "nothing"
        assert "CheckpointWriteError" in found["full disk"] and "No space left" in found["full disk"]
        assert "(found by rank 1)" in found["full disk"]
        assert "CheckpointWriteError" in found["not shared"] and "No such file" in found["not shared"]
        assert "do not share this folder" in found["not shared, but there"]
        assert "UnsavableValueError" in found["value"] and "state['bad']" in found["value"]
        assert "No space left" in found["fill True"] and "No space left" in found["fill False"]
        for name in ("flipped True", "flipped False", "problems"):
            assert "checksum it was written with" in found[name] and "__1_0.distcp" in found[name], found[name]


# ---- nobody holds or receives what it does not own


def bytes_that_reach(folder: str) -> dict[str, int]:
    rank, numel = dist.get_rank(), 8 << 20
    share = numel // 4
    values = torch.full((share,), float(rank))
    leaf = ShardedTensor(torch.float32, torch.Size((numel // 4, 4)), (4, 1), ((rank * share, values),))
    checkpoint_file.write_checkpoint_folder(make_state({"w": leaf}), folder)
    counts = {"read": 0, "received": 0, "peak": 0}

    def counting(original, key):
        def call(tensor, *args, **kwargs):
            counts[key] += tensor.nbytes
            return original(tensor, *args, **kwargs)

        return call

    read_into = sources.RecordSource.read_into

    def counted_read(self, name, begin, memory):
        counts["read"] += len(memory) if self.path == folder else 0
        counts["peak"] = max(counts["peak"], rss_anon())
        return read_into(self, name, begin, memory)

    sources.RecordSource.read_into = counted_read
    dist.irecv, dist.broadcast = counting(dist.irecv, "received"), counting(dist.broadcast, "received")
    target = torch.zeros(share)
    for key, on_all_ranks in (("alone", True), ("from rank 0", False)):
        counts.update(read=0, received=0, peak=0)
        before = rss_anon()
        with open_checkpoint(folder, on_all_ranks=on_all_ranks) as reader:
            piece = ShardedTensor(leaf.dtype, leaf.shape, leaf.stride, ((rank * share, target.zero_()),))
            reader.copy([(reader.skeleton["model"]["w"], piece)])
        assert torch.equal(target, values)
        counts[key] = (counts["read"], counts["received"], counts["peak"] - before)
    return counts


def test_a_rank_reads_or_receives_its_own_part_and_no_more(tmp_path):  # [F6]
    own = (8 << 20) * 4 // 4
    for rank, counts in enumerate(run_ranks(bytes_that_reach, 4, str(tmp_path / "folder"))):
        assert own <= counts["alone"][0] <= 1.01 * own
        if rank:
            assert own <= counts["from rank 0"][1] <= 1.01 * own and counts["from rank 0"][0] == 0
        assert counts["alone"][2] < 32 << 20 and counts["from rank 0"][2] < 64 << 20
