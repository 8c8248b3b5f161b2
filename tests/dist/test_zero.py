"""ZeRO: the numbers of plain data parallel with a share of its optimizer state, on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from checkpoint_file import ShardedTensor
from tests.dist.harness import run_ranks
from trainer.data_parallel import GradientReducer

OPTIMIZERS = {
    "AdamW": {"weight_decay": 0.1},
    "AdamW fused": {"fused": True, "amsgrad": True},
    "AdamW foreach": {"foreach": True},
    "Adam": {"foreach": False, "weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "SGD plain": {},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.01},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {"t0": 1.0},
    "Rprop": {},
}


class Net(nn.Module):
    """Every kind of parameter: tied, frozen, 0-dim, empty, permuted, narrow, complex, unused, used by some ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(9, 33), nn.Linear(33, 33)
        self.tied = nn.Linear(33, 33)
        self.tied.weight = self.second.weight
        self.narrow = nn.Linear(33, 40, dtype=torch.bfloat16)
        self.permuted = nn.Parameter(torch.randn(40, 33).t())
        self.turned = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.randn(300))
        self.sometimes = nn.Parameter(torch.randn(70))
        self.frozen = nn.Parameter(torch.randn(33), requires_grad=False)

    def forward(self, x: torch.Tensor, sometimes: bool) -> torch.Tensor:
        h = self.tied(torch.tanh(self.second(torch.tanh(self.first(x))))) + self.frozen
        out = (h @ self.permuted).square().mean() * self.scalar + self.narrow(h.bfloat16()).float().square().mean()
        out = out + (self.turned.abs() ** 2).sum() + self.empty.sum()
        return out + self.sometimes.square().sum() if sometimes else out


def built(name: str, settings: dict, zero: bool, bucket_bytes: int):
    """A net, its reducer and its optimizer in two groups that interleave the parameters' order."""
    from trainer import optim
    from trainer.zero import shard_optimizer

    net = Net()
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    if "fused" in settings:  # torch's fused kernels do not take complex numbers
        named = [(name, p) for name, p in named if not p.is_complex()]
    groups = [
        {"params": [p for _, p in named[i::2]], "lr_scale": 1.0, **({} if i else {"weight_decay": 0.01})}
        for i in (0, 1)
    ]
    optimizer = getattr(torch.optim, name.split()[0])(groups, lr=0.01, **settings)
    optim.name_parameters(optimizer, named)
    group = torch.distributed.group.WORLD
    reducer = GradientReducer(named, group, group.size(), True, bucket_bytes)
    if zero:
        shard_optimizer(optimizer, reducer, group)
    return net, reducer, optimizer


def train(net, reducer, optimizer, updates) -> list[float]:
    from trainer.optim import clip_grad_norm

    rank, norms = torch.distributed.get_rank(), []
    for update in updates:
        generator = torch.Generator().manual_seed(100 * update + rank)
        reducer.prepare()
        reducer.arm()
        net(torch.randn(4, 9, generator=generator), rank == 0).backward()
        reducer.finish()
        norms.append(clip_grad_norm(reducer.flats, 1.0).item())
        optimizer.step()
    return norms


def whole_state(optimizer) -> dict:
    """The state as a file would hold it: pieces of all ranks put together; asserts that nothing overlaps or is missing."""
    from trainer.optim import optimizer_state

    state = optimizer_state(optimizer)
    return {
        "param_groups": state["param_groups"],
        "state": {
            index: {key: gathered(value) for key, value in entry.items()} for index, entry in state["state"].items()
        },
    }


def gathered(value):
    if not isinstance(value, ShardedTensor):
        return value.clone() if isinstance(value, torch.Tensor) else value
    mine = [(begin, values.clone()) for begin, values in value.pieces]
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    flat = torch.empty(value.shape.numel(), dtype=value.dtype)
    begin = 0
    for first, values in sorted((piece for pieces in everyone for piece in pieces), key=lambda piece: piece[0]):
        assert first == begin and values.dim() == 1
        flat[begin : begin + values.numel()] = values
        begin += values.numel()
    assert begin == flat.numel()
    return flat.as_strided(value.shape, value.stride)


def same(one, other) -> bool:
    """Bit by bit, NaN included."""
    if isinstance(one, torch.Tensor):
        kinds = [(t.dtype, t.shape) for t in (one, other)]
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        return kinds[0] == kinds[1] and torch.equal(*bits)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def compare_with_plain(num_updates: int, bucket_bytes: int) -> list[str]:
    different = []
    for name, settings in OPTIMIZERS.items():
        results = []
        for zero in (False, True):
            net, reducer, optimizer = built(name, settings, zero, bucket_bytes)
            norms = train(net, reducer, optimizer, range(num_updates))
            results.append([norms, dict(net.state_dict()), whole_state(optimizer)])
        different += [
            f"{name}: {what}" for what, a, b in zip(("norms", "parameters", "state"), *results) if not same(a, b)
        ]
    return different


@pytest.mark.parametrize("world_size, bucket_bytes", [(1, 2**20), (2, 3000), (3, 2**20), (4, 1)])
def test_every_number_is_that_of_plain_data_parallel(world_size, bucket_bytes):
    assert run_ranks(compare_with_plain, world_size, 4, bucket_bytes, timeout=120) == [[]] * world_size
