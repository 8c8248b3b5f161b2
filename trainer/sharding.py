"""Which elements of a whole tensor this rank holds: single and data parallel all of them, ZeRO and FSDP a range.

Owns: `Placement`, and the two questions that saving, loading and averaging ask of any tensor: its local memory and its
description for a file. The kinds of sharding differ in how they fill in a Placement, nothing else asks which it is.
Must not know: files, the Trainer, optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from checkpoint_file import ShardedTensor


@dataclass(frozen=True)
class Placement:
    """The elements [begin, begin + numel) of a dense whole tensor, counted in the order of its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    begin: int
    numel: int

    def describe(self, local: Tensor) -> ShardedTensor:
        """`local`, which has `numel` elements in the order of memory, as this rank's piece of a whole tensor."""
        assert local.numel() == self.numel, (local.shape, self)
        values = local.detach().as_strided((self.numel,), (1,))
        pieces = ((self.begin, values),) if self.numel else ()
        return ShardedTensor(local.dtype, self.shape, self.stride, pieces)

    def cut(self, whole: Tensor) -> Tensor:
        """These elements of a whole tensor of this shape: [numel], a view where it lies in memory as the placement says."""
        if whole.numel() and whole.stride() != self.stride:
            ordered = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device)
            whole = ordered.copy_(whole)
        return whole.as_strided((self.numel,), (1,), whole.storage_offset() + self.begin)


def placement_of(tensor: Tensor) -> Placement | None:
    """Which elements of a whole tensor `tensor` is on this rank; None where it is whole here, as on every other rank.

    Raises: NotImplementedError for a DTensor that is not sharded along its first dimension over one mesh dimension.
    """
    given = getattr(tensor, "placement", None)  # of a shard that ZeRO cut
    if given is not None or not is_dtensor(tensor):
        return given
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    kinds = tuple(tensor.placements)
    if all(isinstance(kind, Replicate) for kind in kinds):
        return None
    if kinds != (Shard(0),):
        raise NotImplementedError(f"a tensor sharded as {kinds} over {tensor.device_mesh}")
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, kinds)
    local = tensor._local_tensor
    row = tensor.shape[1:].numel()
    stride = torch.empty(tensor.shape, device="meta").stride()
    return Placement(tensor.shape, stride, offset[0] * row if local.numel() else 0, local.numel())


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of what `tensor` is on all ranks together."""
    given = getattr(tensor, "placement", None)
    return tensor.shape if given is None else given.shape


def local_of(tensor: Tensor) -> Tensor:
    """The memory of `tensor` on this rank, without gradients."""
    return tensor._local_tensor.detach() if is_dtensor(tensor) else tensor.detach()


def is_dtensor(tensor: Tensor) -> bool:
    # Asked without importing torch.distributed.tensor, which takes a second that a run on one process need not spend.
    return hasattr(tensor, "device_mesh")


def described(tensor: Tensor, placement: Placement | None = None) -> Any:
    """What a file or a load is given for `tensor`: itself where it is whole, else a ShardedTensor of its memory here.

    placement: of the parameter that `tensor` is elementwise state of; by default that of `tensor` itself.
    """
    placement = placement or placement_of(tensor)
    local = local_of(tensor)
    return local if placement is None else placement.describe(local)


def described_state(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with every tensor described; the names of one tensor share one description."""
    known: dict[int, Any] = {}
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        state[name] = known.setdefault(id(value), described(value)) if isinstance(value, Tensor) else value
    return state
