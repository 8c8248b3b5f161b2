"""The optimizer: built from a config node, clipped, its state written and read by parameter name.

Owns: parameter groups by pattern, which implementation (fused or not) runs, and the layout of the optimizer's state in
a checkpoint. State is matched by name, keeps its saved dtype, and hyperparameters are never taken from a file.
Must not know: the Trainer, files, the schedule (it only finds `lr_scale` in each group).
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer import sharding
from trainer.errors import ConfigError
from trainer.targets import get_target, nearest

Copy = Callable[[list[tuple[Any, Tensor]]], None]

# Which kernel computes a step is a setting of this run. It is in no group of a config and in no override.
IMPLEMENTATION_KEYS = ("fused", "foreach", "capturable", "differentiable")
# State that has one element for each element of its parameter, under the names of torch.optim and its imitators.
ELEMENTWISE_STATE = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf exp_avg_diff momentum_buffer sum square_avg grad_avg acc_delta prev"
    " step_size ax previous_grad".split()
)
# Counters that torch keeps on the host unless the implementation is capturable or fused.
HOST_SCALARS = frozenset({"step", "mu_product"})


LARGE_GRADIENT = 1 << 16  # elements from which a norm is taken row by row
NORM_ROW = 1024

# ---------------------------------------------------------------------------------------------------- config nodes


def plain_node(node: Any, section: str) -> dict[str, Any]:
    """A config node as plain containers; `section` is its name in error messages."""
    if node is not None and type(node) is not dict:
        from omegaconf import OmegaConf

        if OmegaConf.is_config(node):
            node = OmegaConf.to_container(node, resolve=True)
    if not isinstance(node, Mapping) or not node.get("_target_"):
        raise ConfigError(f"{section} needs a _target_, the class to build (got {node!r}).")
    return dict(node)


def known_names(names: Iterable[str]) -> str:
    """The end of a sentence about a name that is like none of `names`."""
    return f" Known: {', '.join(sorted(names))}."


def checked_fields(cls: type, given: Mapping[str, Any], skip: Collection[str], section: str) -> dict[str, Any]:
    """The fields of a node as keyword arguments of `cls`, whose signature is their schema.

    Unknown keys, missing ones and values of another type raise one ConfigError that lists them all. Numbers written as
    text ("1e-4") become numbers and lists become tuples.
    """
    parameters = inspect.signature(cls).parameters
    known = {n: p for n, p in parameters.items() if n not in skip and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    takes_anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    problems, fields = [], {}
    for name, value in given.items():
        if name not in known and not takes_anything:
            hint = nearest(name, known) or known_names(known)
            problems.append(f"{section}.{name} is unknown to {cls.__name__}.{hint}")
            continue
        try:
            fields[name] = _typed(value, known.get(name))
        except ValueError as error:
            problems.append(f"{section}.{name}={value!r}: {error}.")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in given:
            problems.append(f"{section}.{name} is needed by {cls.__name__}.")
    if problems:
        raise ConfigError(" ".join(problems))
    return fields


def _typed(value: Any, parameter: inspect.Parameter | None) -> Any:
    if isinstance(value, (list, tuple)):
        usual = parameter.default if parameter is not None else None
        if isinstance(usual, tuple) and len(usual) != len(value):
            raise ValueError(f"expected {len(usual)} values, such as {list(usual)}")
        return tuple(_typed(item, None) for item in value)
    annotation = parameter.annotation if parameter is not None else ""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    types = set(re.findall(r"\b(?:int|float|bool|str|None|NoneType)\b", text))
    numeric = types & {"int", "float"}
    if isinstance(value, str) and "str" not in types:
        try:
            value = int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value)
        except ValueError:
            if numeric or "bool" in types:
                raise ValueError(f"expected {' or '.join(sorted(types))}") from None
    if not types or "str" in types:
        return value
    if value is None and types.isdisjoint({"None", "NoneType"}) and parameter.default is not None:
        raise ValueError(f"expected {' or '.join(sorted(types))}")
    if isinstance(value, bool) and "bool" not in types or types == {"bool"} and not isinstance(value, bool):
        raise ValueError(f"expected {' or '.join(sorted(types))}")
    if isinstance(value, float) and numeric == {"int"}:
        if not value.is_integer():
            raise ValueError("expected a whole number")
        return int(value)
    return value


# ---------------------------------------------------------------------------------------------------- building


def build_optimizer(node: Any, named_parameters: Iterable[tuple[str, Tensor]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of a config node, with one group for each entry of `groups` and one for all other parameters.

    Args:
        node: `_target_` (a torch.optim.Optimizer class), its constructor's fields, and
            `groups: [{pattern, lr_scale, weight_decay, …}]`: a parameter joins the first group whose pattern
            `re.search` finds in its name. `fused: null` takes the fused kernel where it works.
        named_parameters: canonical names; frozen parameters are left out, shared ones are taken once.
        lr: optimization.lr. Each group holds `lr_scale`, by which schedules multiply.
    Raises: ConfigError, which names the key.
    """
    fields = plain_node(node, "optimizer")
    cls = get_target(fields.pop("_target_"), torch.optim.Optimizer, "optimizer._target_")
    _refuse_unusable(cls)
    if "lr" in fields:
        raise ConfigError("optimizer.lr is not a field: the learning rate is optimization.lr.")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise ConfigError(f"optimization.lr must be a number (got {lr!r}).")
    specs = [_checked_group(spec, index) for index, spec in enumerate(fields.pop("groups", None) or ())]
    fields = checked_fields(cls, fields, ("self", "params", "lr"), "optimizer")
    groups = _grouped(list(named_parameters), specs)
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    if not parameters:
        raise ConfigError("There is nothing to train: no parameter requires a gradient.")
    for group in groups:
        group["lr"] = float(lr) * group["lr_scale"]
    fields.update(_fused_field(cls, fields, parameters, lr))
    optimizer = _construct(cls, groups, float(lr), fields)
    _check_group_keys(optimizer, specs)
    return optimizer


