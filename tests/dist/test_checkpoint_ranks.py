"""Properties of checkpoints among several ranks. Numbers in brackets are the invariants of docs/checkpoint.md."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import checkpoint_file
import checkpoint_utils
import distributed_utils
from checkpoint_file import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    archive,
    filling,
    open_checkpoint,
    sending,
)
from tests.dist.harness import run_ranks
from tests.test_checkpoint_file import ODD, as_bytes, assert_same, make_state, rss_anon
from tests.test_checkpoint_utils import FakeIterator, FakeTrainer, config, flip, folder_content

BOTH_WAYS = pytest.mark.parametrize("on_all_ranks", [True, False], ids=["all read", "rank 0 reads"])
SECONDS = 20  # in which ranks that fail must all have said so; they wait for nothing


def written(tmp_path, state=None) -> str:
    path = str(tmp_path / "f.pt")
    checkpoint_file.write_checkpoint_file(state or make_state(ODD, more={"x": [1, 2j, None], 3: ("a",)}), path)
    return path


def shrink_buffers() -> None:
    archive.CHUNK_BYTES, sending.BUCKET_BYTES, sending.STRAIGHT_BYTES = 256, 1024, 512


def caught(act) -> tuple:
    """(class, message, seconds) of the error that `act` raises."""
    begun = time.monotonic()
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun, getattr(error, "exit_status", None)
    return None, "", time.monotonic() - begun, None


def read_everything(path, on_all_ranks, small) -> tuple:
    if small:
        shrink_buffers()
    with open_checkpoint(path, on_all_ranks=on_all_ranks) as reader:
        state = reader.materialize(reader.skeleton)
        refs = reader.skeleton["model"]
        targets = {name: torch.full(ref.shape, 7.0).to(ref.dtype) for name, ref in refs.items()}
        reader.copy([(refs[name], target) for name, target in targets.items()])
    state = {**state, "model": {name: as_bytes(t) for name, t in state["model"].items()}}
    return state, {name: as_bytes(t) for name, t in targets.items()}


@BOTH_WAYS
@pytest.mark.parametrize("world_size, small", [(2, True), (3, False)])
def test_both_ways_of_reading_give_the_bytes_of_the_file_on_every_rank(tmp_path, on_all_ranks, world_size, small):  # [R8]
    path = written(tmp_path)
    expected = {name: as_bytes(t) for name, t in ODD.items()}
    for state, targets in run_ranks(read_everything, world_size, path, on_all_ranks, small):
        assert state["model"] == expected and targets == expected
        assert_same(state["more"], {"x": [1, 2j, None], 3: ("a",)})


@BOTH_WAYS
def test_the_old_layout_of_torch_is_read_by_all(tmp_path, on_all_ranks):
    path = tmp_path / "old.pt"
    torch.save(make_state({"a": torch.arange(5), "b": torch.ones(2, 2)}), path, _use_new_zipfile_serialization=False)
    for state, _ in run_ranks(read_everything, 2, path, on_all_ranks, True):
        assert state["model"] == {"a": as_bytes(torch.arange(5)), "b": as_bytes(torch.ones(2, 2))}


def copy_all(path, on_all_ranks, small=True) -> tuple:
    if small:
        shrink_buffers()

    def act():
        with open_checkpoint(path, on_all_ranks=on_all_ranks) as reader:
            refs = reader.skeleton["model"]
            reader.copy([(ref, torch.zeros(ref.shape, dtype=ref.dtype)) for ref in refs.values()])

    return caught(act)


@BOTH_WAYS
def test_damage_is_raised_on_all_ranks_as_what_it_is(tmp_path, on_all_ranks):  # [R8] [R2]
    path = written(tmp_path, make_state({f"w{i}": torch.randn(700) for i in range(6)}))
    raw = bytearray(Path(path).read_bytes())
    raw[len(raw) // 2] ^= 1
    Path(path).write_bytes(raw)
    for kind, message, seconds, status in run_ranks(copy_all, 2, path, on_all_ranks):
        assert kind == "CheckpointDamagedError" and path in message and "record data/" in message
        assert seconds < SECONDS and status == 2


def open_own(paths, on_all_ranks) -> tuple:
    return caught(lambda: open_checkpoint(paths[dist.get_rank()], on_all_ranks=on_all_ranks))


def test_a_file_that_one_rank_does_not_see_is_an_error_on_all(tmp_path):  # [R8]
    path = written(tmp_path)
    for kind, message, seconds, _ in run_ranks(open_own, 3, [path, path, path + ".gone"], True):
        assert kind == "CheckpointNotFoundError" and "(found by rank 2)" in message and seconds < SECONDS
    for kind, message, *_ in run_ranks(open_own, 2, [path + ".gone", path], False):
        assert kind == "CheckpointNotFoundError" and "(found by rank 0)" in message
    assert [kind for kind, *_ in run_ranks(open_own, 2, [path, path + ".gone"], False)] == [None, None]


def who_failed(paths) -> int | None:
    try:
        open_checkpoint(paths[dist.get_rank()], on_all_ranks=True)
    except checkpoint_file.CheckpointError as error:
        return distributed_utils.Failure.of(error).rank


def test_who_failed_is_the_rank_that_found_it_on_every_rank(tmp_path):
    path = written(tmp_path)
    assert run_ranks(who_failed, 2, [path, path + ".gone"]) == [1, 1]
    assert run_ranks(who_failed, 2, [path + ".gone", path]) == [0, 0]


def test_another_file_under_the_same_path_is_noticed(tmp_path):  # [R8]
    one = written(tmp_path)
    two = str(tmp_path / "two.pt")
    checkpoint_file.write_checkpoint_file(make_state({**ODD, "plain": torch.randn(3, 4)}), two)
    for kind, message, *_ in run_ranks(open_own, 2, [one, two], True):
        assert kind == "CheckpointError" and "another file" in message and "rank 1" in message


def before_each_use(act) -> None:
    """Let `act` run whenever bytes are about to go into a target on this rank."""

    def first(original):
        return lambda *args: (act(), original(*args))[1]

    filling.Use.fill, filling.Use.memory = first(filling.Use.fill), first(filling.Use.memory)


def copy_with_a_failing_rank(path, on_all_ranks, failing) -> tuple:
    shrink_buffers()
    reader = open_checkpoint(path, on_all_ranks=on_all_ranks)
    if dist.get_rank() == failing:
        calls = []

        def fail_at_the_third():
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("none left")

        before_each_use(fail_at_the_third)
    refs = reader.skeleton["model"]
    return caught(lambda: reader.copy([(ref, torch.zeros(ref.shape, dtype=ref.dtype)) for ref in refs.values()]))


@BOTH_WAYS
@pytest.mark.parametrize("failing", [0, 1])
def test_any_failure_of_one_rank_ends_the_copy_on_all(tmp_path, on_all_ranks, failing):  # [R8]
    results = run_ranks(copy_with_a_failing_rank, 2, written(tmp_path), on_all_ranks, failing)
    assert [kind for kind, *_ in results] == ["MemoryError" if rank == failing else "PeerError" for rank in (0, 1)]
    assert all("none left" in message and seconds < SECONDS for _, message, seconds, _ in results)


def in_a_subgroup(path, on_all_ranks):
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    with open_checkpoint(path, group, on_all_ranks=on_all_ranks) as reader:
        return as_bytes(reader.materialize(reader.skeleton["model"]["transposed"]))


@BOTH_WAYS
def test_a_group_without_global_rank_0_reads_too(tmp_path, on_all_ranks):
    expected = as_bytes(ODD["transposed"])
    assert run_ranks(in_a_subgroup, 3, written(tmp_path), on_all_ranks) == [None, expected, expected]


def memory_of_a_copy(path, on_all_ranks) -> tuple:
    target = torch.zeros(24 << 20)  # 96 MiB
    dist.barrier()
    with open_checkpoint(path, on_all_ranks=on_all_ranks) as reader:
        peak, before = [0], rss_anon()

        def look():
            peak[0] = max(peak[0], rss_anon())

        before_each_use(look)
        reader.copy([(reader.skeleton["model"]["w"], target)])
    return peak[0] - before, float(target.sum())


@BOTH_WAYS
def test_no_rank_holds_more_than_its_tensors_and_a_bounded_buffer(tmp_path, on_all_ranks):  # [F6]
    path = written(tmp_path, make_state({"w": torch.ones(24 << 20)}))
    for extra, total in run_ranks(memory_of_a_copy, 2, path, on_all_ranks):
        assert extra < 48 << 20 and total == 24 << 20


# ---- the checkpoints of a run


class RankTrainer(FakeTrainer):
    on_all_ranks = False

    def load_checkpoint(self, filename, *args, **kwargs):
        original = checkpoint_file.open_checkpoint
        checkpoint_file.open_checkpoint = lambda path, group, _: original(path, group, self.on_all_ranks)
        try:
            return super().load_checkpoint(filename, *args, **kwargs)
        finally:
            checkpoint_file.open_checkpoint = original


def save_updates(folder, updates) -> list:
    cfg = config(folder, save_interval_updates=1, keep_interval_updates=2)
    trainer, paths = RankTrainer(cfg), []
    for update in updates:
        itr = FakeIterator()
        itr.samples_in_epoch = 3
        paths.append(checkpoint_utils.save_checkpoint(cfg, trainer.train_to(update), itr, 1 / update).paths)
    return paths


def load_and_tell(folder, on_all_ranks) -> tuple:
    cfg = config(folder, save_interval_updates=1)
    trainer = RankTrainer(cfg)
    trainer.on_all_ranks = on_all_ranks
    result = caught(lambda: checkpoint_utils.load_checkpoint(cfg, trainer))
    return result[0], trainer.num_updates, trainer.weight.tolist(), trainer.best.state_dict(), trainer.run_id


@BOTH_WAYS
def test_ranks_save_together_and_continue_together(tmp_path, on_all_ranks):
    paths = run_ranks(save_updates, 3, tmp_path, [8, 9, 10])
    assert paths[0] == paths[1] == paths[2]
    assert folder_content(tmp_path) == {
        "checkpoint_1_9.pt": 9, "checkpoint_1_10.pt": 10, "checkpoint_best.pt": 10, "checkpoint_last.pt": 10
    }  # fmt: skip
    results = run_ranks(load_and_tell, 2, tmp_path, on_all_ranks)
    assert results[0] == results[1] and results[0][:3] == (None, 10, [10.0] * 8)


@BOTH_WAYS
def test_all_ranks_go_back_to_the_same_older_checkpoint(tmp_path, on_all_ranks):  # [R3]
    run_ranks(save_updates, 2, tmp_path, [8, 9])
    for name in ("checkpoint_best.pt", "checkpoint_1_9.pt", "checkpoint_last.pt"):
        flip(tmp_path / name)
    results = run_ranks(load_and_tell, 2, tmp_path, on_all_ranks)
    assert results[0] == results[1] and results[0][:3] == (None, 8, [8.0] * 8)
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint_1_8.pt", "damaged"
    ]  # fmt: skip


def test_when_all_are_damaged_every_rank_says_so(tmp_path):  # [R4] [R8]
    run_ranks(save_updates, 2, tmp_path, [8])
    for name in os.listdir(tmp_path):
        flip(tmp_path / name)
    assert [result[0] for result in run_ranks(load_and_tell, 2, tmp_path, False)] == ["NoUsableCheckpointError"] * 2


def save_on_a_full_disk(folder) -> tuple:
    save_updates(folder, [8])
    if dist.get_rank() == 0:
        os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    return caught(lambda: save_updates(folder, [9]))


def test_a_failed_save_is_an_error_on_all_ranks_with_its_cause(tmp_path):  # [P5]
    for kind, message, seconds, status in run_ranks(save_on_a_full_disk, 2, tmp_path):
        assert kind == "CheckpointWriteError" and "No space left on device" in message and "rank 0" in message
        assert str(tmp_path / "checkpoint_1_9.pt") in message and seconds < SECONDS and status == 1
    assert folder_content(tmp_path) == {"checkpoint_1_8.pt": 8, "checkpoint_best.pt": 8, "checkpoint_last.pt": 8}


def ask_for(folder, asked) -> tuple:
    cfg = config(folder, restore_file=asked)
    return caught(lambda: checkpoint_utils.load_checkpoint(cfg, RankTrainer(cfg)))


def test_a_missing_restore_file_is_an_error_on_all_ranks_within_seconds(tmp_path):  # [R6] [R8]
    for kind, message, seconds, status in run_ranks(ask_for, 3, tmp_path, str(tmp_path / "gone.pt")):
        assert kind == "CheckpointNotFoundError" and "checkpoint.restore_file" in message
        assert seconds < SECONDS and status == 2


def error_kinds() -> list:
    results = []
    for rank in range(2):
        error = CheckpointDamagedError("p", "is torn", "data/7") if dist.get_rank() == rank else None
        try:
            checkpoint_file.agree_on_error(error)
        except CheckpointError as raised:
            results.append((type(raised), raised.path, raised.record, raised.rank))
    return results


def test_an_agreed_error_keeps_class_path_record_and_rank():
    expected = [(CheckpointDamagedError, "p", "data/7", rank) for rank in range(2)]
    assert run_ranks(error_kinds, 2) == [expected, expected]
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
