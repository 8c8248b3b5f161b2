"""`distributed_training.ddp_backend=fully_sharded`: torch's fully_shard (FSDP2) behind the interface of the reducer.

Owns: which modules are wrapped, which parameters stay whole on every rank, when gradients are summed, the norm of
gradients that lie in parts. Parameters become DTensors whose rows are dealt out; the optimizer is given this rank's rows
as plain parameters with a `placement`, so that any elementwise optimizer steps on plain memory.
Must not know: losses, updates, files, which optimizer it is.

fully_shard divides sums by the number of ranks of its own accord; here gradients stay plain sums, as in the reducer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import distributed_utils
from trainer import optim
from trainer.data_parallel import GradientMismatchError, GradientReducer
from trainer.errors import ConfigError
from trainer.precision import FullPrecision
from trainer.sharding import is_dtensor, local_of, placement_of
from trainer.zero import elementwise_state

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------- wrapping


def is_wanted(cfg: Any, world_size: int) -> bool:
    """Whether the section `distributed_training` asks for it and there are ranks to share with."""
    wanted = cfg.ddp_backend == "fully_sharded"
    if wanted and world_size == 1:
        logger.warning(
            "distributed_training.ddp_backend=fully_sharded: with one rank there is nothing to shard, the model stays whole"
        )
    return wanted and world_size > 1


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What is wrapped if nobody says: `model.fully_sharded_modules()` where the model has it, else its blocks.

    A block is an element of a ModuleList or Sequential that has modules of its own: a layer of a transformer, say.
    """
    if hasattr(model, "fully_sharded_modules"):
        return list(model.fully_sharded_modules())
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    blocks = {id(block): block for owner in lists for block in owner if any(True for _ in block.children())}
    return [block for block in blocks.values() if not isinstance(block, (nn.ModuleList, nn.ModuleDict))]


def wrap(
    model: nn.Module,
    modules: Iterable[nn.Module],
    device: torch.device,
    cfg: Any,
    precision: FullPrecision,
) -> None:
    """Shard `model` in place over all ranks of the default group: each of `modules` is gathered and freed as one.

    Whatever is in none of them belongs to the model itself. A module that shares a parameter with the rest of the model
    is left to the model too, since tied weights must be gathered together.

    Args:
        device: where forward computes.
        cfg: the section `distributed_training`: cpu_offload, gather_in_half_precision, find_unused_parameters.
        precision: whose dtype parameters are gathered in, if they are gathered in half precision.
    Raises: ConfigError where a wish needs a newer torch.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    half = precision.dtype if cfg.gather_in_half_precision else None
    norms = {id(m): m for m in model.modules() if half and isinstance(m, _NormBase)}  # whose buffers stay float32
    units = [*_inner_first(model, [*modules, *norms.values()]), model]
    whole = _kept_whole(model, units)
    settings = {
        "mesh": init_device_mesh(device.type, (torch.distributed.get_world_size(),)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if cfg.cpu_offload else OffloadPolicy(),
        "ignored_params": whole,
    }
    for unit in units:
        dtype = None if id(unit) in norms else half
        # Inputs stay as they are: timesteps and positions would lose digits, and autocast casts what may be cast.
        policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        fully_shard(unit, mp_policy=policy, **settings)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other kind
    _count_unused_as_zero(model, cfg.find_unused_parameters)
    for parameter in whole:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    model.register_forward_hook(_reshard_without_grad)


def _inner_first(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules to wrap, each after those inside it, without those that share a parameter with the outside."""
    wanted = {id(module) for module in modules}
    ordered = [module for module in model.modules() if id(module) in wanted and module is not model]
    strangers = len(wanted - {id(model)}) - len(ordered)
    if strangers:
        raise ConfigError(f"fully_sharded_modules() named {strangers} modules that are not in the model")
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return [m for m in reversed(ordered) if not _shares_a_parameter(m, uses) and any(True for _ in m.parameters())]


def _shares_a_parameter(module: nn.Module, uses: dict[int, int]) -> bool:
    inside: dict[int, int] = {}
    for submodule in module.modules():
        for parameter in submodule._parameters.values():
            inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    return any(uses[key] != count for key, count in inside.items())


