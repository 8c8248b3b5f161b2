"""Which samples come, in which order, with which random numbers, and what happens when they do not come."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info

from trainer.data import (
    BatchIterator,
    DataChangedError,
    DatasetConfig,
    DatasetError,
    DummyBatch,
    EpochBatchIterator,
    batch_list,
    micro_batch_indices,
    sample_order,
    valid_batches,
    valid_subsets,
)
from trainer.data_order import Batching
from trainer.data_workers import collate_samples
from trainer.errors import ConfigError


class Numbers:
    """Sample i is i, or a failure. Remembers what was read in this process."""

    uses_rng = False

    def __init__(self, num_samples: int, fail_at: dict | None = None) -> None:
        self.num_samples, self.fail_at, self.read = num_samples, fail_at or {}, []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int):
        self.read.append(index)
        if index in self.fail_at:
            self.fail_at[index]()
        return torch.tensor([index])


class Noisy(Numbers):
    """Draws from every generator, as augmentations do, a varying number of times; knows the epoch and the worker."""

    uses_rng = True
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int):
        draws = [torch.rand(1).item() for _ in range(1 + index % 3)] + [random.random(), np.random.rand()]
        return {"index": index, "noise": torch.tensor(draws[-3:]), "epoch": self.epoch, "normal": np.random.randn()}


class Texts(Numbers):
    """Samples of different lengths."""

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        super().__init__(num_samples)
        self.sizes = np.random.RandomState(seed).randint(1, 30, num_samples)


def iterator(dataset=None, *, seed=1, num_samples=20, **arguments) -> EpochBatchIterator:
    """An EpochBatchIterator over Numbers; arguments of the section `dataset` are told by their names."""
    names = set(DatasetConfig.__dataclass_fields__)
    section = {name: arguments.pop(name) for name in list(arguments) if name in names}
    if "max_tokens" not in section:
        section.setdefault("batch_size", 4)
    dataset = Numbers(num_samples) if dataset is None else dataset
    return EpochBatchIterator(dataset, DatasetConfig(**section), seed, **arguments)


def equal(one, other) -> bool:
    """Whether two nests of batches are the same, bit by bit."""
    return repr(_plain(one)) == repr(_plain(other))


def _plain(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, DummyBatch):
        return "dummy", _plain(value.sample)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


@pytest.mark.parametrize("section", [{"batch_size": 3}, {"max_tokens": 40}, {"max_tokens": 40, "num_workers": 2}])
def test_an_iterator_sent_to_the_start_of_an_epoch_is_as_a_new_one(section):
    used = iterator(Texts(60), **section)
    for _ in zip(range(2), used.next_epoch_itr()):
        pass
    used.start_epoch(3)
    new = iterator(Texts(60), epoch=3, **section)
    assert used.state_dict() == new.state_dict()
    assert equal(list(used.next_epoch_itr()), list(new.next_epoch_itr()))
    for itr in (used, new):
        itr.close()


# ---- order


def test_the_order_is_a_permutation_that_seed_and_epoch_decide():
    places = [(seed, epoch) for seed in range(3) for epoch in range(1, 4)]
    orders = {place: tuple(sample_order(*place, 100).tolist()) for place in places}
    assert len(set(orders.values())) == len(orders), "a sum of seed and epoch would repeat orders"
    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert tuple(sample_order(2, 3, 100).tolist()) == orders[2, 3]


def test_micro_batches_are_dealt_in_the_order_of_the_epoch():
    order = sample_order(0, 1, 10)
    dealt = [micro_batch_indices(order, 2, j, 3) for j in range(4)]
    assert sum(dealt, []) == order[2:].tolist()
    assert [len(part) for part in dealt] == [3, 3, 2, 0]


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=200),
    max_tokens=st.integers(50, 200),
    batch_size=st.none() | st.integers(1, 20),
    multiple=st.sampled_from([1, 1, 2, 8]),
)
@settings(deadline=None, max_examples=100)
def test_batches_by_tokens_hold_their_limits_and_each_sample_once(sizes, max_tokens, batch_size, multiple):
    batches = batch_list(range(len(sizes)), np.array(sizes), Batching(max_tokens, batch_size, multiple))
    assert sorted(sum(batches, [])) == list(range(len(sizes)))
    for batch in batches:
        assert len(batch) * max(sizes[i] for i in batch) <= max_tokens
        assert batch_size is None or len(batch) <= batch_size
        assert len(batch) % multiple == 0 or len(batch) < multiple


def test_batches_by_tokens_leave_no_room_for_the_next_sample():
    sizes = np.random.RandomState(0).randint(1, 30, 300)
    batches = batch_list(range(300), sizes, Batching(100))
    for batch, following in zip(batches, batches[1:]):
        assert (len(batch) + 1) * sizes[following[0]] > 100


def test_a_sample_longer_than_max_tokens_is_an_error_with_its_index():
    dataset = Texts(10)
    dataset.sizes[7] = 1000
    with pytest.raises(ConfigError, match=r"sample 7 has 1000 tokens.*dataset.max_tokens=1000"):
        iterator(dataset, max_tokens=100)


# ---- positions


def ranks_of(dataset, world_size: int, **arguments) -> list[EpochBatchIterator]:
    return [iterator(dataset, rank=rank, world_size=world_size, **arguments) for rank in range(world_size)]


def take_updates(ranks: list[EpochBatchIterator], count: int | None = None) -> list[list[list[int]]]:
    """For each update, its micro-batches in the order they are dealt (j), over all ranks; dummies left out."""
    iterators = [itr.next_epoch_itr() for itr in ranks]
    updates = []
    while count is None or len(updates) < count:
        rows = [next(each, None) for each in iterators]
        if rows[0] is None:
            assert all(row is None for row in rows), "ranks must have the same number of updates"
            break
        assert len({len(row) for row in rows}) == 1, "ranks must have the same number of micro-batches"
        for itr, row in zip(ranks, rows):
            for batch, indices in zip(row, itr.last_indices):
                assert isinstance(batch, DummyBatch) or batch.flatten().tolist() == indices
                assert isinstance(batch, DummyBatch) == (not indices)
        dealt = [itr.last_indices[i] for i in range(len(rows[0])) for itr in ranks]
        updates.append([indices for indices in dealt if indices])
    return updates


def state_of(ranks: list[EpochBatchIterator]) -> dict:
    states = [itr.state_dict() for itr in ranks]
    assert all(state == states[0] for state in states), "the state must not depend on the rank"
    return states[0]


topology = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))  # ranks, update_freq, batch_size
session = st.tuples(topology, st.integers(0, 4))  # and updates until it is stopped


@given(num_samples=st.integers(5, 60), sessions=st.lists(session, min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_an_epoch_hands_out_each_sample_once_whatever_the_stops_and_the_topologies(num_samples, sessions, seed):
    dataset, state, given_out = Numbers(num_samples), None, []
    for (world_size, update_freq, batch_size), stop in [*sessions, ((2, 2, 2), None)]:
        ranks = ranks_of(dataset, world_size, update_freq=update_freq, batch_size=batch_size, seed=seed)
        if state is not None:
            for itr in ranks:
                itr.load_state_dict(state)
        if not ranks[0].end_of_epoch():
            given_out += sum(sum(take_updates(ranks, stop), []), [])
        state = state_of(ranks)
    assert given_out == sample_order(seed, 1, num_samples).tolist()
    assert (state["epoch"], state["samples_in_epoch"]) == (1, num_samples)


@given(num_samples=st.integers(24, 90), start=st.integers(0, 3), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_topologies_of_one_global_batch_deal_the_same_batches_in_the_same_order(num_samples, start, seed):
    dealt = []
    for world_size, update_freq in [(1, 4), (2, 2), (4, 1)]:
        ranks = ranks_of(Numbers(num_samples), world_size, update_freq=update_freq, batch_size=3, seed=seed)
        skipped = take_updates(ranks, start)
        dealt.append(skipped + take_updates(ranks))
    assert dealt[0] == dealt[1] == dealt[2]


@given(
    num_samples=st.integers(24, 90),
    global_batch_size=st.integers(1, 24),
    arrangements=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),  # ranks, batch_size
    stops=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    skip=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_a_global_batch_size_gives_the_same_updates_at_any_number_of_ranks(
    num_samples, global_batch_size, arrangements, stops, skip
):
    state, updates = None, []
    for i, ((world_size, batch_size), stop) in enumerate(zip(arrangements, stops)):
        arguments = {"batch_size": min(batch_size, global_batch_size), "global_batch_size": global_batch_size}
        ranks = ranks_of(Numbers(num_samples), world_size, seed=3, skip_remainder_batch=skip, **arguments)
        if state is not None:
            for itr in ranks:
                itr.load_state_dict(state)
        assert ranks[0].update_freq == -(-global_batch_size // (arguments["batch_size"] * world_size))
        if not ranks[0].end_of_epoch():
            updates += take_updates(ranks, None if i == len(arrangements) - 1 else stop)
        state = state_of(ranks)
    order = sample_order(3, 1, num_samples).tolist()
    whole = [order[begin : begin + global_batch_size] for begin in range(0, num_samples, global_batch_size)]
    if skip and len(whole[-1]) < global_batch_size:
        whole.pop()
    assert [sorted(sum(update, [])) for update in updates] == [sorted(update) for update in whole]


def test_a_global_batch_beyond_an_epoch_is_said_once(caplog):
    for size, times in ((20, 0), (21, 1)):
        caplog.clear()
        ranks_of(Numbers(20), 2, batch_size=2, global_batch_size=size)
        assert caplog.text.count("global_batch_size=21 is more than the 20 samples of dataset.train_subset=train") == times


def test_batch_size_may_be_traded_for_update_freq():
    wide, narrow = ranks_of(Numbers(50), 2, batch_size=4), ranks_of(Numbers(50), 2, batch_size=2, update_freq=2)
    samples = [[sorted(sum(update, [])) for update in take_updates(ranks)] for ranks in (wide, narrow)]
    assert samples[0] == samples[1]


def test_skipping_a_million_samples_reads_none_of_them():
    dataset = Numbers(1_000_100)
    itr = iterator(dataset, batch_size=10)
    itr.load_state_dict({"epoch": 1, "samples_in_epoch": 1_000_000, "num_samples": 1_000_100})
    began = time.perf_counter()
    batches = list(itr.next_epoch_itr())
    assert time.perf_counter() - began < 2
    assert dataset.read == sample_order(1, 1, 1_000_100)[1_000_000:].tolist()
    assert len(batches) == 10


def test_the_position_is_that_of_what_was_taken_not_of_what_workers_read():
    itr = iterator(num_samples=100, num_workers=2, prefetch_factor=4)
    updates = itr.next_epoch_itr()
    for taken in range(1, 6):
        next(updates)
        assert itr.state_dict()["samples_in_epoch"] == 4 * taken
        assert len(updates) == 25 - taken
    itr.close()


def test_an_epoch_ends_at_all_its_samples_and_finish_epoch_begins_the_next():
    itr = iterator(num_samples=10)
    list(itr.next_epoch_itr())
    assert itr.end_of_epoch() and itr.next_epoch_idx == 2
    assert (itr.epoch, itr.samples_in_epoch) == (1, 10)
    itr.finish_epoch()
    assert not itr.end_of_epoch() and itr.next_epoch_idx == 2
    assert (itr.epoch, itr.samples_in_epoch) == (2, 0)


def test_a_state_from_the_end_of_an_epoch_still_owes_its_end():
    done = iterator(num_samples=10)
    list(done.next_epoch_itr())
    itr = iterator(num_samples=10)
    itr.load_state_dict(done.state_dict())
    assert itr.end_of_epoch() and itr.epoch == 1
    updates = itr.next_epoch_itr()  # as in fairseq, who asks for updates gets those of the next epoch
    assert itr.epoch == 2 and len(list(updates)) == 3


def test_epochs_after_a_resume_are_whole_and_as_if_nothing_had_happened():
    through = iterator(num_samples=18)
    epochs = [[update for update in take_updates([through])] for _ in range(3)]
    stopped = iterator(num_samples=18)
    first = take_updates([stopped], 2)
    resumed = iterator(num_samples=18)
    resumed.load_state_dict(stopped.state_dict())
    assert [first + take_updates([resumed]), take_updates([resumed]), take_updates([resumed])] == epochs


def test_loading_a_state_starts_anew_from_it_whatever_was_being_iterated():
    itr = iterator(num_samples=40, num_workers=1)
    start, updates = itr.state_dict(), itr.next_epoch_itr()
    first = [next(updates), next(updates)]
    itr.load_state_dict(start)
    assert list(updates) == [], "the old iterator must not move the new position"
    assert equal([batch for batch in itr.next_epoch_itr()][:2], first)


@pytest.mark.parametrize("num_samples, skip, updates", [(16, False, 2), (17, False, 3), (17, True, 2), (15, True, 1)])
def test_the_number_of_updates_is_arithmetic(num_samples, skip, updates):
    itr = iterator(num_samples=num_samples, batch_size=4, update_freq=2, skip_remainder_batch=skip)
    assert itr.num_updates_per_epoch == itr.updates_left() == updates
    assert itr.dataset.read == []
    assert len(list(itr.next_epoch_itr())) == updates
    assert itr.end_of_epoch() and itr.samples_in_epoch == num_samples


def test_the_last_group_is_only_as_long_as_its_samples():
    itr = iterator(num_samples=21, batch_size=4, update_freq=4)
    assert [len(update) for update in itr.next_epoch_itr()] == [4, 2]
    assert [len(indices) for indices in itr.last_indices] == [4, 1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_without_samples_get_the_first_samples_of_the_global_batch(num_workers):
    ranks = ranks_of(Numbers(21), 4, batch_size=4, num_workers=num_workers)
    last = [list(itr.next_epoch_itr())[-1] for itr in ranks]
    rest = sample_order(1, 1, 21).tolist()[16:]
    assert [type(batch) for (batch,) in last] == [torch.Tensor, torch.Tensor, DummyBatch, DummyBatch]
    assert [last[rank][0].flatten().tolist() for rank in (0, 1)] == [rest[:4], rest[4:]]
    assert [last[rank][0].sample.tolist() for rank in (2, 3)] == [[[rest[0]], [rest[1]]]] * 2
    assert ranks[2].last_indices == [[]]
    for itr in ranks:
        itr.close()


def test_a_dummy_is_read_only_where_it_is_needed():
    dataset = Numbers(16)
    for itr in ranks_of(dataset, 2, batch_size=4):
        list(itr.next_epoch_itr())
    assert sorted(dataset.read) == list(range(16))


# ---- max_tokens


@pytest.mark.parametrize("world_size, update_freq", [(1, 4), (2, 2), (3, 1)])
def test_batches_by_tokens_are_dealt_each_once(world_size, update_freq):
    dataset = Texts(97)
    ranks = ranks_of(dataset, world_size, update_freq=update_freq, max_tokens=90)
    updates = take_updates(ranks)
    assert sorted(sum(sum(updates, []), [])) == list(range(97))
    assert len(updates) == ranks[0].num_updates_per_epoch
    assert state_of(ranks)["unit"] == "batches"


def test_batches_by_tokens_come_shuffled_and_otherwise_in_each_epoch():
    itr = iterator(Texts(200), max_tokens=90)
    one, two = take_updates([itr]), take_updates([itr])
    longest = [max(itr.dataset.sizes[i] for i in update[0]) for update in one]
    assert one != two and longest != sorted(longest)


changes = [dict(max_tokens=60), dict(max_tokens=90), dict(max_tokens=90, batch_size=3), dict(batch_size=5)]


@given(sessions=st.lists(st.tuples(st.sampled_from(changes), st.integers(0, 3)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_new_batching_takes_effect_in_mid_epoch_and_each_sample_still_comes_once(sessions):
    dataset, state, given_out = Texts(97), None, []
    for section, stop in [*sessions, (changes[0], None)]:
        itr = iterator(dataset, **section)
        if state is not None:
            itr.load_state_dict(state)
        updates = [] if itr.end_of_epoch() else take_updates([itr], stop)
        if "max_tokens" in section:
            assert all(len(b) * dataset.sizes[b].max() <= section["max_tokens"] for update in updates for b in update)
        given_out += sum(sum(updates, []), [])
        state = itr.state_dict()
    assert sorted(given_out) == list(range(97)) and itr.end_of_epoch()
    itr.finish_epoch()
    assert itr.state_dict()["earlier"] == []


def test_num_tokens_serves_where_there_are_no_sizes():
    dataset = Numbers(10)
    dataset.num_tokens = lambda index: 5
    assert sorted(len(update[0]) for update in take_updates([iterator(dataset, max_tokens=20)])) == [2, 4, 4]
    with pytest.raises(ConfigError, match="neither `sizes` nor `num_tokens"):
        iterator(Numbers(10), max_tokens=20)


# ---- random numbers


def test_what_a_sample_draws_depends_on_neither_workers_nor_ranks_nor_batches_nor_a_resume():
    def noise_of_epoch(**arguments):
        found = {}
        for itr in ranks_of(Noisy(30), arguments.pop("world_size", 1), **arguments):
            for update in itr.next_epoch_itr():
                for batch in (batch for batch in update if not isinstance(batch, DummyBatch)):
                    rows = zip(batch["index"].tolist(), batch["noise"].tolist(), batch["normal"].tolist())
                    found.update({index: (noise, normal) for index, noise, normal in rows})
            itr.close()
        return found

    reference = noise_of_epoch()
    assert len(reference) == 30 and len({str(noise) for noise in reference.values()}) == 30
    assert noise_of_epoch(num_workers=2) == reference
    assert noise_of_epoch(num_workers=3, world_size=2, batch_size=3) == reference
    assert noise_of_epoch(seed=2) != reference


def test_persistent_workers_know_the_new_epoch_and_draw_anew_in_it():
    itr = iterator(Noisy(12), num_workers=2)
    before, epochs = children(), []
    for epoch in (1, 2, 3):
        epochs.append(list(itr.next_epoch_itr()))
        workers = children() - before
        assert all(set(batch["epoch"].tolist()) == {epoch} for update in epochs[-1] for batch in update)
        itr.finish_epoch()
    assert len(workers) == 2 and children() - before == workers, "the same processes serve all epochs"
    alone = iterator(Noisy(12))
    for epoch in epochs:
        assert equal(list(alone.next_epoch_itr()), epoch)
    itr.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_leaves_the_trainers_generators_alone(num_workers):
    def drawn(iterate: bool):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        if iterate:
            itr = iterator(Noisy(12), num_workers=num_workers)
            list(itr.next_epoch_itr())
            list(valid_batches(Noisy(7), DatasetConfig(batch_size=2, num_workers=num_workers), 1))
            itr.close()
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    assert drawn(True) == drawn(False)


def test_a_task_s_collation_draws_by_position_too():
    def masking(samples):
        return torch.stack(samples), torch.rand(3)

    reference = list(iterator(collate_fn=masking).next_epoch_itr())
    with_workers = iterator(collate_fn=masking, num_workers=2)
    assert equal(list(with_workers.next_epoch_itr()), reference)
    with_workers.close()
    resumed = iterator(collate_fn=masking)
    resumed.load_state_dict({"epoch": 1, "samples_in_epoch": 8, "num_samples": 20})
    assert equal(list(resumed.next_epoch_itr()), reference[2:])


def test_a_dataset_that_draws_nothing_is_not_seeded_for(monkeypatch):
    def refuse(seed):
        raise AssertionError("seeded")

    monkeypatch.setattr("trainer.data_workers.seed_cpu", refuse)
    list(iterator().next_epoch_itr())
    list(iterator(Subset(TensorDataset(torch.arange(30)), range(20))).next_epoch_itr())
    for dataset in (Noisy(8), Subset(Noisy(8), range(8))):
        with pytest.raises(DatasetError, match="seeded"):
            list(iterator(dataset).next_epoch_itr())


# ---- collation and what travels


samples_of_all_kinds = [
    [torch.arange(3), torch.ones(3, dtype=torch.int64)],
    [(torch.arange(3), 1), (torch.ones(3, dtype=torch.int64), 2)],
    [(1.5, True), (2.5, False)],
    [1, 2],
    [{"a": torch.tensor(1.0), "b": (1, "x")}, {"a": torch.tensor(2.0), "b": (2, "y")}],
    [np.ones(2), np.zeros(2)],
    [(np.float32(1), [1, 2]), (np.float32(2), [3, 4])],
]


@pytest.mark.parametrize("samples", samples_of_all_kinds)
def test_the_default_collation_is_torch_s(samples):
    assert equal(collate_samples(samples), default_collate(samples))


class Rich(Numbers):
    """Samples with every kind of content, large and small."""

    def __getitem__(self, index: int):
        big = torch.full((300, 100), float(index))
        return {
            "big": big,
            "layout": big.view(1, 3, 100, 100).to(memory_format=torch.channels_last),
            "bf16": torch.tensor(index, dtype=torch.bfloat16),
            "complex": torch.tensor([index + 1j]),
            "bool": torch.tensor([index % 2 == 0]),
            "empty": torch.empty(0, 3),
            "array": np.arange(index + 1),
            "text": f"sample {index}",
            "nothing": None,
        }


@pytest.fixture
def pinning(monkeypatch):
    """The pinning thread at work; where there is no accelerator to pin for, it only passes on."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", lambda batch: batch)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_come_out_of_workers_as_they_went_in(pin_memory, pinning):
    here = iterator(Rich(10), collate_fn=lambda samples: samples)
    there = iterator(Rich(10), collate_fn=lambda samples: samples, num_workers=2, pin_memory=pin_memory)
    for one, other in zip(here.next_epoch_itr(), there.next_epoch_itr(), strict=True):
        for a, b in zip(one[0], other[0], strict=True):
            assert a.keys() == b.keys() and a["text"] == b["text"] and b["nothing"] is None
            assert (a["array"] == b["array"]).all() and b["array"].flags.writeable
            for name, tensor in a.items():
                if isinstance(tensor, torch.Tensor):
                    assert torch.equal(tensor, b[name]) and tensor.dtype == b[name].dtype
                    assert tensor.stride() == b[name].stride()
                    b[name].zero_()
    there.close()


