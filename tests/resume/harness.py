"""Run sessions of a toy run in processes of their own, and compare two runs bit by bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.dist.harness import Outcome, run_ranks_to_any_end

# What may differ between a run and its twin: who it is, where it lies, and how long it took.
PRIVATE = {"run_id", "run_dir", "save_dir", "previous_training_time", "wall", "num_workers"}


def config(run_dir: Path, **sections: Any) -> dict:
    """The config of a toy run; `sections` are merged over the defaults, section by section."""
    base = {
        "run_dir": str(run_dir),
        "task_name": "toy",
        "task": {"_target_": "tests.resume.task.Toy"},
        "model": None,
        "criterion": None,
        "optimizer": {"_target_": "torch.optim.AdamW", "weight_decay": 0.01},
        "lr_scheduler": {"_target_": "trainer.lr_scheduler.Cosine", "warmup_updates": 3},
        "common": {"seed": 7, "log_format": "none", "cpu": True, "num_threads": 1},
        "dataset": {"batch_size": 4, "batch_size_valid": 4},
        "optimization": {"max_update": 22, "lr": 0.01, "clip_norm": 1.0},
        "checkpoint": {},
        "ema": {"store_ema": True, "ema_decay": 0.9},
    }
    for name, values in sections.items():
        base[name] = {**(base.get(name) or {}), **values} if isinstance(values, dict) else values
    base["checkpoint"] = {"save_dir": str(run_dir / "checkpoints"), **base["checkpoint"]}
    return base


def _session(cfg: dict) -> int:
    # Imported here: the fork server that starts the ranks has imported torch alone.
    from trainer.config import complete_config
    from trainer.train import main

    return main(complete_config(cfg))


def session(cfg: dict, world_size: int = 1, stop: str = "", timeout: float = 120) -> list[Outcome]:
    """One session of a run in new processes; `stop` is TEST_STOP. Returns every rank's outcome, its value the status."""
    env = {"TEST_STOP": stop} if stop else {"TEST_STOP": ":"}
    return run_ranks_to_any_end(_session, world_size, cfg, timeout=timeout, env=env)


def run_to_status(cfg: dict, status: int, world_size: int = 1, stop: str = "", timeout: float = 120) -> None:
    outcomes = session(cfg, world_size, stop, timeout)
    stories = "\n".join(f"rank {o.rank}: {o.value} {o.error}{o.stack if o.hung else ''}" for o in outcomes)
    assert all(outcome.value == status for outcome in outcomes), stories


def read_log(run_dir: Path, *events: str) -> list[dict]:
    lines = [json.loads(line) for line in (Path(run_dir) / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if not events or line["event"] in events]


def load(run_dir: Path, name: str = "checkpoint_last.pt") -> dict:
    return torch.load(Path(run_dir) / "checkpoints" / name, weights_only=True, map_location="cpu")


def first_difference(one: Any, other: Any, path: str = "") -> str | None:
    """Where two nests first differ, None if they are equal bit for bit, types and key order of dictionaries included."""
    if type(one) is not type(other):
        return f"{path}: {type(one).__name__} against {type(other).__name__}"
    if isinstance(one, dict):
        keys = [k for k in one if k not in PRIVATE], [k for k in other if k not in PRIVATE]
        if keys[0] != keys[1]:
            return f"{path}: keys {keys[0]} against {keys[1]}"
        return _first(first_difference(one[key], other[key], f"{path}.{key}") for key in keys[0])
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{path}: {len(one)} against {len(other)} entries"
        return _first(first_difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(one, other)))
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{path}: {one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
        same = torch.equal(_bits(one), _bits(other))
        return None if same else f"{path}: {(one.double() - other.double()).abs().max().item()} apart"
    if isinstance(one, float):
        same = one == other or (one != one and other != other)
        return None if same else f"{path}: {one!r} against {other!r}"
    return None if one == other else f"{path}: {one!r} against {other!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _first(differences) -> str | None:
    return next((difference for difference in differences if difference is not None), None)


def assert_same_log(one: Path, other: Path) -> None:
    """Each logged update, validation and epoch of two runs agrees bit by bit."""
    for event in ("train", "valid", "epoch"):
        difference = first_difference(read_log(one, event), read_log(other, event), event)
        assert difference is None, difference


def assert_same_run(one: Path, other: Path, names: bool = True) -> None:
    """Two finished runs agree bit by bit: each logged update and validation, the last checkpoint, the files' names."""
    assert_same_log(one, other)
    difference = first_difference(load(one), load(other), "checkpoint_last")
    assert difference is None, difference
    if names:
        assert sorted(os.listdir(one / "checkpoints")) == sorted(os.listdir(other / "checkpoints"))
