"""Properties of a file that all ranks write at once. Numbers in brackets are the invariants of docs/checkpoint.md."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import checkpoint_file
import checkpoint_utils
from checkpoint_file import ShardedTensor, archive, streaming, verify_file, write_checkpoint_file
from tests.dist.harness import run_ranks
from tests.dist.test_checkpoint_ranks import SECONDS, caught
from tests.test_checkpoint_file import ODD, assert_same, make_state, rss_anon

DTYPES = [torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.complex64, torch.uint8]
WHOLE = ["plain", "transposed", "strided", "expanded", "view", "again"]
SHARDED = ["sharded", "sharded_transposed", "sharded_again"]


def tensor_of(layout: str, shape: list[int], which: int) -> torch.Tensor:
    dtype = DTYPES[which % len(DTYPES)]
    generator = torch.Generator().manual_seed(which)
    t = torch.randint(0, 9, shape, generator=generator).to(dtype)
    if layout.endswith("transposed") and t.dim() > 1:
        return t.transpose(0, -1)
    if layout == "strided" and t.dim():
        return torch.cat((t, t)).as_strided(
            t.shape, (2 * t.stride(0) if t.dim() == 1 else t.stride(0), *t.stride()[1:])
        )
    return t.unsqueeze(0).expand(3, *t.shape) if layout == "expanded" else t


def shard_of(t: torch.Tensor, cuts: list[tuple[int, int]], rank: int, world_size: int) -> ShardedTensor:
    """The pieces of `rank`: `cuts` are (place in thousandths, whose piece it begins)."""
    flat = t.as_strided((t.numel(),), (1,))
    begins = sorted((place * t.numel() // 1000, owner % world_size) for place, owner in cuts)
    bounds = [(0, 0), *begins, (t.numel(), 0)]
    pieces = tuple(
        (begin, flat[begin:end].clone())
        for (begin, owner), (end, _) in zip(bounds, bounds[1:])
        if owner == rank and begin < end
    )
    return ShardedTensor(t.dtype, t.shape, t.stride(), pieces)


def state_of(plan: list, rank: int | None, world_size: int) -> dict:
    """The state that a plan describes, as `rank` has it; None: with whole tensors."""
    base, tensors, last = torch.arange(3000), {}, {"whole": torch.ones(3), "sharded": torch.ones(5)}
    if rank is not None:
        last["sharded"] = shard_of(last["sharded"], [(500, 1)], rank, world_size)
    for i, (layout, shape, which, cuts) in enumerate(plan):
        t = base[which * 3 : which * 3 + 40] if layout == "view" else tensor_of(layout, shape, which)
        kind = "sharded" if layout in SHARDED else "whole"
        if layout.endswith("again"):
            t = last[kind]
        elif kind == "sharded" and rank is not None:
            t = shard_of(t, cuts, rank, world_size)
        last[kind] = tensors[f"t{i}"] = t
    return make_state(tensors, more=[1, {"x": None}])


leaves = st.tuples(
    st.sampled_from(WHOLE + SHARDED),
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(0, 900),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 3)), max_size=5),
)
examples = st.tuples(st.lists(leaves, max_size=8), st.sets(st.integers(1, 3)), st.sampled_from([64, 256, 1 << 20]))


def write_examples(cases: list, folder: str) -> None:
    """Writes each state together, and once more by rank 0 alone from whole tensors; all that must hold is asserted."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone = dist.new_group([0])
    original = os.pwrite
    for number, (plan, blind, chunk) in enumerate(cases):
        archive.CHUNK_BYTES, streaming.MESSAGE_BYTES = chunk, chunk
        path, written = f"{number}.pt", []
        here = os.path.join(folder, f"elsewhere{rank}" if rank in blind else "shared")
        os.makedirs(here, exist_ok=True)
        os.chdir(here)  # a rank that has another folder under this path does not see what rank 0 lays down

        def pwrite(fd, data, offset):
            written.append((offset, len(data)))
            return original(fd, data, offset)

        os.pwrite = pwrite
        state = state_of(plan, rank, world_size)
        nbytes = write_checkpoint_file(state, path)
        os.pwrite = original
        everyone = [None] * world_size
        dist.all_gather_object(everyone, written)
        assert os.path.exists(path) == (rank not in blind)
        if rank == 0:
            whole = state_of(plan, None, world_size)
            write_checkpoint_file(whole, "alone.pt", alone)
            assert Path(path).read_bytes() == Path("alone.pt").read_bytes()
            check_file(path, whole, nbytes, [one for ones in everyone for one in ones])
            balanced(everyone, plan, blind)


