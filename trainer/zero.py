"""Optimizer state shared out over the data-parallel ranks: `distributed_training.zero_sharding=os`.

Owns: which range of each bucket a rank updates, the optimizer made to step that range alone, the exchange of what the
ranks updated, and the trial that tells whether an optimizer may be cut at all.
Must not know: the Trainer, files, losses.

The parameters of a bucket of the reducer become views of one flat buffer in the layout of its gradients. It is cut into
as many shares of equal size as there are ranks, and rank r owns the r-th. Each parameter has a shard on each rank, its
elements in the owned share (possibly none), and the optimizer's groups hold the shards instead of the parameters. So every rank's optimizer
has the same groups, names and state keys, and only the lengths differ. Source of the idea: Rajbhandari et al. 2020,
arXiv:1910.02054, stage 1; here the cut goes through flat buckets, not between whole tensors.
"""

from __future__ import annotations

import bisect
import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import distributed_utils
from trainer import optim
from trainer.data_parallel import Bucket, GradientReducer
from trainer.errors import ConfigError
from trainer.sharding import Placement

# Parameters are cut at multiples of it, so that kernels that walk vectors of elements meet the same vectors: the last few
# elements take another way, and the fused AdamW of torch 2.13 gave other bits for cuts between vectors.
CUT_BYTES = 128
PROBE_SHAPE = (5, 67)  # of the parameter on trial; not a multiple of any vector
PROBE_UPDATES = 3
MESSAGE_BYTES = 4 * 2**20  # of a state dict on its way from rank 0


# ---------------------------------------------------------------------------------------------------- the optimizer


def shard_optimizer(optimizer: torch.optim.Optimizer, reducer: GradientReducer, group: Any) -> None:
    """Make `optimizer` keep state for this rank's range of every bucket of `reducer`. Collective, before any update.

    The optimizer keeps its class name, its groups and their names; their parameters become shards: 1-D Parameters with
    an attribute `placement`. State that its constructor made is cut alike.
    Raises: ConfigError on all ranks for an optimizer that gives other numbers when its parameters are cut, and for
        parameters that share memory without being one (tied weights are one).
    """
    problem = None
    try:
        _check_apart(reducer)
        elementwise = elementwise_state(optimizer)
    except ConfigError as error:
        problem = error
    distributed_utils.agree(problem, group)
    cls = type(optimizer)
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "whole_class": cls,
    }
    optimizer.__class__ = type(cls.__name__, (ZeroOptimizer, cls), members)
    optimizer._take_shards(reducer, group, optim.ELEMENTWISE_STATE | elementwise)


@dataclass(eq=False)
class _Shard:
    """What this rank owns of one parameter."""

    parameter: nn.Parameter
    address: int  # of the parameter's memory
    shard: nn.Parameter  # [numel of the piece], in the parameter's memory
    whole_gradient: Tensor  # the reducer's view for the parameter
    gradient: Tensor  # [numel of the piece], in the memory of the whole gradient


