"""Models that are built without memory, sharded, and then filled: the same values at any number of ranks.

Owns: what it takes to let a task's `init_weights(model)`, written for whole parameters, fill this rank's rows of them.
Must not know: the Trainer, files, who wraps the model.

Every draw is made on the CPU for the whole tensor, one tensor at a time, and this rank keeps its rows. So a rank needs
memory for its part and the largest parameter, and the generator moves as it does for one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import distributed_utils
from trainer.errors import ConfigError
from trainer.randomness import seed_all
from trainer.sharding import is_dtensor, local_of, placement_of
from trainer.targets import get_target


def is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def init_weights_of(node: Mapping[str, Any] | None, known: type[nn.Module]) -> Callable[[nn.Module], None] | None:
    """What fills the model that the config node `node` names: its own init_weights(), if it is a `known` model.

    None for another class, of whose init_weights(), if it has one, nothing is known: it is built whole.
    """
    target = get_target(node, where="model._target_") if node else None
    return target.init_weights if target is not None and issubclass(target, known) else None


@torch.no_grad()
def fill(model: nn.Module, init_weights: Callable[[nn.Module], None], device: torch.device, seed: int) -> None:
    """Give a model that was built on the meta device memory on `device` and the values of `init_weights(model)`.

    Collective. Args: model: bare or wrapped by fully_shard; tied weights stay tied. seed: of all that is drawn.
    Raises: ConfigError on all ranks that names what init_weights has left without values.
    """
    floating = _without_values(model, device)
    seed_all(seed)
    problem = None
    try:
        with _WholeDraws():
            init_weights(model)
        _check_all_set(floating)
    except Exception as error:  # the other ranks wait for the agreement
        problem = error
    distributed_utils.agree(problem)


def _without_values(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Memory for `model`. What floats is not a number yet; returned by name."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights would become two
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    floating = {name: local_of(tensor) for name, tensor in named.items() if tensor.is_floating_point()}
    for tensor in floating.values():
        tensor.fill_(torch.nan)
    return floating


def _check_all_set(floating: dict[str, Tensor]) -> None:
    empty = [name for name, tensor in floating.items() if tensor.numel() and tensor.isnan().any()]
    if empty:
        more = f" and {len(empty) - 10} more" if len(empty) > 10 else ""
        raise ConfigError(
            f"init_weights(model) must set every parameter and buffer, since the model is built without values; it left "
            f"{', '.join(empty[:10])}{more}"
        )


class _WholeDraws(TorchDispatchMode):
    """Within it, what is drawn into or copied into a DTensor is this rank's rows of the same for the whole tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, target = kwargs or {}, args[0] if args else None
        in_place = isinstance(target, Tensor) and func._schema.arguments[0].is_write
        if in_place and torch.Tag.nondeterministic_seeded in func.tags:
            whole = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
            return _keep_rows(target, func(whole, *args[1:], **kwargs))
        if in_place and func is torch.ops.aten.copy_.default and is_dtensor(target) and not is_dtensor(args[1]):
            return _keep_rows(target, args[1].to(target.dtype).expand(target.shape))
        result = func(*args, **kwargs)
        if func.is_view and isinstance(target, Tensor) and is_dtensor(target):
            _check_view(func, target, result)
        return result


def _keep_rows(target: Tensor, whole: Tensor) -> Tensor:
    placement, local = placement_of(target), local_of(target)
    local.copy_(whole if placement is None else placement.cut(whole.contiguous()).view(local.shape))
    return target


def _check_view(func: Any, whole: Tensor, result: Any) -> None:
    """Rows of a sharded tensor are no view of it: what would be written to them is lost."""
    same = is_dtensor(result) and local_of(result).untyped_storage()._cdata == local_of(whole).untyped_storage()._cdata
    if not same:
        raise ConfigError(
            f"init_weights(model) takes a part of a sharded parameter ({func}), which cannot be written to. Set the whole "
            "parameter: build the values on the CPU and copy_ them"
        )