def _kept_whole(model: nn.Module, units: list[nn.Module]) -> set[nn.Parameter]:
    """Parameters that fully_shard cannot cut, or cannot put in one message with the rest of their module."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    whole: dict[int, nn.Parameter] = {}
    taken: set[int] = set()
    for unit in units:
        own = [parameter for parameter in unit.parameters() if id(parameter) not in taken]
        taken |= {id(parameter) for parameter in own}
        fit = [p for p in own if p.ndim and p.numel() and p.is_contiguous() and p.is_floating_point()]
        sizes: dict[torch.dtype, int] = {}
        for parameter in fit:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        dtype = max(sizes, key=sizes.get, default=None)
        cut = {id(parameter) for parameter in fit if parameter.dtype == dtype}
        whole |= {id(parameter): parameter for parameter in own if id(parameter) not in cut}
    if whole:
        shown = [names[key] for key in whole]
        more = f" and {len(shown) - 10} more" if len(shown) > 10 else ""
        logger.info(
            "fully_sharded: whole on every rank, since rows of them cannot be dealt out (0-dim, empty, transposed, or "
            "of another dtype than the rest of their module): %s%s",
            ", ".join(shown[:10]),
            more,
        )
    return set(whole.values())


def _count_unused_as_zero(model: nn.Module, needed: bool) -> None:
    # Otherwise ranks that used different parameters send messages of different lengths, and gloo ends the process.
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
    elif needed:
        raise ConfigError(
            f"distributed_training.find_unused_parameters=true with ddp_backend=fully_sharded needs a newer torch than "
            f"{torch.__version__}: leave it out, or take distributed_training.ddp_backend=pytorch_ddp"
        )


def _reshard_without_grad(model: nn.Module, *_: Any) -> None:
    # fully_shard keeps the outermost parameters gathered until a backward. After a validation none comes: the next
    # forward would compute with what was gathered before the averaged weights were swapped out.
    if not torch.is_grad_enabled():
        model.reshard()


# ---------------------------------------------------------------------------------------------------- the optimizer


def step_on_rows(optimizer: torch.optim.Optimizer, rows: Mapping[int, nn.Parameter], group: Any) -> None:
    """Give a new optimizer this rank's rows in place of the DTensors that it was built with. Collective.

    Args: rows: id of a DTensor -> its memory here, as a parameter with a `placement`.
    Raises: ConfigError on all ranks for an optimizer that gives other numbers when its parameters are cut.
    """
    problem, elementwise = None, frozenset()
    try:
        elementwise = elementwise_state(optimizer)
    except ConfigError as error:
        problem = error
    distributed_utils.agree(problem, group)
    optimizer.elementwise_state = optim.ELEMENTWISE_STATE | elementwise
    for param_group in optimizer.param_groups:
        for whole in param_group["params"]:
            if id(whole) in rows and whole in optimizer.state:  # some classes have state from the start
                state = optimizer.state.pop(whole).items()
                optimizer.state[rows[id(whole)]] = {k: local_of(v) if isinstance(v, Tensor) else v for k, v in state}
        param_group["params"] = [rows.get(id(parameter), parameter) for parameter in param_group["params"]]


# ---------------------------------------------------------------------------------------------------- gradients


class ShardedGradients:
    """Sums the gradients of a wrapped model over the ranks during the last backward of an update.

    As GradientReducer: `prepare()`, any number of backwards, `arm()`, one more backward, `finish()`; but each rank then
    holds the sums of its own rows. Parameters that are whole on every rank are summed by a GradientReducer.

    Args:
        named_parameters: all trainable parameters; those that `wrap` has cut are DTensors.
        device: where messages lie, which is not where gradients lie with cpu_offload.
    """

    def __init__(
        self,
        model: nn.Module,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        device: torch.device,
        group: Any,
        world_size: int,
        find_unused_parameters: bool = False,
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        named = list(named_parameters)
        self._model, self._group, self._device = model, group, device
        self._world_size, self._find_unused = world_size, find_unused_parameters
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._names = [name for name, parameter in named if is_dtensor(parameter)]
        self._sharded = [(parameter, _rows_of(parameter)) for _, parameter in named if is_dtensor(parameter)]
        self._used = [False] * len(self._sharded)
        for unit in self._units:
            inner = [
                module
                for other in unit.modules()
                if other is not unit and other in self._units
                for module in other.modules()
            ]
            self._watch(unit, set(unit.modules()).difference(inner))
        whole = [(name, parameter) for name, parameter in named if not is_dtensor(parameter)]
        self._reducer = GradientReducer(whole, group, world_size, find_unused_parameters) if whole else None

    def _watch(self, unit: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Note which parameters of `modules` get a gradient; what autograd sees of them exists once `unit` has begun."""
        index = {id(parameter): i for i, (parameter, _) in enumerate(self._sharded)}
        slots = [
            (module._parameters, name, index[id(parameter)])
            for module in modules
            for name, parameter in module._parameters.items()
            if id(parameter) in index
        ]

        def begin(*_: Any) -> None:
            handle.remove()
            for parameters, name, i in slots:
                parameters[name].register_post_accumulate_grad_hook(functools.partial(self._note, i))

        handle = unit.register_forward_pre_hook(begin)

    def _note(self, i: int, _: Tensor) -> None:
        self._used[i] = True

    @property
    def rows(self) -> dict[int, nn.Parameter]:
        """id of a DTensor parameter -> this rank's rows of it, the memory that the optimizer steps on."""
        return {id(parameter): rows for parameter, rows in self._sharded}

    @property
    def flats(self) -> list[Tensor]:
        """This rank's gradients: of its rows, then the flat ones that every rank has."""
        return self._own_gradients() + (self._reducer.flats if self._reducer is not None else [])

    def _own_gradients(self) -> list[Tensor]:
        return [rows.grad for _, rows in self._sharded if rows.grad is not None]

    def prepare(self) -> None:
        for parameter, rows in self._sharded:
            parameter.grad = rows.grad = None
        self._used = [False] * len(self._sharded)
        self._send_gradients(False)
        if self._reducer is not None:
            self._reducer.prepare()

    def arm(self) -> None:
        """The next backward is the last of this update: sum the gradients of each module as soon as it is through."""
        self._send_gradients(True)

    def _send_gradients(self, wanted: bool) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(wanted, recurse=False)

    def finish(self) -> None:
        """Hand the rows their gradients. The whole ones are sent now: no message may overtake one of fully_shard's."""
        for parameter, rows in self._sharded:
            rows.grad = local_of(parameter.grad) if parameter.grad is not None else None
        if self._reducer is not None:
            self._reducer.finish()

    def global_norm(self) -> Tensor:
        """The L2 norm of all gradients, float32 [], the same on every rank; not finite if any gradient is not.

        The message also says which parameters were used: one that no rank used has no gradient, as with one rank.
        Raises: GradientMismatchError on all ranks alike.
        """
        flats = self._reducer.flats if self._reducer is not None else []
        own, whole = (optim.total_norm(gradients).to(self._device) for gradients in (self._own_gradients(), flats))
        used = torch.tensor(self._used, dtype=torch.float64).to(self._device)
        message = torch.cat([own.double().square().reshape(1), used])
        torch.distributed.all_reduce(message, group=self._group)
        self._settle_unused(message[1:].tolist())
        return (message[0] + whole.double().square()).sqrt().float()

    def _settle_unused(self, counts: list[float]) -> None:
        if min(counts, default=self._world_size) == self._world_size:
            return
        for name, (_, rows), count in zip(self._names, self._sharded, counts):
            if count == 0:
                rows.grad = None
            elif count < self._world_size and not self._find_unused:
                raise GradientMismatchError(name, int(count), self._world_size)

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Within the block backward leaves this rank's own gradients on the parameters that the model then shows."""
        self.prepare()
        self._model.set_reshard_after_backward(False)
        try:
            yield
        finally:
            for parameter in self._model.parameters():
                parameter.grad = None
            self._model.set_reshard_after_backward(True)
            for unit in self._units:
                unit.reshard()


def _rows_of(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's rows of a DTensor, its very memory, as a parameter that says where in the whole they lie."""
    rows = nn.Parameter(local_of(parameter))
    rows.placement = placement_of(parameter)
    return rows