class ZeroOptimizer:
    """What `shard_optimizer` adds to the class of an optimizer."""

    whole_class: type[torch.optim.Optimizer]  # the class below, which knows nothing of shards
    elementwise_state: frozenset[str]  # names of state that has one element for each of its parameter

    def _take_shards(self, reducer: GradientReducer, group: Any, elementwise: frozenset[str]) -> None:
        self.elementwise_state, self._zero_group = elementwise, group
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._zero_exchanges = []
        shards: dict[int, _Shard] = {}
        for bucket in reducer.buckets:
            flat, cuts = _flat_parameters(bucket), _cuts(bucket, num_ranks)
            shards |= {id(one.parameter): one for one in _shards(bucket, flat, cuts[rank], cuts[rank + 1])}
            message = torch.view_as_real(flat) if flat.is_complex() else flat
            for owner, (begin, end) in enumerate(itertools.pairwise(cuts)):
                if begin < end:
                    self._zero_exchanges.append((message[begin:end], _broadcast_from(owner)))
        self._zero_shards = []
        for param_group in self.param_groups:
            own = [shards.get(id(parameter)) for parameter in param_group["params"]]
            for one in own:
                self.state |= _cut_state(self.state.pop(one.parameter, None), one.shard, elementwise)
            param_group["params"] = [one.shard for one in own]
            self._zero_shards += own

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the class below on what this rank owns; afterwards every rank has all parameters."""
        for one in self._zero_shards:
            if one.parameter.data_ptr() != one.address:
                raise self._memory_was_replaced(one)
            whole = one.parameter.grad
            if whole is not None and whole is not one.whole_gradient:
                one.whole_gradient.copy_(whole)
            one.shard.grad = one.gradient if whole is not None else None
        result = super().step(*args, **kwargs)
        self._exchange()
        return result

    step.hooked = True  # torch runs the hooks of a step around the step of the class below

    def _memory_was_replaced(self, shard: _Shard) -> RuntimeError:
        names = [name for group in self.param_groups for name in group["param_names"]]
        return RuntimeError(
            f"parameter {names[self._zero_shards.index(shard)]} no longer lies where the optimizer updates it: something"
            " gave it other memory (`.data = `, `load_state_dict(assign=True)`, `.to()`). Copy into it in place, or train"
            " with distributed_training.zero_sharding=none"
        )

    def _exchange(self) -> None:
        """Give every rank the share of each. Broadcasts, since shares differ in size and gloo copies to gather."""
        works = [self._zero_group.broadcast([share], options) for share, options in self._zero_exchanges]
        for work in works:
            work.wait()

    def broadcast_global_state_dict(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        """Give each rank its part of the whole state that rank 0 of the group holds, and no more. Collective.

        Args: state_dict: rank 0's, in torch's layout, tensors in the shapes of the whole parameters, matched by
            `param_names` where it has them. What the other ranks pass is ignored.
        Returns: this rank's part in torch's layout, which this optimizer then holds already. Tensors with one element
            for each of a parameter are 1-D, the elements of its shard; all others are equal on every rank.
        Raises: on all ranks alike, ConfigError where the shapes do not fit.
        """
        group = self._zero_group
        sender = dist.get_global_rank(group, 0)
        is_sender, error = dist.get_rank() == sender, None
        if is_sender and not {"state", "param_groups"} <= set(state_dict or ()):
            error = ValueError("rank 0 of the group must pass the state of the whole optimizer, in torch's layout")
        distributed_utils.agree(error, group)
        nest, kinds, tensors = _without_tensors(state_dict) if is_sender else ({}, [], [])
        nest, kinds = distributed_utils.broadcast_object((nest, kinds), sender, group)
        for position, (index, key, dtype, shape) in enumerate(kinds):
            nest["state"][index][key] = _Reference(position, dtype, shape)
        optim.restore_optimizer_state(self, nest, lambda pairs: _hand_out(pairs, tensors, group))
        return self.state_dict()


def _check_apart(reducer: GradientReducer) -> None:
    spans = []
    for name, parameter in reducer.named_parameters:
        if parameter.numel():
            reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride())) + 1
            begin = parameter.data_ptr()
            spans.append((str(parameter.device), begin, begin + reach * parameter.element_size(), name))
    for (device, _, end, name), (other_device, begin, _, other) in itertools.pairwise(sorted(spans)):
        if device == other_device and begin < end:
            raise ConfigError(
                f"parameters {name} and {other} lie in the same memory without being one Parameter, which"
                " distributed_training.zero_sharding=os would take apart. Assign one to the other, or train with"
                " distributed_training.zero_sharding=none"
            )


def _flat_parameters(bucket: Bucket) -> Tensor:
    """Move the parameters of `bucket` into one buffer in the layout of its gradients."""
    flat = torch.zeros_like(bucket.flat)
    for index, parameter in enumerate(bucket.parameters):
        view = bucket.view_into(flat, index)
        view.copy_(parameter.detach())
        parameter.data = view
    return flat


def _cuts(bucket: Bucket, num_ranks: int) -> list[int]:
    """Where the shares of the ranks begin in the layout of `bucket`, and its end: as equal as CUT_BYTES allows."""
    multiple = CUT_BYTES // bucket.flat.element_size()
    sizes = [parameter.numel() for parameter in bucket.parameters]
    ends = list(itertools.accumulate(sizes))
    cuts = [0]
    for rank in range(1, num_ranks):
        wanted = ends[-1] * rank // num_ranks if ends else 0  # elements before this cut, padding not counted
        index = bisect.bisect_left(ends, wanted)
        if index == len(ends):
            cuts.append(0)
            continue
        within = wanted - ends[index] + sizes[index]
        cuts.append(bucket.begins[index] + min(sizes[index], round(within / multiple) * multiple))
    return [*cuts, bucket.numel]


def _shards(bucket: Bucket, flat: Tensor, share_begin: int, share_end: int) -> Iterator[_Shard]:
    for parameter, start, gradient in zip(bucket.parameters, bucket.begins, bucket.views):
        begin = max(start, share_begin)
        end = max(begin, min(start + parameter.numel(), share_end))
        first = begin - start if begin < end else 0
        shard = nn.Parameter(flat[begin:end])
        shard.placement = Placement(parameter.shape, parameter.stride(), first, end - begin)
        yield _Shard(parameter, parameter.data_ptr(), shard, gradient, bucket.flat[begin:end])


def _cut_state(state: Mapping[str, Any] | None, shard: nn.Parameter, elementwise: frozenset[str]) -> dict:
    """{shard: its state}, empty where there is none."""
    if not state:
        return {}
    placement = shard.placement
    return {
        shard: {
            key: placement.cut(value).clone() if key in elementwise and value.shape == placement.shape else value
            for key, value in state.items()
        }
    }


def _broadcast_from(owner: int) -> dist.BroadcastOptions:
    """Asked of the group itself: torch.distributed.broadcast spends three times as long in Python."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = owner, 0, True
    return options


