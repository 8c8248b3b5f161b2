"""Numbers about the values of one tensor, and about two, from pieces that come one after another.

All sums are float64. Must not know: where the pieces come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

AT_ONCE = 1 << 18  # elements that are widened to float64 at a time


@dataclass
class Statistics:
    """Of a tensor: its finite values' mean, standard deviation (of all values, not of a sample), least and largest."""

    count: int = 0
    num_nan: int = 0
    num_infinite: int = 0
    mean: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    _squares: float = 0.0  # sum of squared distances from the mean

    @property
    def num_finite(self) -> int:
        return self.count - self.num_nan - self.num_infinite

    @property
    def std(self) -> float:
        return math.sqrt(self._squares / self.num_finite) if self.num_finite else math.nan

    def add(self, piece: Tensor) -> None:
        """Take in a piece. Source of the merging of means: Chan, Golub, LeVeque 1979."""
        for part in piece.split(AT_ONCE):
            self._add(as_doubles(part))

    def _add(self, values: Tensor) -> None:
        finite = torch.isfinite(values)
        self.count += values.numel()
        if not finite.all():
            self.num_nan += int(torch.isnan(values).sum())
            self.num_infinite += int(torch.isinf(values).sum())
            values = values[finite]
        if not values.numel():
            return
        before, new = self.num_finite - values.numel(), values.numel()
        mean = values.mean().item()
        distance = mean - self.mean
        self._squares += (values - mean).square().sum().item() + distance**2 * before * new / (before + new)
        self.mean += distance * new / (before + new)
        self.min, self.max = min(self.min, values.min().item()), max(self.max, values.max().item())

    def as_dict(self) -> dict[str, float | int | None]:
        if not self.num_finite:
            numbers = dict.fromkeys(("mean", "std", "min", "max"))
        else:
            numbers = {"mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        return {**numbers, "nan": self.num_nan, "infinite": self.num_infinite}


def statistics_of(pieces: Iterable[Tensor]) -> Statistics:
    found = Statistics()
    for piece in pieces:
        found.add(piece)
    return found


@dataclass
class Distance:
    """How far two tensors of one shape are apart. num_different counts elements whose bits differ."""

    count: int = 0
    num_different: int = 0
    max_difference: float = 0.0
    _squares: float = 0.0
    _norm: float = 0.0

    @property
    def relative_norm(self) -> float:
        """The norm of the difference over that of the first tensor."""
        if self._squares == 0:
            return 0.0
        return math.sqrt(self._squares / self._norm) if self._norm else math.inf

    def add(self, one: Tensor, other: Tensor) -> None:
        """Take in the same elements of both."""
        for of_one, of_other in zip(one.split(AT_ONCE), other.split(AT_ONCE)):
            self._add(of_one, of_other)

    def _add(self, one: Tensor, other: Tensor) -> None:
        self.count += one.numel()
        if one.dtype == other.dtype:
            bits = (bits_of(one) != bits_of(other)).any(-1)
            if not bits.any():
                self._norm += as_doubles(one).square().sum().item() if one.numel() else 0.0
                return
            self.num_different += int(bits.sum())
        a, b = as_doubles(one), as_doubles(other)
        if one.dtype != other.dtype:
            self.num_different += int((a != b).sum())
        gap = torch.where(a == b, 0.0, a - b).abs()  # infinities of one sign are not apart
        gap = torch.where(torch.isnan(a) & torch.isnan(b), 0.0, gap)
        largest = gap.max().item()
        self.max_difference = largest if math.isnan(largest) else max(self.max_difference, largest)
        self._squares += gap.square().sum().item()
        self._norm += a.square().sum().item()


def bits_of(piece: Tensor) -> Tensor:
    """uint8 [numel, bytes of an element]."""
    return piece.contiguous().view(torch.uint8).reshape(piece.numel(), -1)


def as_doubles(piece: Tensor) -> Tensor:
    if piece.is_complex():
        piece = torch.view_as_real(piece.resolve_conj()).reshape(-1)
    return (piece.float() if piece.is_floating_point() and piece.dtype.itemsize == 1 else piece).double()
