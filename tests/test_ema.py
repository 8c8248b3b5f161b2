"""The average follows the weights as a function of num_updates, and what is trained is never lost to it."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from trainer.ema import EMA, EMAConfig, decay_at
from trainer.errors import ConfigError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight  # tied
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.small = nn.Parameter(torch.full((2,), 0.1, dtype=torch.bfloat16))
        self.big = nn.Parameter(torch.full((2,), 0.1, dtype=torch.float64))
        self.numbers = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x):
        return self.out(self.norm(self.embed(x)))


def plain_copy(pairs):
    for source, target in pairs:
        target.copy_(source)


def new(**fields):
    torch.manual_seed(0)
    net = Net()
    return net, EMA(net, EMAConfig(store_ema=True, **fields))


@torch.no_grad()
def disturb(net, seed):
    torch.manual_seed(seed)
    for parameter in net.parameters():
        parameter.add_(torch.randn(parameter.shape).to(parameter.dtype))
    net.norm.running_mean.add_(1)
    net.norm.num_batches_tracked.add_(1)


def test_float_parameters_are_averaged_and_everything_else_is_copied():
    net, ema = new(ema_decay=0.75)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    disturb(net, 1)
    ema.update(net, 1)
    averages, after = ema.state_dict(), net.state_dict()
    assert averages.keys() == after.keys() and "scratch" not in averages
    for name in ("embed.weight", "norm.weight", "frozen", "big"):
        torch.testing.assert_close(averages[name], 0.75 * before[name] + 0.25 * after[name])
        assert averages[name].dtype == before[name].dtype
    torch.testing.assert_close(averages["small"], 0.75 * before["small"].float() + 0.25 * after["small"].float())
    for name in ("norm.running_mean", "norm.num_batches_tracked", "mask", "numbers"):
        assert torch.equal(averages[name], after[name]) and averages[name].dtype == after[name].dtype
        assert averages[name].data_ptr() != after[name].data_ptr()


def test_averages_of_half_parameters_are_float32():
    net, ema = new(ema_decay=0.999)
    assert ema.state_dict()["small"].dtype == torch.float32
    with torch.no_grad():
        net.small.add_(1)
    start = ema.state_dict()["small"].clone()
    for update in range(1, 5):
        ema.update(net, update)
    assert (ema.state_dict()["small"] > start).all()  # steps of 0.001 would be lost in bfloat16


def test_tied_weights_are_averaged_once_and_named_twice():
    net, ema = new(ema_decay=0.5)
    before = net.embed.weight.detach().clone()
    disturb(net, 1)
    ema.update(net, 1)
    state = ema.state_dict()
    assert state["embed.weight"] is state["out.weight"]
    torch.testing.assert_close(state["out.weight"], (before + net.embed.weight.detach()) / 2)


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_an_average_that_is_saved_and_restored_goes_on_bit_by_bit(stop, tmp_path):
    settings = dict(ema_decay=0.9, ema_update_freq=2, ema_start_update=3, ema_warmup=True)
    net, ema = new(**settings)
    other_net, other = new(**settings)
    for update in range(1, 9):
        disturb(net, update)
        ema.update(net, update)
        disturb(other_net, update)
        other.update(other_net, update)
        if update == stop:
            torch.save({"ema": other.state_dict(), "model": other_net.state_dict()}, tmp_path / "a.pt")
            saved = torch.load(tmp_path / "a.pt", weights_only=True)
            other_net, other = new(**settings)
            other_net.load_state_dict(saved["model"])
            report = other.restore(saved["ema"], plain_copy)
            assert not report.missing and not report.unexpected
    assert all(torch.equal(a, b) for a, b in zip(ema.state_dict().values(), other.state_dict().values()))


def test_the_decay_depends_on_num_updates_alone():
    cfg = EMAConfig(ema_decay=0.99, ema_update_freq=2, ema_start_update=4, ema_warmup=True)
    assert [decay_at(cfg, n) for n in (1, 2, 3, 4, 6)] == [None, 0.0, None, 1 / 10, 3 / 12]
    assert decay_at(cfg, 10**6) == 0.99
    assert decay_at(EMAConfig(ema_decay=0.9), 1) == 0.9


def test_up_to_the_start_the_average_is_a_copy():
    net, ema = new(ema_decay=0.9, ema_start_update=5)
    for update in (1, 2, 3, 4):
        disturb(net, update)
        ema.update(net, update)
    assert torch.equal(ema.state_dict()["embed.weight"], net.embed.weight)


def test_swapping_exchanges_memory_and_comes_back_after_an_exception():
    net, ema = new(ema_decay=0.5)
    disturb(net, 1)
    ema.update(net, 1)
    trained = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    address, averaged = net.embed.weight.data_ptr(), ema.state_dict()["embed.weight"].data_ptr()
    with pytest.raises(KeyboardInterrupt):
        with ema.swapped_in(net):
            assert net.embed.weight.data_ptr() == net.out.weight.data_ptr() == averaged
            assert net.small.dtype == torch.bfloat16
            saved = ema.training_state_dict(net)
            assert all(torch.equal(saved[name], trained[name]) for name in trained)
            assert saved["out.weight"].data_ptr() == address
            with ema.swapped_in(net):
                assert net.embed.weight.data_ptr() == averaged
            assert net.embed.weight.data_ptr() == averaged
            with pytest.raises(RuntimeError, match="swapped"):
                ema.update(net, 2)
            raise KeyboardInterrupt
    assert net.embed.weight.data_ptr() == net.out.weight.data_ptr() == address
    assert all(torch.equal(tensor, trained[name]) for name, tensor in ema.training_state_dict(net).items())
    ema.update(net, 2)


def test_an_optimizer_goes_on_with_the_trained_weights_after_a_swap():
    net, ema = new()
    optimizer = torch.optim.SGD([net.embed.weight], lr=1.0)
    with ema.swapped_in(net), torch.no_grad():
        net.eval()(torch.tensor([0, 1]))
    net(torch.tensor([0, 1, 2])).square().sum().backward()
    before = net.embed.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, net.embed.weight)
    assert torch.equal(ema.state_dict()["embed.weight"], before)


@pytest.mark.parametrize("saved", [None, {}])
def test_a_file_without_ema_is_continued_from_the_loaded_weights(saved):
    net, ema = new()
    disturb(net, 1)  # the load
    report = ema.restore(saved, plain_copy)
    assert torch.equal(ema.state_dict()["embed.weight"], net.embed.weight)
    assert "embed.weight" in report.missing and "current weights" in " ".join(report.lines())


def test_missing_and_unexpected_names_are_listed():
    net, ema = new()
    saved = {name: tensor.clone() + 1 for name, tensor in ema.state_dict().items() if tensor.dtype != torch.bool}
    saved["elsewhere"] = torch.ones(1)
    del saved["norm.bias"], saved["embed.weight"]  # the second name of a tied weight is enough
    report = ema.restore(saved, plain_copy)
    assert (sorted(report.missing), report.unexpected) == (["mask", "norm.bias"], ["elsewhere"])
    assert torch.equal(ema.state_dict()["embed.weight"], saved["out.weight"])


def test_a_parameter_of_another_shape_is_an_error_that_names_it():
    net, ema = new()
    saved = dict(ema.state_dict()) | {"norm.weight": torch.ones(4)}
    with pytest.raises(ConfigError, match=r"norm\.weight: \[4\] in the file, \[3\] here"):
        ema.restore(saved, plain_copy)


def test_buffers_resume_whatever_their_shape_and_may_be_new():
    net, ema = new()
    net.late = torch.ones(3)
    assert torch.equal(ema.state_dict()["late"], torch.ones(3))
    net.late = torch.full((4,), 2.0)
    ema.update(net, 1)
    assert torch.equal(ema.state_dict()["late"], net.late)
    fresh_net, fresh = new()
    fresh_net.late = torch.zeros(2)
    fresh.restore(ema.state_dict(), plain_copy)
    assert torch.equal(fresh.state_dict()["late"], net.late)


def test_the_section_can_be_an_omegaconf_node_and_names_its_problems():
    net, _ = new()
    assert EMA(net, OmegaConf.structured(EMAConfig(ema_decay=0.5))).cfg.ema_decay == 0.5
    assert not EMAConfig().problems()
    bad = EMAConfig(ema_decay=1.5, ema_update_freq=0, ema_start_update=-1, ema_validate=True).problems()
    assert [key in problem for key, problem in zip(("decay", "freq", "start", "validate"), bad)] == [True] * 4
