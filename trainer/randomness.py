"""Randomness as a function of position: every seed is a hash of where the run is.

Owns: how a seed is derived and how the generators that user code draws from are seeded.
No generator's state is ever saved or restored: whoever draws is seeded again from its position first.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed that is the hash of `parts`. A sum such as seed + epoch would make two runs share an order."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seed torch's default generators (CPU and current accelerator), `random` and numpy's global generator.

    Uses each generator's own `manual_seed`: `torch.manual_seed` also walks through all device types, which
    takes eighty times as long, and this runs once per micro-batch and once per sample.
    """
    torch.default_generator.manual_seed(seed)
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
