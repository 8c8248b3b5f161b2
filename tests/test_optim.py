"""The optimizer is what the node says, and its state survives by name, dtype and place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from trainer.errors import ConfigError
from trainer.optim import (
    apply_optimizer_overrides,
    build_optimizer,
    clip_grad_norm,
    name_parameters,
    optimizer_state,
    parse_overrides,
    restore_optimizer_state,
)

ADAMW = {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.98], "weight_decay": 0.1}
NODES = {
    "adamw": ADAMW,
    "adamw single": ADAMW | {"fused": False, "foreach": False, "amsgrad": True},
    "adam": {"_target_": "torch.optim.Adam"},
    "sgd": {"_target_": "torch.optim.SGD"},
    "sgd momentum": {"_target_": "torch.optim.SGD", "momentum": 0.9},
    "adafactor": {"_target_": "torch.optim.Adafactor"},
    "nadam": {"_target_": "torch.optim.NAdam"},
    "adagrad": {"_target_": "torch.optim.Adagrad"},
    "asgd": {"_target_": "torch.optim.ASGD"},
    "rprop": {"_target_": "torch.optim.Rprop"},
    "rmsprop": {"_target_": "torch.optim.RMSprop", "momentum": 0.9, "centered": True},
}
GROUPS = [{"pattern": "bias$", "weight_decay": 0.0}, {"pattern": r"^2\.", "lr_scale": 0.5}]


def plain_copy(pairs):
    for source, target in pairs:
        target.copy_(source)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def train(net, optimizer, updates, skip=()):
    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    for _ in range(updates):
        optimizer.zero_grad(set_to_none=True)
        net(x).square().sum().backward()
        for name, parameter in net.named_parameters():
            if name in skip:
                parameter.grad = None
        optimizer.step()


def same_state(a, b):
    assert a["state"].keys() == b["state"].keys()
    for index in a["state"]:
        assert a["state"][index].keys() == b["state"][index].keys()
        for key, value in a["state"][index].items():
            other = b["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.device, value.shape) == (other.dtype, other.device, other.shape), key
                assert torch.equal(value, other), key
            else:
                assert value == other, key


def through_a_file(state, path):
    torch.save(state, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("skip", [(), ("2.bias",)], ids=["", "one without gradient"])
def test_a_restored_optimizer_goes_on_bit_by_bit(name, skip, tmp_path):
    node = NODES[name] | {"groups": [{"pattern": r"^2\.", "lr_scale": 0.5}]}
    through = model()
    optimizer = build_optimizer(node, through.named_parameters(), 0.01)
    train(through, optimizer, 3, skip)
    saved = through_a_file({"model": through.state_dict(), "optimizer": optimizer_state(optimizer)}, tmp_path / "a.pt")
    resumed = model()
    resumed.load_state_dict(saved["model"])
    other = build_optimizer(node, resumed.named_parameters(), 0.01)
    report = restore_optimizer_state(other, saved["optimizer"], plain_copy)
    assert (report.fresh, report.dropped) == ([], [])
    same_state(optimizer_state(other), saved["optimizer"])
    train(through, optimizer, 3)
    train(resumed, other, 3)
    assert all(torch.equal(a, b) for a, b in zip(through.parameters(), resumed.parameters()))
    same_state(optimizer_state(other), optimizer_state(optimizer))


def test_the_saved_layout_is_torchs_own_with_names():
    net = model()
    optimizer = build_optimizer(ADAMW | {"groups": GROUPS}, net.named_parameters(), 0.01)
    train(net, optimizer, 2)
    theirs, ours = optimizer.state_dict(), optimizer_state(optimizer)
    same_state(theirs, ours)
    assert [g["params"] for g in ours["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
    assert [g["param_names"] for g in ours["param_groups"]] == [
        ["0.weight", "3.weight", "4.weight"],
        ["0.bias", "2.bias", "3.bias", "4.bias"],
        ["2.weight"],
    ]
    torch.optim.AdamW(net.parameters()).state_dict()
    plain = torch.optim.AdamW([{"params": g["params"]} for g in optimizer.param_groups])
    plain.load_state_dict(ours)  # torch itself takes it


def test_the_first_matching_group_wins_and_each_has_its_hyperparameters():
    optimizer = build_optimizer(ADAMW | {"groups": GROUPS}, model().named_parameters(), 0.01)
    rest, biases, second = optimizer.param_groups
    assert (rest["weight_decay"], biases["weight_decay"], second["weight_decay"]) == (0.1, 0.0, 0.1)
    assert (rest["lr"], biases["lr"], second["lr"]) == (0.01, 0.01, 0.005)
    assert [group["lr_scale"] for group in optimizer.param_groups] == [1.0, 1.0, 0.5]
    assert all(group["betas"] == (0.9, 0.98) for group in optimizer.param_groups)


def test_state_goes_by_name_when_order_and_groups_differ():
    net = model()
    optimizer = build_optimizer(ADAMW, net.named_parameters(), 0.01)
    train(net, optimizer, 2)
    saved = optimizer_state(optimizer)
    backwards = list(net.named_parameters())[::-1]
    other = build_optimizer(ADAMW | {"groups": GROUPS}, backwards, 0.01)
    restore_optimizer_state(other, saved, plain_copy)
    for parameter in net.parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, other.state[parameter][key])


def test_new_parameters_start_fresh_and_vanished_ones_are_listed():
    net = model()
    optimizer = build_optimizer(ADAMW, net.named_parameters(), 0.01)
    train(net, optimizer, 2, skip=("4.bias",))
    saved = optimizer_state(optimizer)
    net[0].weight.requires_grad_(False)
    named = [(n.replace("3.", "norm."), p) for n, p in net.named_parameters()]
    other = build_optimizer(ADAMW, named, 0.01)
    report = restore_optimizer_state(other, saved, plain_copy)
    assert report.fresh == ["norm.weight", "norm.bias"]
    assert report.dropped == ["0.weight", "3.weight", "3.bias"]
    assert net[4].bias not in other.state and net[3].weight not in other.state  # no gradient yet; fresh
    assert report.restored == ["0.bias", "2.weight", "2.bias", "4.weight"]
    assert "norm.weight" in " ".join(report.lines()) and "0.weight" in " ".join(report.lines())
    train(net, other, 1)


def test_hyperparameters_are_those_of_this_run():
    net = model()
    optimizer = build_optimizer(ADAMW, net.named_parameters(), 0.01)
    train(net, optimizer, 1)
    other = build_optimizer(ADAMW | {"weight_decay": 0.3}, net.named_parameters(), 0.5)
    restore_optimizer_state(other, optimizer_state(optimizer), plain_copy)
    assert (other.param_groups[0]["weight_decay"], other.param_groups[0]["lr"]) == (0.3, 0.5)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.float64])
def test_moments_keep_their_saved_dtype(moments):
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = build_optimizer(ADAMW, [("w", parameter)], 0.01)
    ones = torch.ones(3, dtype=moments)
    entry = {"step": torch.tensor(7.0), "exp_avg": ones, "exp_avg_sq": ones.clone()}
    saved = {"state": {0: entry}, "param_groups": [{"params": [0], "param_names": ["w"]}]}
    restore_optimizer_state(optimizer, saved, plain_copy)
    assert optimizer.state[parameter]["exp_avg"].dtype == moments
    assert optimizer.state[parameter]["step"].dtype == torch.float32


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7), torch.tensor(7.0), torch.tensor(7.0, dtype=torch.float64)])
@pytest.mark.parametrize("implementation", [{"fused": True}, {"foreach": True}, {"fused": False, "foreach": False}])
def test_step_goes_where_the_implementation_wants_it(step, implementation):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(ADAMW | implementation, [("w", parameter)], 0.01)
    entry = {"step": step, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    saved = {"state": {0: entry}, "param_groups": [{"params": [0], "param_names": ["w"]}]}
    restore_optimizer_state(optimizer, saved, plain_copy)
    ours = optimizer.state[parameter]["step"]
    assert isinstance(ours, torch.Tensor) and ours.dtype == torch.float32 and ours.item() == 7
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 8


def test_implementations_are_settings_of_the_run_not_state_of_the_file():
    net = model()
    optimizer = build_optimizer(ADAMW | {"fused": True}, net.named_parameters(), 0.01)
    train(net, optimizer, 2)
    for implementation in ({"foreach": True}, {"fused": False, "foreach": False}, {"fused": True}):
        other = build_optimizer(ADAMW | implementation | {"maximize": True}, net.named_parameters(), 0.01)
        restore_optimizer_state(other, optimizer_state(optimizer), plain_copy)
        group = other.param_groups[0]
        assert {key: group[key] for key in implementation} == implementation and group["maximize"] is True
        train(net, other, 1)


def test_state_that_is_no_tensor_survives():
    class Odd(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    state.setdefault("history", [torch.zeros(2), torch.ones(1, dtype=torch.int64)])
                    state.setdefault("words", {"mode": "slow", "none": None})
            self.state["everybody"] = {"k": 3}

    parameter = nn.Parameter(torch.ones(3))
    optimizer = Odd([("w", parameter)])
    optimizer.step()
    other = Odd([("w", parameter)])
    restore_optimizer_state(other, optimizer_state(optimizer), plain_copy)
    state = other.state[parameter]
    assert (state["step"], state["words"]) == (1, {"mode": "slow", "none": None})
    assert [t.tolist() for t in state["history"]] == [[0, 0], [1]] and state["history"][1].dtype == torch.int64
    assert other.state["everybody"] == {"k": 3}


def test_a_wrong_shape_names_the_parameter_and_changes_nothing():
    net = model()
    optimizer = build_optimizer(ADAMW, net.named_parameters(), 0.01)
    train(net, optimizer, 1)
    saved = optimizer_state(optimizer)
    net[4] = nn.Linear(5, 7)
    other = build_optimizer(ADAMW, net.named_parameters(), 0.01)
    with pytest.raises(ConfigError, match=r"4\.weight: exp_avg \[3, 5\] in the file, \[7, 5\] here"):
        restore_optimizer_state(other, saved, plain_copy)
    assert not other.state
    report = restore_optimizer_state(other, saved, plain_copy, excluded=("4.weight", "4.bias"))
    assert report.fresh == ["4.weight", "4.bias"] and len(report.restored) == 6
    train(net, other, 1)


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_a_factored_state_of_another_shape_is_refused(name):
    parameter, other = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 8))
    optimizer = build_optimizer(NODES[name], [("w", parameter)], 0.01)
    parameter.grad = torch.ones(4, 6)
    optimizer.step()
    with pytest.raises(ConfigError, match="w: "):
        ours = build_optimizer(NODES[name], [("w", other)], 0.01)
        restore_optimizer_state(ours, optimizer_state(optimizer), plain_copy)


def test_files_without_names_are_matched_by_position_in_the_models_order():
    net = model()
    theirs = torch.optim.AdamW(net.parameters())
    train(net, theirs, 2)
    names = [name for name, _ in net.named_parameters()]
    ours = build_optimizer(ADAMW, net.named_parameters(), 0.01)
    assert restore_optimizer_state(ours, theirs.state_dict(), plain_copy).by_order
    grouped = build_optimizer(ADAMW | {"groups": GROUPS}, net.named_parameters(), 0.01)
    restore_optimizer_state(grouped, theirs.state_dict(), plain_copy, model_order=names)
    for parameter in net.parameters():
        for optimizer in (ours, grouped):
            assert torch.equal(optimizer.state[parameter]["exp_avg"], theirs.state[parameter]["exp_avg"])
    with pytest.raises(ConfigError, match="no parameter names"):
        restore_optimizer_state(grouped, theirs.state_dict(), plain_copy)


def test_restoring_twice_replaces_the_first_state_in_the_same_memory():
    net = model()
    optimizer = build_optimizer(ADAMW, net.named_parameters(), 0.01)
    train(net, optimizer, 1)
    saved = optimizer_state(optimizer)
    saved = {**saved, "state": {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()}}
    addresses = [optimizer.state[p]["exp_avg"].data_ptr() for p in net.parameters()]
    train(net, optimizer, 2)
    restore_optimizer_state(optimizer, saved, plain_copy)
    same_state(optimizer_state(optimizer), saved)
    assert [optimizer.state[p]["exp_avg"].data_ptr() for p in net.parameters()] == addresses


def test_memory_layout_of_moments_follows_the_parameter():
    parameter = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = build_optimizer(ADAMW, [("w", parameter)], 0.01)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = {"state": {0: {k: v.contiguous() for k, v in optimizer.state[parameter].items()}}}
    saved["param_groups"] = [{"params": [0], "param_names": ["w"]}]
    restore_optimizer_state(optimizer, saved, plain_copy)
    assert optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()


def test_empty_groups_survive():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": []}, {"params": [parameter]}], lr=0.1, momentum=0.9)
    name_parameters(optimizer, [("w", parameter)])
    parameter.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer_state(optimizer)
    assert [g["param_names"] for g in saved["param_groups"]] == [[], ["w"]]
    other = torch.optim.SGD([{"params": [parameter]}], lr=0.1, momentum=0.9)
    name_parameters(other, [("w", parameter)])
    assert restore_optimizer_state(other, saved, plain_copy).restored == ["w"]


def test_frozen_parameters_are_left_out_and_tied_ones_taken_once():
    net = model()
    net[0].weight.requires_grad_(False)
    named = [*net.named_parameters(), ("again.weight", net[2].weight)]
    optimizer = build_optimizer(ADAMW, named, 0.01)
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in net.named_parameters() if n != "0.weight"]


@pytest.mark.parametrize(
    "node, words",
    [
        (ADAMW | {"weight_decy": 0.1}, "weight_decy is unknown to AdamW. Did you mean weight_decay?"),
        (ADAMW | {"lr": 0.1}, "optimization.lr"),
        (ADAMW | {"betas": [0.9, 1.5]}, "AdamW refuses"),
        (ADAMW | {"eps": True}, "optimizer.eps=True: expected"),
        (ADAMW | {"groups": [{"pattern": "nothing"}]}, "'nothing': it matches no parameter"),
        (ADAMW | {"groups": [{"pattern": "."}, {"pattern": "bias"}]}, "'bias': every parameter that it matches is t"),
        (ADAMW | {"groups": [{"pattern": "("}]}, "no regular expression"),
        (ADAMW | {"groups": [{"weight_decay": 0}]}, "needs a pattern"),
        (ADAMW | {"groups": [{"pattern": "bias", "weigt_decay": 0}]}, "Did you mean weight_decay?"),
        (ADAMW | {"groups": [{"pattern": "bias", "lr": 0}]}, "lr_scale"),
        (ADAMW | {"groups": [{"pattern": "bias", "lr_scale": -1}]}, "0 or more"),
        ({"_target_": "torch.optim.AdmW"}, "Did you mean AdamW?"),
        ({"_target_": "torch.optim.LBFGS"}, "LBFGS evaluates the loss several times"),
        ({"_target_": "torch.optim.SparseAdam"}, "sparse"),
        ({"_target_": "torch.nn.Linear"}, "not a subclass of torch.optim"),
        ({}, "_target_"),
    ],
)
def test_impossible_settings_name_the_key(node, words):
    with pytest.raises(ConfigError, match=words):
        build_optimizer(node, model().named_parameters(), 0.01)


def test_nothing_to_train_is_said():
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(ADAMW, [("w", nn.Parameter(torch.ones(1), requires_grad=False))], 0.1)


def test_a_first_gradient_may_come_late():
    for node in NODES.values():
        net = model()
        optimizer = build_optimizer(node, net.named_parameters(), 0.01)
        train(net, optimizer, 1, skip=("2.bias",))
        train(net, optimizer, 1)


def test_fused_is_automatic_where_it_works_and_as_typed_otherwise():
    net = model()
    assert build_optimizer(ADAMW, net.named_parameters(), 0.1).param_groups[0]["fused"] is True
    assert not build_optimizer(ADAMW | {"fused": False}, net.named_parameters(), 0.1).param_groups[0]["fused"]
    assert not build_optimizer(ADAMW | {"foreach": True}, net.named_parameters(), 0.1).param_groups[0]["fused"]
    complex_parameter = [("c", nn.Parameter(torch.ones(2, dtype=torch.complex64)))]
    assert not build_optimizer(ADAMW, complex_parameter, 0.1).param_groups[0]["fused"]
    with pytest.raises(ConfigError, match="fused=true does not work with torch.complex64"):
        build_optimizer(ADAMW | {"fused": True}, complex_parameter, 0.1)


OPTIONS = sorted((Path(__file__).parents[1] / "configs/optimizer").glob("*.yaml"))


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: path.stem)
def test_every_option_of_the_group_builds_with_torchs_defaults(path):
    node = OmegaConf.load(path)
    optimizer = build_optimizer(node, model().named_parameters(), 0.01)
    plain = type(optimizer)([torch.zeros(1, requires_grad=True)])
    for key in set(node) - {"_target_", "groups", "fused"}:
        assert optimizer.defaults[key] == plain.defaults[key], key


# ---------------------------------------------------------------------------------------------------- clipping


def with_grads(shapes, dtype=torch.float32):
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float32).to(dtype)
    return parameters


@pytest.mark.parametrize("max_norm", [0, 0.5, 1e6])
def test_clipping_agrees_with_torch(max_norm):
    shapes = [(3, 4), (), (0,), (5,)]
    ours, theirs = with_grads(shapes), with_grads(shapes)
    norm = clip_grad_norm(ours + [nn.Parameter(torch.ones(2))], max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm or float("inf"))
    assert norm.dtype == torch.float32 and norm.shape == ()
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad)
        if max_norm != 0.5:
            assert torch.equal(a.grad, b.grad)


def test_a_norm_that_is_not_finite_leaves_the_gradients_alone():
    for bad in (float("nan"), float("inf"), float("-inf")):
        parameters = with_grads([(3,), (2, 2)])
        parameters[1].grad[0, 0] = bad
        before = [p.grad.clone() for p in parameters]
        assert not clip_grad_norm(parameters, 1.0).isfinite()
        assert all(torch.equal(a.nan_to_num(), p.grad.nan_to_num()) for a, p in zip(before, parameters))


def test_half_precision_gradients_have_a_float32_norm():
    parameters = with_grads([(64, 64)], torch.float16)
    parameters[0].grad.fill_(1000.0)
    norm = clip_grad_norm(parameters, 0)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(64000.0)
    mixed = with_grads([(3,)], torch.bfloat16) + with_grads([(3,)]) + with_grads([(3,)], torch.float64)
    assert clip_grad_norm(mixed, 0.1).dtype == torch.float32
    assert clip_grad_norm(mixed, 0).item() == pytest.approx(0.1, rel=1e-2)


def test_gradients_themselves_can_be_given():
    parameters = with_grads([(3, 4), (5,)])
    flat = torch.cat([p.grad.flatten() for p in parameters])
    expected = flat.norm()
    torch.testing.assert_close(clip_grad_norm([flat], 0.5), expected)
    torch.testing.assert_close(flat.norm(), torch.tensor(0.5))


def test_no_gradient_at_all_has_norm_zero():
    assert clip_grad_norm([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1), requires_grad=False)], 1.0) == 0


def test_sparse_gradients_are_refused_with_the_way_out():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        clip_grad_norm(list(embedding.parameters()) + with_grads([(2,)]), 1.0)
    with pytest.raises(ConfigError, match="sparse=False"):
        clip_grad_norm(list(embedding.parameters()), 1.0)


# ---------------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize("value", [{"weight_decay": 0.5}, "{'weight_decay': 0.5}"])
def test_overrides_are_a_mapping_or_fairseqs_text(value):
    optimizer = build_optimizer(ADAMW | {"groups": GROUPS}, model().named_parameters(), 0.01)
    assert apply_optimizer_overrides(optimizer, value) is None
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5] * 3


def test_an_overridden_lr_is_handed_to_the_schedule():
    optimizer = build_optimizer(ADAMW, model().named_parameters(), 0.01)
    assert apply_optimizer_overrides(optimizer, {"lr": [0.5], "betas": [0.5, 0.6]}) == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.param_groups[0]["betas"] == (0.5, 0.6)


@pytest.mark.parametrize(
    "value, words",
    [
        ({"weight_decy": 1}, "Did you mean weight_decay?"),
        ({"fused": False}, "type optimizer.fused=False"),
        ({"betas": [0.9, 7]}, "refuses"),
        ({"weight_decay": 0.3, "eps": -1}, "refuses"),
        ({"lr": "fast"}, "number"),
        ("__import__('os').getcwd()", "literal"),
        ("[1, 2]", "map names"),
        ({1: 2}, "map names"),
    ],
)
def test_bad_overrides_change_nothing(value, words):
    optimizer = build_optimizer(ADAMW, model().named_parameters(), 0.01)
    before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    with pytest.raises(ConfigError, match=words):
        apply_optimizer_overrides(optimizer, value)
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == before


def test_no_overrides_are_an_empty_mapping():
    assert parse_overrides(None) == parse_overrides("") == parse_overrides("{}") == parse_overrides({}) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [[(3_000_001,)], [(1500, 1000), (70_000,), (3,)], [(2048, 1024)]])
def test_the_norm_of_large_gradients_is_right_to_rounding(shapes, dtype):
    """Squares that are added up one after the other lose digits: four of seven at ten million elements."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if len(grads) == 1 and grads[0].dim() == 2:
        grads = [grads[0].t()]
    exact = torch.cat([grad.double().reshape(-1) for grad in grads]).norm().item()
    assert clip_grad_norm(grads, 0).item() == pytest.approx(exact, rel=5e-7)


@pytest.mark.parametrize("betas", [[], [0.9], [0.9, 0.99, 0.999]])
def test_a_list_of_the_wrong_length_is_refused_with_a_sentence(betas):
    parameters = [("weight", nn.Parameter(torch.zeros(3)))]
    with pytest.raises(ConfigError, match=r"optimizer.betas=.*expected 2 values"):
        build_optimizer({"_target_": "torch.optim.AdamW", "betas": betas}, parameters, 0.1)
