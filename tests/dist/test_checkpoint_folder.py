"""Properties of folders of torch.distributed.checkpoint, written and read by several ranks.

Numbers in brackets are the invariants of docs/checkpoint.md.
"""

from __future__ import annotations

import math
import shutil
import warnings

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import checkpoint_file
from checkpoint_file import ShardedTensor, archive, folder_reading, folder_writing, open_checkpoint
from checkpoint_file.boxes import stride_in_order
from tests.dist.harness import run_ranks
from tests.test_checkpoint_file import as_bytes, assert_same, make_state

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex128)


def shrink_buffers(block: int = 64, chunk: int = 256, bucket: int = 1024) -> None:
    folder_writing.BLOCK_BYTES, archive.CHUNK_BYTES, folder_reading.BUCKET_BYTES = block, chunk, bucket


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


def save_and_load(folder, plans, group, written_by, read_by, on_all_ranks) -> None:
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
        with open_checkpoint(folder, group[read_by], on_all_ranks) as reader:
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
        st.sampled_from([(64, 256, 1024), (16, 16, 64), (1 << 20, 4 << 20, 1 << 20)]),
    )
    def examples(plans, written_by, read_by, on_all_ranks, buffers):
        shrink_buffers(*buffers)
        folder, problem = f"{tmp_path}/{len(tried)}", None
        tried.append(folder)
        try:
            save_and_load(folder, plans, group, written_by, read_by, on_all_ranks)
        except Exception as error:  # told to all, or they would wait in the next example
            problem = repr(error)
        problems = [None] * 4
        dist.all_gather_object(problems, problem)
        assert not any(problems), (problems, plans, written_by, read_by, on_all_ranks, buffers)
        if dist.get_rank() == 0:
            shutil.rmtree(folder)

    examples()
    return len(tried)


def test_any_state_written_by_any_ranks_is_read_by_any_ranks_and_by_torch(tmp_path):  # [D1] [D2] [R8]
    assert min(run_ranks(many_examples, 4, str(tmp_path), 50, timeout=150)) >= 50