def _construct(cls: type, groups: list[dict], lr: float, fields: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        return cls(groups, **({"lr": lr} if "lr" in inspect.signature(cls).parameters else {}), **fields)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise ConfigError(f"optimizer: {cls.__name__} refuses these settings: {error}") from error


def _refuse_unusable(cls: type) -> None:
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"optimizer {cls.__name__} evaluates the loss several times in a step (it needs a closure); an update here"
            " has one gradient. Choose another, such as optimizer=adamw."
        )
    if cls is torch.optim.SparseAdam:
        raise ConfigError("optimizer SparseAdam needs sparse gradients, which are not supported. Try optimizer=adamw.")


def _checked_group(spec: Mapping[str, Any], index: int) -> dict[str, Any]:
    key = f"optimizer.groups[{index}]"
    if not isinstance(spec, Mapping) or not isinstance(spec.get("pattern"), str):
        raise ConfigError(f"{key} needs a pattern: a regular expression for parameter names (got {spec!r}).")
    if "lr" in spec:
        raise ConfigError(f"{key}.lr is not a field: give lr_scale, which multiplies the schedule.")
    try:
        re.compile(spec["pattern"])
    except re.error as error:
        raise ConfigError(f"{key}.pattern={spec['pattern']!r} is no regular expression: {error}.") from error
    spec = {name: value if name == "pattern" else _typed(value, None) for name, value in spec.items()}
    scale = spec.setdefault("lr_scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 <= scale < float("inf"):
        raise ConfigError(f"{key}.lr_scale must be a number, 0 or more (got {scale!r}).")
    return spec


def _grouped(named_parameters: list[tuple[str, Tensor]], specs: list[dict]) -> list[dict[str, Any]]:
    """Groups in the order typed, after the group of what no pattern took; a group with nothing to train is left out."""
    groups = [{"params": [], "lr_scale": 1.0}]
    groups += [{"params": []} | {k: v for k, v in spec.items() if k != "pattern"} for spec in specs]
    matched, seen = set(), set()
    for name, parameter in named_parameters:
        index = next((i for i, spec in enumerate(specs, start=1) if re.search(spec["pattern"], name)), 0)
        matched.add(index)
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            groups[index]["params"].append((name, parameter))
    names = [name for name, _ in named_parameters]
    for index, spec in enumerate(specs, start=1):
        if index not in matched:
            taken = any(re.search(spec["pattern"], name) for name in names)
            why = "every parameter that it matches is taken by an earlier group" if taken else "it matches no parameter"
            raise ConfigError(
                f"optimizer.groups[{index - 1}].pattern={spec['pattern']!r}: {why}."
                + ("" if taken else f" The first names are {', '.join(names[:5])}.")
            )
    return [group for group in groups if group["params"]]


def _check_group_keys(optimizer: torch.optim.Optimizer, specs: list[dict]) -> None:
    known = set(optimizer.defaults) - set(IMPLEMENTATION_KEYS) - {"lr"}
    for index, spec in enumerate(specs):
        for key in spec.keys() - {"pattern", "lr_scale"} - known:
            raise ConfigError(
                f"optimizer.groups[{index}].{key} is no hyperparameter of {type(optimizer).__name__}."
                + (nearest(key, known | {"lr_scale"}) or known_names(known | {"lr_scale"}))
            )


def _fused_field(cls: type, fields: dict[str, Any], parameters: list[Tensor], lr: float) -> dict[str, bool]:
    """What `fused` shall be. Left null it is on wherever a step of one element works with these devices and dtypes."""
    if "fused" not in inspect.signature(cls).parameters or fields.get("fused") is False:
        return {}
    typed = bool(fields.get("fused"))
    if not typed and (fields.get("foreach") or fields.get("differentiable")):
        return {}
    if not typed and cls is torch.optim.SGD and fields.get("momentum"):
        return {}  # torch's fused SGD raises where one parameter's first gradient comes later than another's
    for device, dtype in {(p.device, p.dtype) for p in parameters}:
        problem = _fused_problem(cls, fields, device, dtype, lr)
        if problem and typed:
            raise ConfigError(f"optimizer.fused=true does not work with {dtype} on {device}: {problem}")
        if problem:
            return {}
    return {"fused": True}


def _fused_problem(cls: type, fields: dict[str, Any], device: torch.device, dtype: torch.dtype, lr: float) -> str:
    if device.type == "meta":
        return "parameters have no memory yet"
    probe = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
    probe.grad = torch.zeros_like(probe)
    try:
        cls([probe], lr=lr, **(fields | {"fused": True})).step()
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return ""


def name_parameters(optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Give the groups of an optimizer that a task built itself the `param_names` that its saved state is matched by."""
    names = {id(parameter): name for name, parameter in named_parameters}
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise ConfigError(
                f"build_optimizer took {len(unknown)} tensors that the model does not have (shapes {unknown[:3]})."
            )
        group["param_names"] = [names[id(p)] for p in group["params"]]
        group.setdefault("lr_scale", 1.0)


# ---------------------------------------------------------------------------------------------------- clipping


def clip_grad_norm(tensors: Iterable[Tensor], max_norm: float, norm: Tensor | None = None) -> Tensor:
    """Scale all gradients so that their joint L2 norm is at most `max_norm`.

    Args:
        tensors: either parameters (those without a gradient are skipped) or gradients themselves, such as the flat
            buffers that all gradients are views of. Any shape, any float dtype.
        max_norm: 0 turns clipping off; the norm is still computed.
        norm: that of all gradients, where `tensors` are only this rank's part of them.
    Returns: the norm before clipping, float32 [], on the gradients' device; no accelerator is waited for.
        If it is not finite the gradients are left as they are.
    Source:  Pascanu et al. 2013, arXiv:1211.5063.
    """
    tensors = list(tensors)
    if tensors and (tensors[0].requires_grad or isinstance(tensors[0], Parameter)):
        grads = [grad for parameter in tensors if (grad := parameter.grad) is not None]
    else:
        grads = tensors
    if norm is None:
        norm = total_norm(grads)
    if max_norm > 0 and grads:
        _scale_to(grads, norm, max_norm)
    return norm


@torch.no_grad()
def total_norm(grads: list[Tensor]) -> Tensor:
    """The joint L2 norm, float32 [] on the device of the gradients; 0 of none."""
    if not grads:
        return torch.zeros((), dtype=torch.float32)
    try:
        return _total_norm(grads).detach()
    except (RuntimeError, NotImplementedError):
        if any(g.layout is not torch.strided for g in grads):
            raise ConfigError("Sparse gradients are not supported: build the embedding with sparse=False.") from None
        raise


def _total_norm(grads: list[Tensor]) -> Tensor:
    grads = [_in_rows(grad) for grad in grads]
    first = grads[0]
    if all(g.dtype is torch.float32 for g in grads):
        norms = torch._foreach_norm(grads) if len(grads) > 1 else [torch.linalg.vector_norm(first)]
    else:  # halves would overflow at 65504 and lose digits; complex numbers and doubles have norms of their own dtype
        norms = [torch.linalg.vector_norm(g, dtype=_norm_dtype(g)).float() for g in grads]
    if first.is_cuda:  # elsewhere all gradients share a device; asking each norm for its own costs as much as stacking
        norms = [norm.to(first.device) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def _norm_dtype(grad: Tensor) -> torch.dtype | None:
    return torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None


def _in_rows(grad: Tensor) -> Tensor:
    """`grad`, or the norms of its rows where it is large: torch's CPU kernel adds squares up one after the other.

    In float32 the norm of ten million elements was off by 4e-4 in one go, by 2e-7 in rows.
    """
    if grad.numel() < LARGE_GRADIENT or grad.device.type != "cpu":
        return grad
    flat = grad.detach().reshape(-1)
    end = flat.numel() // NORM_ROW * NORM_ROW
    norms = torch.linalg.vector_norm(flat[:end].view(-1, NORM_ROW), dim=1, dtype=_norm_dtype(grad))
    rest = torch.linalg.vector_norm(flat[end:], dtype=_norm_dtype(grad)).reshape(1)
    return _in_rows(torch.cat([norms, rest]))


@torch.no_grad()
def _scale_to(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    if norm.device.type == "cpu":
        if norm.item() < 0.999 * max_norm:
            return
        # In the norm's own precision: then the bits are those of torch.nn.utils.clip_grad_norm_.
        coefficient = (max_norm / (norm + 1e-6)).item()
        if 0 < coefficient < 1:
            torch._foreach_mul_(grads, coefficient)
        return
    coefficient = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    coefficient = torch.where(norm.isfinite(), coefficient, torch.ones_like(coefficient))
    by_kind: dict[tuple, list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), same in by_kind.items():
        torch._foreach_mul_(same, coefficient.to(device))


# ---------------------------------------------------------------------------------------------------- state


@dataclass
class OptimizerReport:
    """What `restore_optimizer_state` did, by parameter name."""

    restored: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)  # unknown to the file, or excluded: moments start at zero
    dropped: list[str] = field(default_factory=list)  # state in the file whose parameter is not trained here
    by_order: bool = False  # the file has no names: matched by position

    def lines(self) -> list[str]:
        lines = [f"optimizer: moments of {len(self.restored)} parameters restored"]
        if self.by_order:
            lines[0] += ", matched by position (the file names none)"
        for what, names in (("start fresh", self.fresh), ("in the file are not used", self.dropped)):
            if names:
                more = f" and {len(names) - 10} more" if len(names) > 10 else ""
                lines.append(f"optimizer: moments that {what}: {', '.join(names[:10])}{more}")
        return lines


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state in torch's layout, `param_names` in each group. Tensors are the live ones, not copies.

    Where a parameter is sharded, so is its elementwise state: a ShardedTensor of the whole parameter's shape.
    """
    index: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        packed = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        packed["params"] = [index.setdefault(id(parameter), len(index)) for parameter in group["params"]]
        if "param_names" in group or not group["params"]:
            packed["param_names"] = list(group.get("param_names", ()))
        groups.append(packed)
    state = {}
    for key, value in optimizer.state.items():
        if isinstance(key, Tensor):
            if id(key) in index:  # state of a parameter that has left the groups belongs to no name
                state[index[id(key)]] = _described(value, key, optimizer)
        else:
            state[key] = value
    return {"state": dict(sorted(state.items(), key=lambda item: str(item[0]).zfill(9))), "param_groups": groups}


def _described(entry: Mapping[str, Any], parameter: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of one parameter, with a description in place of each tensor that this rank holds a part of."""
    placement = sharding.placement_of(parameter)
    if placement is None:
        return dict(entry)
    cut = elementwise_names(optimizer)
    return {
        key: sharding.described(value, placement if key in cut and value.shape == parameter.shape else None)
        if isinstance(value, Tensor)
        else value
        for key, value in entry.items()
    }


def elementwise_names(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The names of the state that has one element for each element of its parameter."""
    return getattr(optimizer, "elementwise_state", ELEMENTWISE_STATE)


def fresh_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict]:
    """The state of an optimizer that has made no step: nothing, but for classes whose constructor makes some."""
    if not optimizer.state:
        return {}
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in optimizer.param_groups]
    try:
        return dict(type(optimizer)(groups, **settings).state)
    except (TypeError, ValueError, RuntimeError):
        return {}  # a class that cannot be built from its defaults


def moments_per_parameter(optimizer: torch.optim.Optimizer) -> tuple[float, int]:
    """What an update leaves behind, by trial: bytes for each byte of parameters, and tensors for each parameter.

    (0.0, 0) for what cannot be tried.
    """
    cls = getattr(optimizer, "whole_class", type(optimizer))  # a share of a bucket is no parameter to try
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones_like(parameter)
    accepted = inspect.signature(cls).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    try:
        trial = cls([parameter], **settings)
        trial.step()
        kept = [value for value in trial.state[parameter].values() if isinstance(value, Tensor)]
    except Exception:  # whatever a class of somebody else's raises: the number is for a line of the log
        return 0.0, 0
    return sum(value.numel() * value.element_size() for value in kept) / (4 * parameter.numel()), len(kept)


def restore_optimizer_state(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    copy: Copy,
    excluded: Collection[str] = (),
    model_order: Sequence[str] | None = None,
) -> OptimizerReport:
    """Give the optimizer the state of a file, by parameter name. Hyperparameters stay those of this run.

    Args:
        saved: torch's layout, tensors or references to them (anything with dtype and shape that `copy` understands).
        copy: called once with (saved, target) pairs; the target is a tensor, or a ShardedTensor where the parameter
            is sharded and the state elementwise.
        excluded: names of parameters that were not loaded; they start fresh whatever the file has.
        model_order: the trained parameters in the model's order, for files that have indices but no names.
    Raises: ConfigError for a state whose shape does not fit its parameter. Nothing is changed then.
    """
    at_first = fresh_state(optimizer)
    targets = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            targets[name] = (parameter, group)
    report = OptimizerReport()
    by_index = {int(k) if str(k).isdigit() else k: v for k, v in saved["state"].items()}
    names, report.by_order = _saved_names(saved["param_groups"], list(targets), model_order, optimizer)
    known = {name: by_index.pop(index) for index, name in names.items() if index in by_index}
    _check_shapes(known, targets, excluded)
    pairs: list[tuple[Any, Tensor]] = []
    state = {}
    for name, (parameter, group) in targets.items():
        if name in known and name not in excluded:
            old = optimizer.state.get(parameter, {})
            state[parameter] = _prepared(known[name], old, parameter, group, optimizer, pairs)
            report.restored.append(name)
        elif name not in names.values() or name in excluded:
            report.fresh.append(name)
        if parameter not in state and parameter in at_first:
            state[parameter] = at_first[parameter]
    report.dropped = [name for name in known if name not in targets]
    optimizer.state.clear()
    optimizer.state.update(state)
    optimizer.state.update({key: value for key, value in by_index.items() if isinstance(key, str)})
    if pairs:
        copy(pairs)
    # A class that keeps a counter as a tensor, but whose state was saved when it was a number, mends that itself here.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    return report


def _saved_names(
    groups: Sequence[Mapping], targets: list[str], model_order: Sequence[str] | None, optimizer: torch.optim.Optimizer
) -> tuple[dict[int, str], bool]:
    """Index in the file -> parameter name, and whether it had to be found by position."""
    indices = [index for group in groups for index in group["params"]]
    if all("param_names" in group or not group["params"] for group in groups):
        names = [name for group in groups for name in group.get("param_names", ())]
        return dict(zip(indices, names, strict=True)), False
    sizes, own = [len(g["params"]) for g in groups], [len(g["params"]) for g in optimizer.param_groups]
    if sizes == own and (len(sizes) > 1 or model_order is None):
        return dict(zip(indices, targets)), True
    if model_order is not None and len(model_order) == len(indices) and len(groups) == 1:
        return dict(zip(indices, model_order)), True
    raise ConfigError(
        f"The optimizer state of the file has no parameter names, and its groups of {sizes} parameters do not fit the"
        f" groups of {own} here. To go on without the saved moments, add: checkpoint.reset_optimizer=true"
    )


def _check_shapes(known: Mapping[str, Mapping], targets: Mapping[str, tuple], excluded: Collection[str]) -> None:
    problems = []
    for name, entry in known.items():
        if name not in targets or name in excluded:
            continue
        shape = tuple(sharding.whole_shape(targets[name][0]))
        for key, value in entry.items():
            expected = _expected_shape(key, shape)
            if expected is not None and hasattr(value, "shape") and tuple(value.shape) != expected:
                problems.append(f"{name}: {key} {list(value.shape)} in the file, {list(expected)} here")
    if problems:
        more = f" (and {len(problems) - 10} more)" if len(problems) > 10 else ""
        raise ConfigError(
            f"The saved optimizer state does not fit the parameters: {'; '.join(problems[:10])}{more}."
            " To go on without the saved moments, add: checkpoint.reset_optimizer=true"
        )


def _expected_shape(key: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that torch's own optimizers give this state; None if we cannot know (another's optimizer)."""
    if key in ELEMENTWISE_STATE or key == "variance":
        return shape
    if key == "row_var" and len(shape) > 1:
        return (*shape[:-1], 1)
    if key == "col_var" and len(shape) > 1:
        return (*shape[:-2], 1, shape[-1])
    return None


def _prepared(saved: Mapping, old: Mapping, parameter: Tensor, group: Mapping, optimizer: Any, pairs: list) -> dict:
    """State for one parameter: memory for each tensor (noted in `pairs`), everything else taken as it is."""
    ours = {}
    for key, value in saved.items():
        if _is_tensor(value) and key in HOST_SCALARS and not len(value.shape):
            ours[key] = _counter(value, parameter, group, optimizer)
            pairs.append((value, ours[key]))
        else:
            cut = key in elementwise_names(optimizer)
            ours[key] = _nest(value, old.get(key), parameter, pairs, cut)
    return ours


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _counter(value: Any, parameter: Tensor, group: Mapping, optimizer: torch.optim.Optimizer) -> Tensor:
    on_device = group.get("capturable") or group.get("fused")
    dtype = value.dtype
    if type(optimizer).__module__.startswith("torch.optim"):
        double = torch.get_default_dtype() is torch.float64 and not group.get("fused")
        dtype = torch.float64 if double else torch.float32
    return torch.empty((), dtype=dtype, device=parameter.device if on_device else "cpu")


def _nest(value: Any, old: Any, parameter: Tensor, pairs: list, elementwise: bool = False) -> Any:
    if _is_tensor(value):
        # A sharded parameter's state is sharded with it, if it has an element for each of the parameter's.
        alike = tuple(value.shape) == tuple(sharding.whole_shape(parameter))
        placement = sharding.placement_of(parameter) if alike and elementwise else None
        shape = tuple(parameter.shape) if placement is not None else tuple(value.shape)
        fits = (shape, value.dtype, parameter.device)
        if isinstance(old, Tensor) and (tuple(old.shape), old.dtype, old.device) == fits:
            target = old
        elif shape == tuple(parameter.shape):
            target = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        else:
            target = torch.empty(shape, dtype=value.dtype, device=parameter.device)
        pairs.append((value, sharding.described(target, placement)))
        return target
    if isinstance(value, Mapping):
        return {key: _nest(item, None, parameter, pairs) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_nest(item, None, parameter, pairs) for item in value)
    return value


# ---------------------------------------------------------------------------------------------------- overrides


def parse_overrides(value: Any) -> dict[str, Any]:
    """`checkpoint.optimizer_overrides` as a dictionary: a mapping, or fairseq's text form, read as a literal only."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ConfigError(
                f"checkpoint.optimizer_overrides={value!r} is no literal mapping; write {{weight_decay: 0.1}}."
            ) from error
    elif not isinstance(value, Mapping):
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"checkpoint.optimizer_overrides must map names to values (got {value!r}).")
    return dict(value)


