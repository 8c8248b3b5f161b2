"""Reading among ranks: any file, cut over them in any way. Numbers in brackets are the invariants of docs/checkpoint.md."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import checkpoint_file
import distributed_utils
from checkpoint_file import ShardedTensor, archive, open_checkpoint, sending
from checkpoint_file.filling import memory_order
from checkpoint_file.sources import READ_METHODS
from tests.dist.harness import run_ranks
from tests.test_checkpoint_file import as_bytes, make_state

WAYS = [(on_all_ranks, method) for on_all_ranks in (True, False) for method in READ_METHODS]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8,
    torch.int16, torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip
LAYOUTS = ["plain", "reversed", "channels_last", "tied", "slice_of_last", "expanded", "strided"]
tensor_plans = st.tuples(
    st.sampled_from(LAYOUTS), st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=4), st.booleans()
)


def drawn(strategy, count: int) -> list:
    """`count` examples, different at every run of the tests."""
    found = []

    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(example):
        found.append(example)

    collect()
    return found


def tensor_of(plan: tuple, last: torch.Tensor | None) -> torch.Tensor:
    layout, dtype, shape, _ = plan
    if layout == "tied" and last is not None:
        return last
    if layout == "slice_of_last" and last is not None and last.dim():
        return last[len(last) // 2 :]
    t = torch.randint(0, 100, tuple(shape)).to(dtype)  # no NaN: their bits may change where a dtype is converted
    if layout == "reversed":
        backwards = list(range(t.dim()))[::-1]
        t = t.permute(backwards).contiguous().permute(backwards)
    elif layout == "channels_last" and t.dim() == 4:
        t = t.to(memory_format=torch.channels_last)
    elif layout == "expanded":
        t = t.unsqueeze(0).expand(3, *t.shape)
    elif layout == "strided" and t.dim():
        t = t[::2]
    return t


def write(plans: list[tuple], path: Path) -> None:
    tensors, last = {}, None
    for number, plan in enumerate(plans):
        last = tensor_of(plan, last)
        tensors[f"t{number}"] = last
    if any(plan[-1] for plan in plans):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(make_state(tensors), path)  # with the gaps and bases that ours leaves out
    else:
        checkpoint_file.write_checkpoint_file(make_state(tensors), path)


def stride_of(shape: tuple, order: list[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions are, from the slowest to the fastest, `order`."""
    return (
        torch.empty([shape[d] for d in order], device="meta").permute(*torch.tensor(order).argsort().tolist()).stride()
    )


def flat(t: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return t.permute(memory_order(stride)).contiguous().reshape(-1)


def target_for(t: torch.Tensor, dice: random.Random, rank: int, ranks: int):
    """A whole or a sharded target for `t`, and what must stand in it afterwards. Every rank throws the same dice."""
    kind = dice.choice(["whole", "file order", "row by row", "reversed"])
    dtype = dice.choice([t.dtype, t.dtype, torch.float32]) if t.dtype.is_floating_point else t.dtype
    if kind == "whole":
        order = dice.sample(range(t.dim()), t.dim())
        target = torch.empty_strided(t.shape, stride_of(t.shape, order) if t.dim() else (), dtype=dtype)
        return target, t.to(dtype)
    order = memory_order(t.stride()) if kind == "file order" else list(range(t.dim()))
    stride = stride_of(t.shape, order[::-1] if kind == "reversed" else order) if t.dim() else ()
    cuts = sorted(dice.randint(0, t.numel()) for _ in range(dice.randint(0, 2 * ranks)))
    pieces = [(b, e, dice.randrange(ranks)) for b, e in zip([0, *cuts], [*cuts, t.numel()])]
    own = [(b, torch.zeros(e - b, dtype=dtype)) for b, e, owner in pieces if owner == rank]
    wanted = [flat(t, stride)[b:e].to(dtype) for b, e, owner in pieces if owner == rank]
    return ShardedTensor(dtype, t.shape, stride, tuple(own)), wanted


def wrong(target, wanted) -> bool:
    if isinstance(target, ShardedTensor):
        return [as_bytes(values) for _, values in target.pieces] != [as_bytes(t) for t in wanted]
    return as_bytes(target) != as_bytes(wanted)


def read_in_all_ways(paths: list[str], seed: int) -> list:
    """The (file, way, tensor) that came out wrong on this rank."""
    archive.CHUNK_BYTES, sending.BUCKET_BYTES = 64, 256
    sending.STRAIGHT_BYTES = (64, 128, 1024)[seed % 3]
    rank, ranks = distributed_utils.get_rank(), distributed_utils.get_world_size()
    found = []
    for number, path in enumerate(paths):
        tensors = torch.load(path, weights_only=True)["model"]
        for on_all_ranks, method in WAYS:
            dice = random.Random(f"{seed} {number} {on_all_ranks} {method}")
            names = [name for name in tensors if dice.random() < 0.8]
            targets = {name: target_for(tensors[name], dice, rank, ranks) for name in names}
            with open_checkpoint(path, on_all_ranks=on_all_ranks, read_method=method) as reader:
                refs = reader.skeleton["model"]
                reader.copy([(refs[name], target) for name, (target, _) in targets.items()])
            found += [(path, on_all_ranks, method, name) for name, pair in targets.items() if wrong(*pair)]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_file_is_read_into_any_split_by_every_way(tmp_path, ranks):  # [R8]
    paths = []
    for number, plans in enumerate(drawn(st.lists(tensor_plans, max_size=6), 30)):
        paths.append(str(tmp_path / f"{number}.pt"))
        write(plans, Path(paths[-1]))
    assert run_ranks(read_in_all_ways, ranks, paths, random.randrange(10**6)) == [[]] * ranks