def test_tensor_datasets_are_read_by_rows_with_the_same_result():
    data = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))
    fast = [[x.clone() for x in batch] for (batch,) in iterator(data).next_epoch_itr()]
    slow = [batch for (batch,) in iterator(data, collate_fn=default_collate).next_epoch_itr()]
    assert equal(fast, slow)


def test_getitems_is_used_where_nothing_is_drawn():
    class Whole(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor([index]) for index in indices]

    dataset = Whole(20)
    assert equal(list(iterator(dataset).next_epoch_itr()), list(iterator().next_epoch_itr()))
    assert dataset.read == []


@pytest.mark.parametrize("name", ["collater", "collate_fn"])
def test_the_dataset_s_own_collation_is_used_and_the_task_s_goes_first(name):
    dataset = Numbers(8)
    setattr(dataset, name, lambda samples: "the dataset's")
    assert list(iterator(dataset).next_epoch_itr()) == [["the dataset's"]] * 2
    assert list(iterator(dataset, collate_fn=lambda samples: "the task's").next_epoch_itr()) == [["the task's"]] * 2


# ---- errors of datasets


class Unpicklable(Exception):
    def __init__(self, lock) -> None:
        super().__init__("cannot travel")
        self.lock = lock

    def __reduce__(self):
        raise TypeError("not to be pickled")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail_plainly():
    raise KeyError("missing column")