def apply_optimizer_overrides(optimizer: torch.optim.Optimizer, overrides: Any) -> float | None:
    """Set hyperparameters in all groups, as fairseq does, or none of them if one is refused.

    Returns: the new base learning rate where `lr` is among the overrides (the schedule's business), else None.
    """
    overrides = parse_overrides(overrides)
    lr = overrides.pop("lr", None)
    if isinstance(lr, (list, tuple)) and len(lr) == 1:
        lr = lr[0]
    if lr is not None and (isinstance(lr, bool) or not isinstance(lr, (int, float))):
        raise ConfigError(f"checkpoint.optimizer_overrides: lr must be a number (got {lr!r}).")
    known = set(optimizer.defaults) - set(IMPLEMENTATION_KEYS) - {"lr"}
    values = {}
    for key, value in overrides.items():
        if key in IMPLEMENTATION_KEYS and key in optimizer.defaults:
            raise ConfigError(
                f"checkpoint.optimizer_overrides: {key} is a setting of this run; type optimizer.{key}={value}."
            )
        if key not in known:
            raise ConfigError(
                f"checkpoint.optimizer_overrides: {key} is no hyperparameter of {type(optimizer).__name__}."
                + (nearest(key, known | {"lr"}) or known_names(known | {"lr"}))
            )
        values[key] = _typed(value, None)
    _check_values(optimizer, values)
    for group in optimizer.param_groups:
        group.update(values)
    return None if lr is None else float(lr)


def _check_values(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Let the class itself judge new hyperparameters, by building one of a single element with them."""
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {k: v for k, v in (optimizer.defaults | values).items() if k in accepted}
    try:
        type(optimizer)([torch.zeros(1, requires_grad=True)], **settings)
    except (ValueError, TypeError) as error:
        name = type(optimizer).__name__
        raise ConfigError(f"checkpoint.optimizer_overrides: {name} refuses them: {error}") from error
