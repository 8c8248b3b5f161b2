"""Small checkpoints for the tests of the tools, and commands run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from checkpoint_file import write_checkpoint_file
from trainer.tools import checkpoint as tool


def state(seed: int = 0, num_updates: int = 10, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """A state with all that a run saves: tied weights, a buffer, EMA, moments by name, position."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tied = random(4, 4)
    names = ["embed.weight", "layers.0.weight", "head.bias"]
    model = {
        "embed.weight": random(6, 4),
        "layers.0.weight": tied,
        "layers.1.weight": tied,
        "head.bias": random(3),
        "steps": torch.tensor(num_updates),
    }
    moments = {
        i: {"step": torch.tensor(float(num_updates)), "exp_avg": random(*model[name].shape).float()}
        for i, name in enumerate(names)
    }
    whole = {
        "format_version": 1,
        "run_id": "run",
        "cfg": {"task_name": "toy", "run_dir": "outputs/toy", "optimization": {"lr": 0.1}, "checkpoint": {}},
        "model": model,
        "criterion": {},
        "optimizer_history": [
            {
                "criterion_name": None,
                "optimizer_name": "AdamW",
                "lr_scheduler_name": "Fixed",
                "lr_scheduler_state": {},
                "num_updates": num_updates,
            }
        ],
        "last_optimizer_state": {
            "state": moments,
            "param_groups": [{"lr": 0.1, "params": [0, 1, 2], "param_names": names}],
        },
        "task_state": {},
        "extra_state": {
            "train_iterator": {"epoch": 2, "samples_in_epoch": 7},
            "best": 0.5,
            "previous_training_time": 3.0,
            "ema": {name: value.float() * 0.5 if value.is_floating_point() else value for name, value in model.items()},
        },
    }
    return {**whole, **changes}


def saved(path: Path, *arguments: Any, **changes: Any) -> Path:
    write_checkpoint_file(state(*arguments, **changes), path)
    return path


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def run(capsys: Any, *words: Any) -> tuple[int, str, str]:
    """(status, stdout, stderr) of fairtrain-checkpoint."""
    status = tool.main([str(word) for word in words])
    told = capsys.readouterr()
    return status, told.out, told.err


def run_json(capsys: Any, *words: Any) -> tuple[int, Any]:
    status, out, err = run(capsys, *words, "--json")
    assert not err, err
    return status, json.loads(out)