def check_file(path: str, whole: dict, nbytes: int, written: list) -> None:
    assert nbytes == os.path.getsize(path)
    for mmap in (False, True):
        assert_same(torch.load(path, weights_only=True, mmap=mmap), whole)
    assert verify_file(path) == [] and zipfile.ZipFile(path).testzip() is None
    shared = [t.untyped_storage()._cdata for t in torch.load(path, weights_only=True)["model"].values() if t.numel()]
    planned = checkpoint_file.planning.plan_file(whole, path)
    assert len(set(shared)) == len(planned.records)  # as few records as there are ranges of memory
    assert nbytes <= planned.nbytes + 600 * len(whole["model"]) + 2000  # the rest is what an empty file has
    fd = os.open(path, os.O_RDONLY)
    places, _ = archive.read_directory(fd, path)
    os.close(fd)
    count = np.zeros(nbytes, dtype=int)
    for offset, length in written:
        count[offset : offset + length] += 1
    for record in planned.records:
        place = places[record.name]
        assert (count[place.offset : place.offset + place.nbytes] == 1).all(), record.name


def balanced(everyone: list, plan: list, blind: set) -> None:
    """Without shards every rank writes as much as the others, to one cut."""
    if not blind and not any(layout in SHARDED for layout, *_ in plan):
        sums = [sum(length for _, length in ones) for ones in everyone[1:]]  # rank 0 writes checksums too
        assert not sums or max(sums) - min(sums) <= 2 * 64


# Shrinking would start ranks hundreds of times; the number of the case is in the traceback.
@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(1, 4), st.lists(examples, min_size=12, max_size=12))
def test_a_file_written_by_all_is_the_file_written_by_one(tmp_path_factory, world_size, cases):  # [F1] [F3] [F4] [F5]
    run_ranks(write_examples, world_size, cases, str(tmp_path_factory.mktemp("files")))


def write_odd(folder: str) -> None:
    archive.CHUNK_BYTES = 64
    odd = torch.load(f"{folder}/odd.pt", weights_only=False)
    write_checkpoint_file(make_state(odd), f"{folder}/f.pt")


