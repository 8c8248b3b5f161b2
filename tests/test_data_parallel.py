"""The reducer: sums over ranks and micro-batches, in a layout that never changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dist.harness import RanksFailed, run_ranks
from trainer.data_parallel import GradientReducer


def build(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    net = nn.ModuleDict({"a": nn.Linear(5, 7), "b": nn.Linear(7, 3), "narrow": nn.Linear(3, 2, dtype=torch.bfloat16)})
    net.register_parameter("permuted", nn.Parameter(torch.randn(4, 3).t()))
    net.register_parameter("scalar", nn.Parameter(torch.randn(())))
    net.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    net.register_parameter("unused", nn.Parameter(torch.randn(3)))
    net.register_parameter("sometimes", nn.Parameter(torch.randn(2)))
    return net


def loss_of(net: nn.ModuleDict, x: torch.Tensor, sometimes: bool = False) -> torch.Tensor:
    h = net["b"](torch.tanh(net["a"](x))) @ net.permuted
    out = h.square().sum() * net.scalar + net["narrow"](h[:, :3].bfloat16()).float().sum() + net.empty.sum()
    return out + net.sometimes.sum() if sometimes else out


def batch(update: int, rank: int, micro_batch: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * update + 10 * rank + micro_batch))


def _reduced(num_updates: int, bucket_bytes: int, sometimes_on: tuple, find_unused: bool) -> list:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net = build()
    reducer = GradientReducer(net.named_parameters(), None, world_size, find_unused, bucket_bytes)
    updates = []
    for update in range(num_updates):
        reducer.prepare()
        for micro_batch in range(2):
            if micro_batch == 1:
                reducer.arm()
            loss_of(net, batch(update, rank, micro_batch), rank in sometimes_on).backward()
        reducer.finish()
        updates.append({name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()})
    flat_norm = torch.stack([flat.float().norm() for flat in reducer.flats]).norm()
    return [updates, flat_norm]


@pytest.mark.parametrize("world_size, bucket_bytes", [(2, 64), (3, 25 * 2**20), (3, 1)])
def test_gradients_are_the_sums_over_ranks_and_micro_batches(world_size, bucket_bytes):
    results = run_ranks(_reduced, world_size, 3, bucket_bytes, (), False)
    net = build()
    for update in range(3):
        net.zero_grad()
        for rank in range(world_size):
            for micro_batch in range(2):
                loss_of(net, batch(update, rank, micro_batch)).backward()
        for name, parameter in net.named_parameters():
            ours = results[0][0][update][name]
            if name in ("unused", "sometimes"):
                assert ours is None, "a parameter that nobody used has no gradient, as with one rank"
                continue
            assert ours.stride() == parameter.stride(), name
            tolerance = {"rtol": 0.05, "atol": 0.2} if ours.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(ours, parameter.grad, **tolerance, msg=lambda m: f"{name}: {m}")
            for other in results[1:]:
                assert torch.equal(ours, other[0][update][name]), "every rank has the same bits"


def test_the_bits_do_not_depend_on_how_many_updates_a_process_has_done():
    """The fault of torch's DDP at three ranks: its second update adds up in another order than its first."""

    def first_update(results):
        return results[0][0][0]

    whole = run_ranks(_reduced, 3, 3, 64, (), False)
    again = run_ranks(_reduced, 3, 1, 64, (), False)
    for name, gradient in first_update(whole).items():
        assert gradient is None or torch.equal(gradient, first_update(again)[name]), name


def test_a_parameter_that_some_ranks_used_is_named_on_all_ranks():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_reduced, 3, 1, 64, (1,), False)
    assert all("parameter sometimes got a gradient on 1 of 3 ranks" in outcome.error for outcome in failed.value.outcomes)
    assert all("find_unused_parameters=true" in outcome.error for outcome in failed.value.outcomes)


def test_with_find_unused_parameters_the_others_count_zero():
    results = run_ranks(_reduced, 3, 2, 64, (1, 2), True)
    for result in results:
        assert torch.equal(result[0][1]["sometimes"], torch.full((2,), 4.0))  # two ranks, two micro-batches, ones
