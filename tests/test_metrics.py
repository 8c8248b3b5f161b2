"""Sums of updates: the same on all ranks, whatever names come up where."""

from __future__ import annotations

import pytest
import torch

from tests.dist.harness import run_ranks
from trainer.metrics import EpochMeter, GlobalSums, LocalSums


def local_sums(loss: float, sample_size: int, outputs: dict) -> LocalSums:
    local = LocalSums()
    local.add(torch.tensor(loss), sample_size, outputs)
    return local


def test_numbers_and_tensors_of_any_dtype_add_up_as_float64():
    local = LocalSums()
    for _ in range(3):
        local.add(torch.tensor(0.5), torch.tensor(2), {"correct": torch.tensor(True), "n": 2**30, "half": torch.tensor(1.5).bfloat16()})
    sums = GlobalSums(None, 1, torch.device("cpu"))
    sums.start(local)
    assert sums.finish() == (6.0, 1.5, {"correct": 3.0, "n": 3.0 * 2**30, "half": 4.5})


def _updates() -> list:
    rank = torch.distributed.get_rank()
    sums = GlobalSums(None, torch.distributed.get_world_size(), torch.device("cpu"))
    results = []
    # A name comes up on one rank alone, then on another; counts are beyond what float32 can hold.
    for outputs in ({"loss": 1.0}, {"loss": 1.0}, {f"rank{rank}": 1.0}, {"loss": 2.0**24 + 1}, {}):
        sums.start(local_sums(1.0, 2**24 + 1, outputs), stop=rank == 1 and "rank1" in outputs)
        results.append((*sums.finish(), sums.stop_requested))
    return results


def test_all_ranks_get_the_same_exact_sums_whatever_names_they_gave():
    one, other, third = run_ranks(_updates, 3)
    assert one == other == third
    sizes = [3.0 * (2**24 + 1)] * 5
    assert [result[0] for result in one] == sizes
    assert one[0][2] == one[1][2] == {"loss": 3.0}
    assert one[2][2] == {"rank0": 1.0, "rank1": 1.0, "rank2": 1.0}
    assert one[3][2] == {"loss": 3.0 * (2**24 + 1)}, "what was seen before and is not given now is not there"
    assert one[4][2] == {}
    assert [result[3] for result in one] == [False, False, True, False, False]


def test_the_meter_of_an_epoch_goes_on_exactly_from_its_state():
    through, first, second = EpochMeter(), EpochMeter(), EpochMeter()
    for i in range(10):
        through.add(3, {"loss": 0.1 * i})
        (first if i < 5 else second).add(3, {"loss": 0.1 * i})
        if i == 4:
            second.load_state_dict(first.state_dict())
    assert second.state_dict() == through.state_dict()
    second.reset()
    assert second.state_dict() == EpochMeter().state_dict()


def test_finish_without_start_is_our_own_mistake():
    with pytest.raises(AssertionError):
        GlobalSums(None, 1, torch.device("cpu")).finish()