def test_every_kind_of_tensor_can_be_shared_out(tmp_path):  # [F1]
    torch.save(ODD, tmp_path / "odd.pt")  # random numbers, which each rank would draw anew
    run_ranks(write_odd, 3, str(tmp_path))
    assert_same(torch.load(tmp_path / "f.pt", weights_only=True)["model"], ODD)
    done = subprocess.run(["unzip", "-tq", tmp_path / "f.pt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert verify_file(tmp_path / "f.pt") == []


# ---- memory


class PeakMemory:
    """The most anonymous memory that this process had while open, beyond what it had before, in bytes."""

    def __enter__(self) -> PeakMemory:
        self.extra, self._stop = 0, threading.Event()
        self._before = rss_anon()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.extra = max(self.extra, rss_anon() - self._before)

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def memory_of_a_save(folder: str, blind: bool) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    here = os.path.join(folder, f"{blind}{rank if blind else 0}")
    os.makedirs(here, exist_ok=True)
    os.chdir(here)
    whole, share = torch.ones(16 << 20), (32 << 20) // world_size  # 64 MiB, 128 MiB over all ranks
    pieces = ((rank * share, torch.full((share,), 2.0)),)
    shard = ShardedTensor(torch.float32, torch.Size((share * world_size,)), (1,), pieces)
    state = make_state({"whole": whole, "shard": shard, "strided": torch.ones(4 << 20, 2)[:, 1]})
    dist.barrier()
    with PeakMemory() as peak:
        write_checkpoint_file(state, "f.pt")
    return peak.extra


@pytest.mark.parametrize("blind", [False, True], ids=["shared folder", "folders apart"])
def test_no_rank_holds_more_than_its_part_and_a_bounded_buffer(tmp_path, blind):  # [F6]
    peaks = run_ranks(memory_of_a_save, 2, str(tmp_path), blind)
    assert max(peaks) < 64 << 20, [peak >> 20 for peak in peaks]
    with zipfile.ZipFile(tmp_path / f"{blind}0" / "f.pt") as file:
        assert file.testzip() is None


# ---- failures


def sharded_state(pieces_of, more=None) -> dict:
    pieces = tuple((begin, torch.full((end - begin,), 1.0)) for begin, end in pieces_of[dist.get_rank()])
    shard = ShardedTensor(torch.float32, torch.Size((10, 10)), (10, 1), pieces)
    return {**make_state({"w": torch.ones(700), "s": shard}), **(more or {})}


FORMS = {".pt": checkpoint_utils.Publication, "": checkpoint_utils.FolderPublication}


def publish(state: dict, path: str) -> int:
    """As a file, or as a folder where the path has no ending."""
    with FORMS[os.path.splitext(path)[1]](state, path) as publication:
        publication.write()
        return publication.finish()


def fail_in_many_ways(folder: str, name: str) -> list:
    """(what was expected to be said, what each way of failing gave) on this rank, which is one of three."""
    rank = dist.get_rank()
    path, good = os.path.join(folder, name), [[(0, 40)], [(40, 41), (50, 100)], [(41, 50)]]
    publish(sharded_state(good), path)
    original = {name: getattr(os, name) for name in ("pwrite", "fsync", "replace", "rename", "open")}
    results = []

    def attempt(expected: str, state: dict, patch: str = "", on_rank: int = 0, code: int = 28) -> None:
        def fail(*args, **kwargs):
            raise OSError(code, os.strerror(code))

        if patch and rank == on_rank:
            setattr(os, patch, fail)
        told = caught(lambda: publish(state, path))
        for call, function in original.items():
            setattr(os, call, function)
        results.append((expected, *told))
        dist.barrier()
        assert os.listdir(folder) == [name]
        dist.barrier()

    put_in_place = "replace" if name.endswith(".pt") else "rename"
    for call, on_rank in (("pwrite", 2), ("pwrite", 0), ("fsync", 1), (put_in_place, 0), ("open", 0)):
        attempt(f"No space left on device.*Make room.*found by rank {on_rank}", sharded_state(good), call, on_rank)
    odd = {"odd": {1, 2}} if rank == 1 else {"odd": 1}
    attempt(r"state\['odd'\] cannot be saved.*sorted.*rank 1", sharded_state(good, odd))
    other = {"other": torch.zeros(3 if rank == 2 else 4)}
    attempt(r"rank 2 has state\['other'\]: whole float32 \[3\].*rank 0 has .*\[4\]", sharded_state(good, other))
    extra = {"z": torch.zeros(3)} if rank == 1 else {}
    attempt(r"rank 1 has state\['z'\].*rank 0 has no further tensor", sharded_state(good, extra))
    for pieces, text in (
        ([[(0, 40)], [(40, 41)], [(41, 50)]], "no rank has its elements from 50 to 99"),
        ([[(0, 40)], [(41, 100)], []], "no rank has its elements from 40 to 40"),
        ([[], [(1, 100)], []], "no rank has its elements from 0 to 0"),
        ([[(0, 40)], [(30, 100)], []], "two ranks have its elements from 30 to 39"),
        ([[(0, 100)], [(0, 100)], []], "two ranks have its elements from 0 to 99"),
    ):
        attempt(rf"state\['model'\]\['s'\] is sharded, and {text}", sharded_state(pieces))
    attempt("is no plain torch.float32 range", sharded_state([[(0, 40)], [(40, 140)], []]))
    return results


@pytest.mark.parametrize("name", ["checkpoint_last.pt", "checkpoint_last"])
def test_a_failure_of_any_rank_is_the_same_error_on_all_and_leaves_no_litter(tmp_path, name):  # [P5] [F2]
    results = run_ranks(fail_in_many_ways, 3, str(tmp_path), name)
    for (expected, kind, message, *_), *others in zip(*results):
        assert kind in ("CheckpointWriteError", "UnsavableValueError"), message
        assert re.search(expected, message, re.DOTALL), (expected, message)
        assert str(tmp_path / name) in message
        assert all(other[1:3] == (kind, message) for other in others)
        assert all(seconds < SECONDS for _, _, _, seconds, _ in ((expected, kind, message, *_), *others))
    assert checkpoint_utils.verify_checkpoint(tmp_path / name) == []


def fail_while_streaming(folder: str, failing: int) -> tuple:
    """Three ranks, of which two do not see the file; one of the three meets an error in the middle."""
    rank = dist.get_rank()
    streaming.MESSAGE_BYTES = archive.CHUNK_BYTES = 1 << 10
    os.makedirs(here := os.path.join(folder, str(rank)), exist_ok=True)
    os.chdir(here)
    state = make_state({f"w{i}": torch.ones(5000) for i in range(3)})
    original, calls = os.pwrite, []
    if rank == failing == 0:

        def pwrite(*args):
            calls.append(1)
            if len(calls) == 30:  # rank 0's own share is 20 chunks
                raise OSError(5, "Input/output error")
            return original(*args)

        os.pwrite = pwrite
    elif rank == failing:
        fill = streaming.fill

        def failing_fill(*args):
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("none left")
            return fill(*args)

        streaming.fill = failing_fill
    result = caught(lambda: checkpoint_utils.publish_checkpoint(state, "checkpoint_last.pt"))
    return *result, os.listdir(here)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_while_shares_are_sent_ends_the_save_on_all(tmp_path, failing):  # [P5]
    for rank, (kind, message, seconds, _, files) in enumerate(
        run_ranks(fail_while_streaming, 3, str(tmp_path), failing)
    ):
        if failing == 0:
            assert kind == "CheckpointWriteError" and "Input/output error" in message and "rank 0" in message
        else:
            assert kind == ("MemoryError" if rank == failing else "PeerError") and "none left" in message
        assert seconds < SECONDS and files == []


def save_while_another_lives(folder: str) -> list:
    """What lies in the folder while all ranks are writing, and whether a new start would take it for litter."""
    state = sharded_state([[(0, 50)], [(50, 100)]])
    publication = checkpoint_utils.Publication(state, os.path.join(folder, "checkpoint_last.pt"))
    publication.write()
    names = os.listdir(folder)
    if dist.get_rank() == 1:
        checkpoint_utils.remove_stale_temporaries(folder)
    dist.barrier()
    assert os.listdir(folder) == names and all(map(checkpoint_utils.names.is_temporary_name, names)) and len(names) == 1
    publication.finish()
    publication.close()
    return os.listdir(folder)


def test_rank_0_holds_the_temporary_file_for_all(tmp_path):  # [P6]
    assert run_ranks(save_while_another_lives, 2, str(tmp_path)) == [["checkpoint_last.pt"]] * 2


def descriptors_after_saves(path: str) -> list:
    counts = []
    for _ in range(4):
        publish(sharded_state([[(0, 50)], [(50, 100)]]), path)
        bad = {1: {1}} if dist.get_rank() else {}
        caught(lambda: publish(make_state({}, **{"x": bad}), path))
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.parametrize("name", ["checkpoint_last.pt", "checkpoint_last"])
def test_descriptors_of_all_ranks_stay_level(tmp_path, name):
    for counts in run_ranks(descriptors_after_saves, 2, str(tmp_path / name)):
        assert len(set(counts[1:])) == 1, counts


# ---- written in the background


def save_in_the_background(folder: str, blind: bool, name: str) -> tuple:
    """Eight saves with one buffer. Returns the peak of extra memory, and memory, descriptors, threads after each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    here = os.path.join(folder, str(rank if blind else 0))
    os.makedirs(here, exist_ok=True)
    os.chdir(here)
    count = (4 << 20) // world_size  # 16 MiB over all ranks, and 16 MiB that all have
    piece, whole = torch.zeros(count), torch.zeros(2 << 20, 2)[:, 1]
    shard = ShardedTensor(torch.float32, torch.Size((count * world_size,)), (1,), ((rank * count, piece),))
    state, buffer, levels = (
        make_state({"shard": shard, "whole": whole, "flag": torch.tensor(True)}),
        checkpoint_file.HostBuffer(),
        [],
    )
    dist.barrier()
    with PeakMemory() as peak:
        for save in range(1, 9):
            piece.fill_(save)
            whole.fill_(-save)
            with FORMS[os.path.splitext(name)[1]](state, name) as publication:
                publication.write_in_background(buffer)
                piece.fill_(99), whole.fill_(99)  # the next update
                publication.background.wait()
                dist.barrier()
                if save == 1:
                    assert not os.path.exists(name)
                publication.finish()
            if rank == 0:
                assert values_of(name) == {"shard": {save}, "whole": {-save}, "flag": {True}}
                assert checkpoint_file.verify_checkpoint(name) == []
            ctypes.CDLL(None).malloc_trim(0)  # what is free is no leak
            levels.append((rss_anon(), len(os.listdir("/proc/self/fd")), threading.active_count()))
    return peak.extra, levels


def values_of(path: str) -> dict[str, set]:
    """The distinct values of each tensor of the model."""
    with checkpoint_file.open_local_checkpoint(path) as reader:
        elements = checkpoint_file.ElementReader(reader)
        refs = reader.skeleton["model"]
        return {name: {v for piece in elements.pieces(ref) for v in piece.unique().tolist()} for name, ref in refs.items()}


@pytest.mark.parametrize(
    "blind, name", [(False, "f.pt"), (True, "f.pt"), (False, "f")], ids=["file", "file, folders apart", "folder"]
)
def test_a_background_save_holds_one_copy_of_its_share_and_leaves_nothing(tmp_path, blind, name):  # [F6]
    for peak, levels in run_ranks(save_in_the_background, 2, str(tmp_path), blind, name):
        assert peak < (12 << 20) + (64 << 20)
        third, last = levels[2], levels[-1]
        assert last[1] <= third[1] + 1 and last[2] == third[2], levels  # who watches the memory opens a file now and then
        assert last[0] - third[0] < 4 << 20, [memory >> 20 for memory, *_ in levels]


def cancel_in_the_background(path: str) -> list:
    """A share that fails on rank 1 ends the writing of the others, whose write would take forever."""
    state, buffer = make_state({"w": torch.ones(40_000)}), checkpoint_file.HostBuffer()
    archive.CHUNK_BYTES = 1 << 10
    original, rank = os.pwrite, dist.get_rank()

    def pwrite(*args):
        if threading.current_thread().name == "checkpoint writer":
            if rank == 1:
                raise OSError(28, "No space left on device")
            threading.Event().wait(0.5)
        return original(*args)

    os.pwrite = pwrite
    publication = FORMS[os.path.splitext(path)[1]](state, path)
    publication.write_in_background(buffer)
    dist.barrier()
    if rank == 0:
        publication.background.cancel()
    result = caught(publication.finish)
    publication.close()
    return *result, os.listdir(os.path.dirname(path)), threading.active_count()


@pytest.mark.parametrize("name", ["checkpoint_last.pt", "checkpoint_last"])
def test_a_background_write_can_be_cancelled(tmp_path, name):  # [P5]
    for kind, message, seconds, _, files, _ in run_ranks(cancel_in_the_background, 2, str(tmp_path / name)):
        assert kind == "CheckpointWriteError" and "found by rank 1" in message and seconds < SECONDS