# ---------------------------------------------------------------------------------------------------- may it be cut?


def elementwise_state(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The names of the state that `optimizer` keeps for each element, found by trial; its own state is not touched.

    A small random matrix is trained for a few updates, whole and cut in two as it would be on two ranks, for each
    kind of settings, dtype and device of its groups. Only if all bits are equal may the parameters be cut.
    Raises: ConfigError that says what differs, and how to go on.
    """
    names: frozenset[str] = frozenset()
    tried = set()
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for kind in {(p.dtype, p.device) for p in group["params"]}:
            case = repr(sorted((key, value) for key, value in settings.items() if key not in ("lr", "lr_scale"))), kind
            if case not in tried:
                tried.add(case)
                names |= _tried(optimizer, settings, *kind)
    return names


def _tried(optimizer: torch.optim.Optimizer, settings: dict, dtype: torch.dtype, device: torch.device) -> frozenset:
    values = _random_values(dtype, device)
    cut = CUT_BYTES // dtype.itemsize
    cuts = [slice(0, cut), slice(cut, None)]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            whole, state = _train(optimizer, settings, values)
            parts = [_train(optimizer, settings, [value.flatten()[cut] for value in values]) for cut in cuts]
    except Exception as error:  # whatever another's optimizer raises
        raise _cannot_be_cut(optimizer, f"a trial step raised {type(error).__name__}: {error}") from error
    if not all(torch.equal(whole.flatten()[cut], part) for cut, (part, _) in zip(cuts, parts)):
        raise _cannot_be_cut(optimizer, "in a trial the pieces of a parameter ended with other values than the whole")
    elementwise = set()
    for key, value in state.items():
        pieces = [part[key] for _, part in parts]
        if not isinstance(value, Tensor):
            same = all(value == piece for piece in pieces)
        elif value.shape == whole.shape:
            elementwise.add(key)
            same = all(torch.equal(value.flatten()[cut], piece) for cut, piece in zip(cuts, pieces))
        else:
            same = all(value.shape == piece.shape and torch.equal(value, piece) for piece in pieces)
        if not same:
            raise _cannot_be_cut(optimizer, f"its state {key!r} is not one value for each element of a parameter")
    return frozenset(elementwise)


def _random_values(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """A parameter and a gradient for each update of a trial."""
    wide = torch.complex64 if dtype.is_complex else torch.float32
    generator = torch.Generator().manual_seed(0)
    shape = (PROBE_UPDATES + 1, *PROBE_SHAPE)
    return list(torch.randn(shape, generator=generator, dtype=wide).to(device, dtype))


def _train(optimizer: torch.optim.Optimizer, settings: dict, values: list[Tensor]) -> tuple[Tensor, dict]:
    """The first of `values`, trained on the others by an optimizer of the same class, and the state kept for it."""
    parameter = nn.Parameter(values[0].clone())
    lr = {"lr": settings["lr"] or 0.01} if "lr" in settings else {}
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    trial = type(optimizer)([{"params": [parameter], **copy.deepcopy(settings), **lr}], **arguments)
    for gradient in values[1:]:
        parameter.grad = gradient.clone()
        trial.step()
    return parameter.detach(), trial.state[parameter]


def _cannot_be_cut(optimizer: torch.optim.Optimizer, reason: str) -> ConfigError:
    return ConfigError(
        f"sharding cuts parameters into pieces, which {type(optimizer).__name__} does not allow: {reason}. Train it with"
        " distributed_training.zero_sharding=none distributed_training.ddp_backend=pytorch_ddp"
    )


# ---------------------------------------------------------------------------------------------------- handing out


@dataclass(frozen=True)
class _Reference:
    """A tensor that rank 0 holds."""

    position: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _without_tensors(state_dict: Mapping[str, Any]) -> tuple[dict, list[tuple], list[Tensor]]:
    """(the state with None for each tensor, where each belongs and what it is, the tensors)."""
    kinds, tensors = [], []
    state: dict[Any, dict] = {}
    for index, entry in state_dict["state"].items():
        state[index] = dict(entry)
        for key, value in entry.items():
            if isinstance(value, Tensor):
                kinds.append((index, key, value.dtype, tuple(value.shape)))
                tensors.append(value.detach())
                state[index][key] = None
    return {"state": state, "param_groups": [dict(group) for group in state_dict["param_groups"]]}, kinds, tensors


def _hand_out(pairs: list[tuple[_Reference, Any]], tensors: list[Tensor], group: Any) -> None:
    """Fill the targets of `pairs`: whole ones with what rank 0 has, shards with their pieces of it, point to point."""
    sender = dist.get_global_rank(group, 0)
    whole = [(reference, target) for reference, target in pairs if isinstance(target, Tensor)]
    cut = [(reference, target) for reference, target in pairs if not isinstance(target, Tensor)]
    ranges = torch.tensor([target.pieces[0][0] if target.pieces else 0 for _, target in cut], dtype=torch.int64)
    sizes = torch.tensor([sum(values.numel() for _, values in target.pieces) for _, target in cut], dtype=torch.int64)
    mine = torch.stack([ranges, sizes]).to(distributed_utils.communication_device(group))
    if dist.get_rank() != sender:
        dist.send(mine, sender, group=group)
        _receive((values for _, target in cut for _, values in target.pieces), sender, group)
    else:
        for reference, target in whole:
            target.copy_(tensors[reference.position])
        for rank in range(dist.get_world_size(group)):
            theirs, receiver = torch.empty_like(mine), dist.get_global_rank(group, rank)
            if rank:
                dist.recv(theirs, receiver, group=group)
            pieces = _pieces(cut, tensors, (theirs if rank else mine).T.tolist())
            if rank:
                _send(pieces, receiver, group)
            else:
                for (_, target), piece in zip(cut, pieces):
                    for _, values in target.pieces:
                        values.copy_(piece)
    distributed_utils.broadcast_tensors([target for _, target in whole], sender, group)


def _pieces(cut: list[tuple[_Reference, Any]], tensors: list[Tensor], ranges: list) -> Iterator[Tensor]:
    """For each pair the elements [begin, begin + numel) of rank 0's tensor, in the order of the target's memory."""
    for (reference, target), (begin, numel) in zip(cut, ranges):
        yield Placement(target.shape, target.stride, begin, numel).cut(tensors[reference.position])


def _send(pieces: Iterator[Tensor], receiver: int, group: Any) -> None:
    comm = distributed_utils.communication_device(group)
    for message in _messages(pieces):
        dist.send(torch.cat(message).to(comm), receiver, group=group)


def _receive(targets: Iterator[Tensor], sender: int, group: Any) -> None:
    comm = distributed_utils.communication_device(group)
    for message in _messages(targets):
        sizes = [part.numel() for part in message]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=comm)
        dist.recv(received, sender, group=group)
        for part, values in zip(message, received.split(sizes)):
            part.copy_(values)


def _messages(pieces: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """The bytes of `pieces`, [numel] each, as views of their memory that fill one message after another."""
    message, room = [], MESSAGE_BYTES
    for piece in pieces:
        rest = piece.view(torch.uint8)
        while rest.numel():
            message.append(rest[:room])
            rest, room = rest[room:], room - message[-1].numel()
            if not room:
                yield message
                message, room = [], MESSAGE_BYTES
    if message:
        yield message
