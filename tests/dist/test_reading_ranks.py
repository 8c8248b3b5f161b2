"""Reading among ranks: any file, cut over them in any way. Numbers in brackets are the invariants of docs/checkpoint.md."""

from __future__ import annotations

import random
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import checkpoint_file
import distributed_utils
from checkpoint_file import (
    CheckpointDamagedError,
    CheckpointReader,
    ShardedTensor,
    archive,
    filling,
    open_checkpoint,
    open_local_checkpoint,
    sending,
)
from checkpoint_file.filling import memory_order
from checkpoint_file.sources import READ_METHODS
from tests.dist.harness import run_ranks
from tests.test_checkpoint_file import as_bytes, make_state, rss_anon

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
    for number, plans in enumerate(drawn(st.lists(tensor_plans, max_size=6), 20)):
        paths.append(str(tmp_path / f"{number}.pt"))
        write(plans, Path(paths[-1]))
    assert run_ranks(read_in_all_ways, ranks, paths, random.randrange(10**6)) == [[]] * ranks


def shard(t_dtype: torch.dtype, shape: tuple, stride: tuple | None = None) -> ShardedTensor:
    """An equal share of a tensor of `shape` for each rank."""
    rank, ranks = distributed_utils.get_rank(), distributed_utils.get_world_size()
    shape = torch.Size(shape)
    begin, end = rank * shape.numel() // ranks, (rank + 1) * shape.numel() // ranks
    stride = stride or torch.empty(shape, device="meta").stride()
    return ShardedTensor(t_dtype, shape, stride, ((begin, torch.ones(end - begin, dtype=t_dtype)),))


# ---- damage


def load_parts(path: str, on_all_ranks: bool, method: str) -> None:
    """Load a part of each record: some of it whole, some sharded, some in another order."""
    with open_checkpoint(path, on_all_ranks=on_all_ranks, read_method=method) as reader:
        refs = reader.skeleton["model"]
        targets = {
            "row": torch.zeros(refs["row"].shape),
            "rows": shard(torch.float32, refs["rows"].shape),
            "whole": torch.zeros(refs["whole"].shape),
            "turned": shard(torch.float32, refs["turned"].shape, (1, refs["turned"].shape[0])),
        }
        reader.copy([(refs[name], target) for name, target in targets.items()])


def damage_found(damaged: list[tuple[str, str]]) -> list:
    """What went unnoticed, or was told of another file or record."""
    archive.CHUNK_BYTES, sending.BUCKET_BYTES, sending.STRAIGHT_BYTES = 256, 1024, 512
    missed = []
    for path, record in damaged:
        for on_all_ranks, method in WAYS:
            try:
                load_parts(path, on_all_ranks, method)
            except CheckpointDamagedError as error:
                if (error.path, error.record) == (path, record) and record in str(error) and path in str(error):
                    continue
            missed.append((path, record, on_all_ranks, method))
    return missed


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_changed_byte_anywhere_in_a_record_that_is_read_is_told_by_all_ranks(tmp_path, ranks):  # [R2] [R8]
    base = torch.randn(60, 20)
    sound = tmp_path / "sound.pt"
    tensors = {"row": base[7], "rows": base[30:41], "whole": torch.randn(700), "turned": torch.randn(30, 20)}
    torch.save(make_state(tensors), sound)  # torch writes all of base, of which some is not needed by anybody
    load_parts(str(sound), True, "auto")
    raw, damaged = sound.read_bytes(), []
    with open_local_checkpoint(sound) as reader:
        places = [place for name, place in reader._places.items() if name.startswith("data/")]
    assert len(places) == 3
    for number in range(12):
        place = places[number % 3]
        changed = bytearray(raw)
        changed[place.offset + random.randrange(place.nbytes)] ^= 1 << random.randrange(8)
        damaged.append((str(tmp_path / f"{number}.pt"), place.name))
        Path(damaged[-1][0]).write_bytes(changed)
    assert run_ranks(damage_found, ranks, damaged) == [[]] * ranks


# ---- bytes


def count_received() -> list[int]:
    """Sizes of all messages that reach this rank from now on."""
    received: list[int] = []
    me = dist.get_rank()

    def counting(name: str, nbytes_of) -> None:
        original = getattr(dist, name)

        def counted(*args, **kwargs):
            received.append(nbytes_of(*args, **kwargs))
            return original(*args, **kwargs)

        setattr(dist, name, counted)

    counting("broadcast", lambda t, src=0, **_: t.nbytes if src != me else 0)
    counting("all_gather", lambda ts, t, **_: sum(one.nbytes for one in ts) - t.nbytes)
    for name in ("recv", "irecv"):
        counting(name, lambda t, *_, **__: t.nbytes)
    return received


