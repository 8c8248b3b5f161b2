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
from trainer.errors import ConfigError


def first_difference(facts: Mapping[str, Any], group: Any = None) -> tuple[int, str, Any, Any] | None:
    """Collective. (rank, key, value of rank 0, value of that rank) of the first fact in which a rank differs from rank 0.

    Args: facts: plain values by name. None stands for one that a rank does not have.
    """
    if distributed_utils.get_world_size(group) == 1:
        return None
    first, *others = distributed_utils.all_gather_list(dict(facts), group)
    for rank, other in enumerate(others, 1):
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                return rank, key, first.get(key), other.get(key)
    return None


def check_start(cfg: DictConfig, task: type) -> None:
    """Collective. Raises: ConfigError on all ranks where they were started with other settings or other code."""
    different = first_difference({**_settings(cfg), **_code(task)})
    if different is not None:
        rank, key, here, there = different
        raise ConfigError(
            f"{key} is {here} on rank 0 and {there} on rank {rank}: all ranks must be started with the same command and the "
            "same code. A value that each host must have for itself is taken from its environment: KEY='${oc.env:NAME}'"
        )


def check_model(named_tensors: Iterable[tuple[str, Tensor]], group: Any = None) -> None:
    """Collective. Raises: ConfigError on all ranks where a parameter or buffer is not the same everywhere."""
    facts = {name: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for name, tensor in named_tensors}
    different = first_difference(facts, group)
    if different is not None:
        rank, name, here, there = different
        raise ConfigError(
            f"the models of the ranks differ: {name} is {here or 'absent'} on rank 0 and {there or 'absent'} on rank "
            f"{rank}. build_model() must give the same on all ranks"
        )


def check_data(datasets: Mapping[str, Any]) -> None:
    """Collective. Raises: ConfigError on all ranks where a dataset has another length or fingerprint than on rank 0."""
    facts = {}
    for split, dataset in datasets.items():
        facts[f"the number of samples of {split}"] = len(dataset)
        fingerprint = getattr(dataset, "fingerprint", None)
        facts[f"the fingerprint of {split}"] = str(fingerprint()) if callable(fingerprint) else ""
    different = first_difference(facts)
    if different is not None:
        rank, what, here, there = different
        raise ConfigError(f"{what} is {here} on rank 0 and {there} on rank {rank}: all ranks must see the same data")


def _settings(cfg: DictConfig) -> dict[str, str]:
    """Each value by its key, interpolations as they were typed: what they mean may be a matter of the host."""
    return {key: repr(value) for key, value in _flat(OmegaConf.to_container(cfg, resolve=False), "")}


def _flat(value: Any, key: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{key}.{name}" if key else str(name))


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