def fail_unpicklably():
    raise Unpicklable(threading.Lock())


def fail_unprintably():
    raise Unprintable()


def stop_iteration():
    raise StopIteration("looks like the end of an epoch")


failures = [
    (fail_plainly, "KeyError", "missing column"),
    (fail_unpicklably, "Unpicklable", "cannot travel"),
    (fail_unprintably, "Unprintable", "cannot be had"),
    (stop_iteration, "StopIteration", "looks like the end"),
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("failure, name, message", failures)
def test_the_error_of_a_dataset_has_class_message_traceback_and_index(failure, name, message, num_workers):
    itr = iterator(Numbers(40, {17: failure}), num_workers=num_workers)
    with pytest.raises(DatasetError) as caught:
        list(itr.next_epoch_itr())
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.index == 17 and error.error_class.endswith(name) and message in error.error_message
    assert failure.__name__ in error.traceback_text
    for part in ("sample 17", name, message, failure.__name__):
        assert part in str(error)
    assert (error.worker is None) == (num_workers == 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_an_error_the_position_is_that_of_the_last_batch_taken(num_workers):
    order = sample_order(1, 1, 40).tolist()
    bad = Numbers(40, {order[9]: fail_plainly})
    itr = iterator(bad, num_workers=num_workers)
    with pytest.raises(DatasetError):
        list(itr.next_epoch_itr())
    assert itr.samples_in_epoch == 8
    bad.fail_at.clear()
    rest = sum([update[0].flatten().tolist() for update in itr.next_epoch_itr()], [])
    assert rest == order[8:]
    itr.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_collation_names_the_samples(num_workers):
    class Ragged(Numbers):
        def __getitem__(self, index):
            return torch.zeros(1 + index % 2)

    with pytest.raises(DatasetError, match=r"collating samples \d+.*stack expects each tensor"):
        list(iterator(Ragged(20), num_workers=num_workers).next_epoch_itr())


def test_a_batch_that_cannot_be_pickled_is_an_error_and_no_hang():
    itr = iterator(collate_fn=lambda samples: threading.Lock(), num_workers=1)
    with pytest.raises(DatasetError, match="sending samples.*cannot pickle"):
        list(itr.next_epoch_itr())


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_killed_worker_is_named_with_its_signal_and_no_process_is_left(pin_memory, pinning):
    before, threads = children(), threading.active_count()
    dataset = Numbers(40, {17: lambda: os.kill(os.getpid(), signal.SIGKILL)})
    itr = iterator(dataset, num_workers=2, pin_memory=pin_memory)
    with pytest.raises(DatasetError, match=r"data worker process \d+ was killed by SIGKILL \(often"):
        list(itr.next_epoch_itr())
    assert children() == before and threading.active_count() == threads


def test_a_worker_that_exits_is_an_error():
    with pytest.raises(DatasetError, match="ended with status 3"):
        list(iterator(Numbers(40, {17: lambda: os._exit(3)}), num_workers=2).next_epoch_itr())
    with pytest.raises(DatasetError, match="SystemExit"):
        list(iterator(Numbers(40, {17: lambda: sys.exit(3)}), num_workers=2).next_epoch_itr())


def test_a_failing_set_epoch_is_the_dataset_s_error():
    dataset = Noisy(8)
    dataset.set_epoch = lambda epoch: fail_plainly()
    with pytest.raises(DatasetError, match=r"set_epoch\(1\).*missing column"):
        iterator(dataset).next_epoch_itr()


# ---- processes


def test_workers_ignore_the_signals_of_the_trainer():
    before = children()
    itr = iterator(num_samples=40, num_workers=2)
    updates = itr.next_epoch_itr()
    next(updates)
    workers = children() - before
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        for pid in workers:
            os.kill(pid, number)
    assert len(list(updates)) == 9 and children() - before == workers
    itr.close()
    assert children() == before


def test_stopping_in_mid_epoch_leaves_no_process_thread_or_descriptor():
    def facts():
        gc.collect()  # what earlier tests left
        return children(), threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = facts()
    for _ in range(3):
        itr = iterator(Rich(60), num_workers=2, batch_size=2, collate_fn=lambda samples: samples)
        next(itr.next_epoch_itr())
        itr.close()
        assert facts() == before
        valid = valid_batches(Numbers(20), DatasetConfig(batch_size=2, num_workers=2), 1)
        next(iter(valid))
        valid.close()
        assert facts() == before


def test_workers_may_ask_torch_who_they_are():
    class Asks(Numbers):
        def __getitem__(self, index):
            info = get_worker_info()
            return info.id, info.num_workers, int(info.dataset is self), torch.get_num_threads()

    itr = iterator(Asks(16), num_workers=2)
    rows = sorted({tuple(row) for (batch,) in itr.next_epoch_itr() for row in torch.stack(batch).T.tolist()})
    assert rows == [(0, 2, 1, 1), (1, 2, 1, 1)]
    itr.close()


PROGRAM = """
    import os, sys, time, torch
    from trainer.data import DatasetConfig, EpochBatchIterator, valid_batches

    class Slow:
        def __len__(self): return 1000
        def __getitem__(self, i):
            if i == STUCK: time.sleep(100)
            return torch.zeros(30000)

    STUCK = int(sys.argv[1])
    itr = EpochBatchIterator(Slow(), DatasetConfig(batch_size=2, num_workers=2), seed=1)
    updates = itr.next_epoch_itr()
    next(updates)
    valid = iter(valid_batches(Slow(), DatasetConfig(batch_size=2, num_workers=1), seed=1))
    next(valid)
    import psutil
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    if sys.argv[2] == "wait":
        time.sleep(100)
"""


@pytest.mark.parametrize("how", ["exit", "wait"])
def test_workers_end_with_the_trainer_be_it_at_its_exit_or_killed_and_be_they_stuck(tmp_path, how):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    stuck = sample_order(1, 1, 1000)[5].item()
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, program, str(stuck), how], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    if how == "wait":
        process.kill()
    process.wait(timeout=30)
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() - began < 30, "workers outlived the trainer"
        time.sleep(0.02)
    process.stdout.close()


# ---- validation


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_validation_batches_are_dealt_in_order_each_once(world_size, num_workers):
    cfg = DatasetConfig(batch_size=4, num_workers=num_workers)
    of_ranks = [valid_batches(Numbers(22), cfg, 1, rank, world_size) for rank in range(world_size)]
    lists = [[batch.flatten().tolist() for batch in batches] for batches in of_ranks]
    assert [len(batches) for batches in of_ranks] == [len(found) for found in lists]
    dealt = [lists[j % world_size][j // world_size] for j in range(6)]
    assert sum(dealt, []) == list(range(22)) and sum(map(len, lists)) == 6
    for batches in of_ranks:
        batches.close()


def test_validation_may_be_broken_off_and_repeated_and_draws_the_same_each_time():
    for num_workers in (0, 2):
        cfg = DatasetConfig(batch_size=8, batch_size_valid=3, num_workers=num_workers)
        batches = valid_batches(Noisy(20), cfg, 1)
        first = list(batches)
        assert [len(batch["index"]) for batch in first] == [3] * 6 + [2]
        next(iter(batches))
        assert equal(list(batches), first)
        other_sizes = valid_batches(Noisy(20), DatasetConfig(batch_size=20), 1)
        assert equal(torch.cat([batch["noise"] for batch in first]), next(iter(other_sizes))["noise"])
        batches.close()


def test_an_empty_validation_set_has_no_batches():
    batches = valid_batches(Numbers(0), DatasetConfig(batch_size=4, num_workers=2), 1)
    assert isinstance(batches, BatchIterator) and len(batches) == 0 and list(batches) == []


def test_validation_by_tokens_holds_the_limit_and_the_ranks_share_it():
    dataset, cfg = Texts(50), DatasetConfig(max_tokens=60, batch_size_valid=5)
    found = [batch.flatten().tolist() for rank in range(3) for batch in valid_batches(dataset, cfg, 1, rank, 3)]
    assert sorted(sum(found, [])) == list(range(50))
    assert all(len(batch) * dataset.sizes[batch].max() <= 60 and len(batch) <= 5 for batch in found)


def test_valid_subsets_are_a_comma_list():
    assert valid_subsets(DatasetConfig(valid_subset="valid, test,")) == ["valid", "test"]
    assert valid_subsets(DatasetConfig(valid_subset="")) == valid_subsets(DatasetConfig(valid_subset=None)) == []


# ---- settings and data that cannot work


class NoLength:
    def __getitem__(self, index):
        return index


impossible = [
    (dict(dataset=Numbers(0)), "train_subset=train is empty"),
    (dict(num_samples=3), r"dataset.batch_size=4 is more than the 3 samples.*dataset.batch_size=3"),
    (dict(num_samples=5, world_size=6), r"6 ranks.*only 5 samples.*distributed_world_size=5"),
    (dict(num_samples=7, update_freq=2, skip_remainder_batch=True), r"no update.*7 samples.*takes 8.*batch=false"),
    (dict(batch_size=0), "dataset.batch_size is 0, but must be at least 1"),
    (dict(num_workers=-1), "dataset.num_workers is -1"),
    (dict(max_tokens=-5), "dataset.max_tokens is -5"),
    (dict(update_freq=0), "optimization.update_freq is 0"),
    (dict(batch_size=None), "neither dataset.batch_size nor dataset.max_tokens"),
    (dict(batch_size=12, required_batch_size_multiple=8), r"not a multiple.*dataset.batch_size=8"),
    (dict(dataset=NoLength()), "NoLength, without __len__"),
    (dict(world_size=2, rank=2), "rank 2 is not one of 2"),
]


@pytest.mark.parametrize("arguments, message", impossible)
def test_settings_that_cannot_make_an_update_are_refused_with_numbers_and_key(arguments, message):
    with pytest.raises(ConfigError, match=message):
        iterator(**arguments)


def test_all_mistakes_of_the_section_come_at_once():
    with pytest.raises(ConfigError) as caught:
        iterator(batch_size=-1, num_workers=-2, prefetch_factor=0)
    for name in ("dataset.batch_size", "dataset.num_workers", "dataset.prefetch_factor"):
        assert name in str(caught.value)


def test_changed_data_is_refused_naming_the_override():
    state = iterator(num_samples=20).state_dict()
    with pytest.raises(DataChangedError, match=r"number of samples was 20.*is 21 now.*reset_dataloader=true"):
        iterator(num_samples=21).load_state_dict(state)
    one, other = Numbers(20), Numbers(20)
    one.fingerprint, other.fingerprint = "abc", lambda: "abd"
    state = iterator(one).state_dict()
    assert state["fingerprint"] == "abc"
    with pytest.raises(DataChangedError, match=r"fingerprint was 'abc'.*'abd'.*checkpoint.reset_dataloader=true"):
        iterator(other).load_state_dict(state)
    assert str(pickle.loads(pickle.dumps(DataChangedError("x", 1, 2)))) == str(DataChangedError("x", 1, 2))
    iterator(one).load_state_dict(state)
    with pytest.raises(ConfigError, match="no samples_in_epoch.*checkpoint.reset_dataloader=true"):
        iterator().load_state_dict({"epoch": 3, "iterations_in_epoch": 7})


def test_the_state_is_plain_and_knows_neither_ranks_nor_workers_nor_update_freq(tmp_path):
    states = []
    for world_size, update_freq, num_workers in [(1, 4, 0), (2, 2, 1), (4, 1, 2)]:
        ranks = ranks_of(Numbers(64), world_size, update_freq=update_freq, num_workers=num_workers)
        take_updates(ranks, 2)
        states.append(state_of(ranks))
        for itr in ranks:
            itr.close()
    assert states[0] == states[1] == states[2]
    assert states[0]["samples_in_epoch"] == 32 and states[0]["unit"] == "samples"
    torch.save(states[0], tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == states[0]
