"""Whether parameters are fit to go on with: finite, and where every rank has them whole, the same on all ranks.

Owns: the checks and the error of ranks that have drifted apart. Each reads every parameter once and sends a few bytes.
Must not know: the Trainer, files, what is done about it (nonfinite.py).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import distributed_utils
from trainer.sharding import local_of, placement_of

logger = logging.getLogger(__name__)

DRIFT = 1e-3  # difference between ranks, relative to the largest element, that no rounding explains
MEASURED = 8  # parameters whose difference is measured, out of those that differ


class DriftError(RuntimeError):
    """A parameter that is whole on every rank is not the same on all of them."""

    is_user_error = True

    def __init__(self, name: str, ranks: list[int], num_updates: int, difference: float) -> None:
        self.name, self.ranks, self.num_updates, self.difference = name, ranks, num_updates, difference
        several = "ranks" if len(ranks) > 1 else "rank"
        super().__init__(
            f"the ranks have drifted apart at update {num_updates}: parameter {name} of {several} "
            f"{', '.join(map(str, ranks))} differs from rank 0's (by {difference:.2g} of its largest element). Something "
            "changes parameters on one rank alone. Nothing was saved; find the update at which it begins with "
            "common.check_replicas_every=1"
        )


def bad_of(loss: Tensor, named_parameters: Iterable[tuple[str, Tensor]]) -> str | None:
    """What a backward has shown to be not finite, the loss or the first gradient; None if nothing is."""
    if not torch.isfinite(loss):
        return f"the loss ({loss.item()})"
    named = [(name, parameter.grad) for name, parameter in named_parameters if parameter.grad is not None]
    return next((f"the gradient of {name}" for name, grad in named if not torch.isfinite(grad).all()), None)


def first_non_finite(named_parameters: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first float parameter that holds a NaN or an infinity in this rank's part of it."""
    named = [(name, local_of(p).detach()) for name, p in named_parameters if p.is_floating_point() or p.is_complex()]
    named = [(name, p) for name, p in named if p.numel()]
    if not named:
        return None
    norms = torch._foreach_norm([torch.view_as_real(p) if p.is_complex() else p for _, p in named], 2)
    doubtful = ~torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite()
    # The square of a large number overflows where the number does not, so a norm only says where to look.
    return next((named[i][0] for i in doubtful.nonzero()[:, 0].tolist() if not named[i][1].isfinite().all()), None)


def replicas_of(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Those of the parameters that every rank has whole."""
    return {name: parameter.detach() for name, parameter in named_parameters if placement_of(parameter) is None}


def checksum(tensor: Tensor) -> Tensor:
    """int64 []: the sum of a tensor's memory in words of 8 bytes, modulo 2^64. One changed element changes it.

    As fast as memory is read, and the same in whatever order the words are added.
    """
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    words = data.numel() // 8 * 8
    begin = data[:words] if data.storage_offset() % 8 == 0 else data[:words].clone()
    return begin.view(torch.int64).sum() + data[words:].sum(dtype=torch.int64)


def checksums(replicas: Mapping[str, Tensor]) -> list[int]:
    sums = [checksum(tensor) for tensor in replicas.values()]
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []


def digest_of(replicas: Mapping[str, Tensor]) -> str:
    """What ranks compare first: equal exactly if all checksums are, up to chance."""
    return hashlib.blake2b(repr(checksums(replicas)).encode(), digest_size=16).hexdigest()


def check_replicas(replicas: Mapping[str, Tensor], num_updates: int, group: Any) -> None:
    """Collective: compare the parameters of all ranks.

    Raises: on all ranks DriftError. Differences that rounding explains (processors of different makes) are warned of.
    """
    if distributed_utils.get_world_size(group) > 1:
        if len(set(distributed_utils.all_gather_list(digest_of(replicas), group))) > 1:
            tell_drift(replicas, num_updates, group)


def tell_drift(replicas: Mapping[str, Tensor], num_updates: int, group: Any) -> None:
    """Collective, after digests were found to differ. Raises DriftError, or warns where the difference is small."""
    sums = distributed_utils.all_gather_list(checksums(replicas), group)
    differing = [name for name, *values in zip(replicas, *sums) if len(set(values)) > 1]
    measured = [measure(replicas[name], group) for name in differing[:MEASURED]]
    name, differences = max(zip(differing, measured), key=lambda one: max(one[1]))
    ranks = [rank for rank, difference in enumerate(differences) if difference > 0]
    error = DriftError(name, ranks, num_updates, max(differences))
    if error.difference > DRIFT:
        raise distributed_utils.agreed(error)
    logger.warning("%s: little enough to be rounding, so training goes on, and saves hold what rank 0 has", error)


def measure(own: Tensor, group: Any) -> list[float]:
    """Collective: for each rank the largest difference from rank 0's tensor, relative to the largest element of it."""
    reference = own.clone()
    distributed_utils.broadcast_tensors([reference], distributed_utils.get_global_rank(group, 0), group)
    wide = torch.complex128 if own.is_complex() else torch.float64
    largest = reference.to(wide).abs().nan_to_num(0.0, posinf=0.0).max().item() or 1.0
    apart = (own.to(wide) - reference.to(wide)).abs().nan_to_num(float("inf")).max().item() / largest
    same = torch.equal(own, reference)
    return distributed_utils.all_gather_list(0.0 if same else max(apart, 1e-300), group)