def bytes_that_come(path: str) -> tuple[int, int]:
    received = count_received()
    with open_checkpoint(path, on_all_ranks=False) as reader:
        refs = reader.skeleton["model"]
        targets = {name: shard(torch.float32, ref.shape) for name, ref in refs.items()}
        targets["w2"] = shard(torch.float32, refs["w2"].shape, (1, refs["w2"].shape[0]))
        targets["bias"] = torch.zeros(refs["bias"].shape)
        reader.copy([(refs[name], target) for name, target in targets.items()])
    pieces = [values for target in targets.values() if isinstance(target, ShardedTensor) for _, values in target.pieces]
    return sum(received), sum(values.nbytes for values in pieces) + targets["bias"].nbytes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_reaches_a_rank_from_rank_0_is_its_own_and_one_per_cent(tmp_path, ranks):
    path = str(tmp_path / "f.pt")
    tensors = {f"w{i}": torch.randn(1024, 1111) for i in range(6)}
    checkpoint_file.write_checkpoint_file(make_state({**tensors, "bias": torch.randn(5000)}), path)
    for rank, (received, own) in enumerate(run_ranks(bytes_that_come, ranks, path)):
        assert received <= (1.01 * own if rank else 50_000), (rank, received, own)


# ---- memory


def peaks_of_memory(path: str) -> dict:
    """By way: bytes of anonymous memory beyond the targets, at the worst moment of a load."""
    peaks = {}
    for on_all_ranks, method in WAYS:
        with open_checkpoint(path, on_all_ranks=on_all_ranks, read_method=method) as reader:
            refs = reader.skeleton["model"]
            pairs = [
                (refs["whole"], torch.ones(refs["whole"].shape)),
                (refs["sharded"], shard(torch.float32, refs["sharded"].shape)),
            ]
            pairs.append((refs["turned"], shard(torch.float32, refs["turned"].shape, (1, refs["turned"].shape[0]))))
            before, seen, done = rss_anon(), [0], threading.Event()

            def watch():
                while not done.wait(0.001):
                    seen[0] = max(seen[0], rss_anon())

            watcher = threading.Thread(target=watch)
            watcher.start()
            reader.copy(pairs)
            done.set()
            watcher.join()
            peaks[on_all_ranks, method] = max(0, seen[0] - before)
    return peaks


def test_no_rank_holds_more_than_64_mib_beside_its_tensors(tmp_path):  # [F6]
    path = str(tmp_path / "f.pt")
    state = {"whole": torch.ones(26 << 20), "sharded": torch.ones(26 << 20), "turned": torch.ones(2048, 2048)}
    checkpoint_file.write_checkpoint_file(make_state(state), path)
    for peaks in run_ranks(peaks_of_memory, 2, path):
        assert max(peaks.values()) < 64 << 20, peaks


# ---- failures in the middle


def fail_at(owner: type, name: str, number: int):
    """Let a method raise at its call number `number` (from 0 on); returns the function that undoes this."""
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == number + 1:
            raise MemoryError(f"none left at {number}")
        return original(*args, **kwargs)

    setattr(owner, name, failing)
    return lambda: (setattr(owner, name, original), len(calls) > number)[1]


def fail_everywhere(path: str, method_of: tuple[type, str], failing: int) -> tuple[int, int]:
    """(loads that failed before one came through, loads that did not end as they should)."""
    sending.BUCKET_BYTES, sending.STRAIGHT_BYTES, sending.STRAIGHT_IN_A_ROW = 1024, 512, 2
    number, odd, me = 0, 0, dist.get_rank()
    dtype = torch.float64 if method_of[1] == "fill" else torch.float32  # what is converted passes through `fill`
    while True:
        undo = fail_at(*method_of, number) if me == failing else lambda: None
        error = None
        try:
            with open_checkpoint(path, on_all_ranks=False) as reader:
                refs = reader.skeleton["model"]
                pairs = [(ref, shard(dtype, ref.shape)) for name, ref in refs.items() if name != "whole"]
                reader.copy([*pairs, (refs["whole"], torch.zeros(refs["whole"].shape, dtype=dtype))])
        except Exception as problem:
            error = problem
        failed = undo()
        failed = distributed_utils.all_gather_list(failed)[failing]
        if not failed:
            return number, odd + (error is not None)
        kind = "MemoryError" if me == failing else "PeerError"
        odd += type(error).__name__ != kind or f"none left at {number}" not in str(error)
        number += 1


@pytest.mark.parametrize(
    "method_of, failing",
    [((CheckpointReader, "_load"), 0), ((filling.Use, "fill"), 0), ((filling.Use, "fill"), 2)],
    ids=str,
)
def test_a_failure_at_any_message_ends_the_load_on_all_ranks(tmp_path, method_of, failing):  # [R8]
    path = str(tmp_path / "f.pt")
    tensors = {"a": torch.randn(900), "b": torch.randn(50), "whole": torch.randn(1000), "c": torch.randn(40, 30)}
    checkpoint_file.write_checkpoint_file(make_state(tensors), path)
    results = run_ranks(fail_everywhere, 3, path, method_of, failing)
    assert len(set(results)) == 1 and results[0][0] >= 3 and results[0][1] == 0


def read_without_broadcast(path: str) -> tuple:
    def broadcast(*_, **__):
        raise RuntimeError("Backend odd does not support broadcast")

    dist.broadcast = broadcast
    target = torch.zeros(500)
    with open_checkpoint(path, on_all_ranks=False) as reader:
        reader.copy([(reader.skeleton["model"]["a"], target)])
    return target.sum().item()


def test_where_the_backend_cannot_broadcast_every_rank_reads(tmp_path):
    path = str(tmp_path / "f.pt")
    checkpoint_file.write_checkpoint_file(make_state({"a": torch.ones(500)}), path)
    assert run_ranks(read_without_broadcast, 3, path) == [500.0] * 3
