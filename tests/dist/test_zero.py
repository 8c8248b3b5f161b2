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
    from trainer.optim import moments_per_parameter

    different = []
    for name, settings in OPTIMIZERS.items():
        results = []
        for zero in (False, True):
            net, reducer, optimizer = built(name, settings, zero, bucket_bytes)
            norms = train(net, reducer, optimizer, range(num_updates))
            moments = torch.tensor(moments_per_parameter(optimizer))
            results.append([norms, dict(net.state_dict()), whole_state(optimizer), moments])
        different += [
            f"{name}: {what}"
            for what, a, b in zip(("norms", "parameters", "state", "moments"), *results)
            if not same(a, b)
        ]
    return different


@pytest.mark.parametrize("world_size, bucket_bytes", [(1, 2**20), (2, 3000), (3, 2**20), (4, 3000)])
def test_every_number_is_that_of_plain_data_parallel(world_size, bucket_bytes):
    assert run_ranks(compare_with_plain, world_size, 3, bucket_bytes, timeout=120) == [[]] * world_size


# ---- bytes ----


class Uneven(nn.Module):
    """An embedding that has nine tenths of all elements, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3000, 640)
        self.rest = nn.ModuleList(nn.Linear(157, 157) for _ in range(3))


def hand_out_a_whole_state() -> list[float]:
    from tests.dist.transport import bytes_received
    from trainer import optim
    from trainer.zero import shard_optimizer

    torch.manual_seed(0)
    rank, group, whole = torch.distributed.get_rank(), torch.distributed.group.WORLD, Uneven()
    named = list(whole.named_parameters())
    plain, cut = torch.optim.AdamW(whole.parameters()), torch.optim.AdamW(list(whole.parameters())[::-1], fused=True)
    for optimizer in (plain, cut):
        optim.name_parameters(optimizer, named)
    if rank == 0:
        for _, parameter in named:
            parameter.grad = torch.randn_like(parameter)
        plain.step()
    shard_optimizer(cut, GradientReducer(named, group, group.size()), group)
    torch.distributed.barrier()
    before = bytes_received()
    returned = cut.broadcast_global_state_dict(optim.optimizer_state(plain) if rank == 0 else None)
    received = bytes_received() - before
    own = sum(value.nbytes for entry in cut.state.values() for value in entry.values())
    cut.load_state_dict(returned)
    names = {index: name for group in cut.param_groups for index, name in enumerate(group["param_names"])}
    arrived = {names[index]: entry for index, entry in whole_state(cut)["state"].items()}
    if rank == 0:
        expected = optim.optimizer_state(plain)["state"]
        assert all(
            same(dict(sorted(arrived[name].items())), dict(sorted(expected[i].items())))
            for i, (name, _) in enumerate(named)
        )
    total = sum(2 * parameter.nbytes for _, parameter in named)
    largest = max(2 * parameter.nbytes for _, parameter in named[1:])
    return [received / own, own - total / group.size() - largest]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_rank_receives_what_it_owns_and_no_more(world_size):
    results = run_ranks(hand_out_a_whole_state, world_size, timeout=120)
    assert all(0.99 < received <= 1.01 for received, _ in results[1:]), results
    assert all(too_much <= 0 for _, too_much in results)


# ---- which optimizers may be cut ----


def test_the_table_of_the_docs_is_what_a_trial_says():
    import re
    from pathlib import Path

    from trainer.errors import ConfigError
    from trainer.zero import elementwise_state

    page = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| (yes|no)", page, re.MULTILINE))
    classes = {name: cls for name, cls in vars(torch.optim).items() if isinstance(cls, type) and name != "Optimizer"}
    assert sorted(table) == sorted(name for name, cls in classes.items() if issubclass(cls, torch.optim.Optimizer))
    for name, answer in table.items():
        optimizer = classes[name]([nn.Parameter(torch.zeros(4, 4))])
        try:
            elementwise_state(optimizer)
            assert answer == "yes", name
        except ConfigError as error:
            assert answer == "no", error
            assert name in str(error) and "distributed_training.zero_sharding=none" in str(error)


class Centred(torch.optim.SGD):
    """Subtracts the mean of each gradient: looks at more than one element at a time."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad -= parameter.grad.mean()
        return super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += 0.1 * torch.randn_like(parameter)
        return super().step(closure)


@pytest.mark.parametrize("cls", [Centred, Noisy])
def test_another_optimizer_that_is_not_elementwise_is_refused_and_its_trial_leaves_no_trace(cls):
    from trainer.errors import ConfigError
    from trainer.zero import elementwise_state

    optimizer = cls([nn.Parameter(torch.zeros(4, 4))], lr=0.1)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=f"{cls.__name__}.*zero_sharding=none"):
        elementwise_state(optimizer)
    assert torch.equal(before, torch.get_rng_state()) and not optimizer.state


# ---- memory ----


def step_after_the_memory_was_replaced() -> str:
    net, reducer, optimizer = built("AdamW", {}, True, 2**20)
    net.second.load_state_dict({name: value.clone() for name, value in net.second.state_dict().items()}, assign=True)
    net.first.weight.data = net.first.weight.data.clone()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)


def shared_memory_is_refused() -> str:
    from trainer.errors import ConfigError
    from trainer.zero import shard_optimizer

    net = nn.ParameterDict({"one": nn.Parameter(torch.zeros(8))})
    net["other"] = nn.Parameter(net["one"].data[4:])
    group = torch.distributed.group.WORLD
    try:
        shard_optimizer(torch.optim.SGD(net.parameters()), GradientReducer(net.named_parameters(), group, 2), group)
    except ConfigError as error:
        return str(error)


def nothing_to_hand_out() -> str:
    _, _, optimizer = built("AdamW", {}, True, 2**20)
    try:
        optimizer.broadcast_global_state_dict({} if torch.distributed.get_rank() == 0 else None)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def three_errors() -> tuple[str, ...]:
    return step_after_the_memory_was_replaced(), shared_memory_is_refused(), nothing_to_hand_out()


def test_memory_that_is_not_where_the_optimizer_updates_it_is_named():
    for replaced, shared, nothing in run_ranks(three_errors, 2):
        assert "rank 0 of the group must pass the state" in nothing
        assert "parameter first.weight no longer lies" in replaced and "zero_sharding=none" in replaced
        assert "parameters one and other lie in the same memory" in shared and "zero_sharding=none" in shared
