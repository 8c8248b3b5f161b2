"""What all ranks must have alike, found out before they meet in a collective that cannot tell them apart.

Owns: the comparison of facts, and which facts a run compares: its settings, its code, its model, its data.
Must not know: the Trainer, files, what is done with any of them.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

import distributed_utils
from trainer.config import flat
from trainer.data import fingerprint_of
from trainer.errors import ConfigError


def check_start(cfg: DictConfig, task: type) -> None:
    """Collective. Raises: ConfigError on all ranks where they were started with other settings or other code."""
    different = distributed_utils.first_difference(lambda: {**_settings(cfg), **_code(task)})
    if different is not None:
        rank, key, here, there = different
        raise ConfigError(
            f"{key} is {here} on rank 0 and {there} on rank {rank}: all ranks must be started with the same command and the "
            "same code. A value that each host must have for itself is taken from its environment: KEY='${oc.env:NAME}'"
        )


def check_model(named_tensors: Iterable[tuple[str, Tensor]], group: Any = None) -> None:
    """Collective. Raises: ConfigError on all ranks where a parameter or buffer is not the same everywhere."""
    different = distributed_utils.first_difference(
        lambda: {name: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in named_tensors}, group
    )
    if different is not None:
        rank, name, here, there = different
        raise ConfigError(
            f"the models of the ranks differ: {name} is {here or 'absent'} on rank 0 and {there or 'absent'} on rank "
            f"{rank}. build_model() must give the same on all ranks"
        )


def check_data(datasets: Mapping[str, Any]) -> None:
    """Collective. Raises: ConfigError on all ranks where a dataset has another length or fingerprint than on rank 0."""

    def facts() -> dict[str, Any]:
        lengths = {f"the number of samples of {split}": len(dataset) for split, dataset in datasets.items()}
        return lengths | {f"the fingerprint of {split}": fingerprint_of(d) for split, d in datasets.items()}

    different = distributed_utils.first_difference(facts)
    if different is not None:
        rank, what, here, there = different
        raise ConfigError(f"{what} is {here} on rank 0 and {there} on rank {rank}: all ranks must see the same data")


def _settings(cfg: DictConfig) -> dict[str, str]:
    """Each value by its key, interpolations as they were typed: what they mean may be a matter of the host."""
    return {key: repr(value) for key, value in flat(OmegaConf.to_container(cfg, resolve=False)).items()}


def _code(task: type) -> dict[str, str]:
    """Versions, and digests of this package and of the file that the task is written in."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    digests = {"the code of the package trainer": _digest(sources)}
    try:
        digests[f"the code of {task.__module__}"] = _digest([Path(inspect.getfile(task))])
    except (TypeError, OSError):
        pass  # written in a notebook or a console
    return {"the version of torch": str(torch.__version__), "the version of Python": platform.python_version(), **digests}


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
