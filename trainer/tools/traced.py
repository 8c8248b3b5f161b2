"""A run that writes down what it computes, update by update: what fairtrain-verify-resume starts in new processes.

    python -m trainer.tools.traced TRACE STOP_AT OVERRIDE…

Each rank writes TRACE.RANK, a line for an update: digests of the batch, the numbers logged, and of each tensor after it;
and before each update a line with what the task and its datasets keep beside that. With STOP_AT > 0 the run is told to
stop at that update, as by a signal. Must not know: which runs are compared, and why.
"""

from __future__ import annotations

import dis
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from checkpoint_file.archive import crc32
from trainer.sharding import local_of
from trainer.trainer import Trainer

FROZEN_CLOCK = "FAIRTRAIN_FROZEN_CLOCK"  # environment: the seconds that time.time() gives for ever
MAX_DEPTH, MAX_ITEMS = 4, 10_000


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    from trainer import launch, train
    from trainer.compose import compose, parse_flags, require_task
    from trainer.config import complete_config
    from trainer.errors import ConfigError

    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    trace, stop_at, *overrides = argv
    freeze_clock()
    try:
        composed = compose(parse_flags(overrides))
        cfg = complete_config(require_task(composed.cfg))
    except ConfigError as error:
        print(f"fairtrain: {error}", file=sys.stderr)
        return 2

    def run() -> int:
        launch.set_num_threads(cfg.common.num_threads)
        return train.main(cfg, composed.typed, watch=lambda started: Recorder(started, trace, int(stop_at)).attach())

    command = [sys.executable, "-m", "trainer.tools.traced"]
    return launch.run(run, cfg.distributed_training, argv, cpu=cfg.common.cpu, command=command)


def freeze_clock() -> None:
    """Have time.time() and time.time_ns() stand still, where the environment asks for it."""
    seconds = os.environ.get(FROZEN_CLOCK)
    if seconds:
        time.time, time.time_ns = lambda: float(seconds), lambda: int(float(seconds) * 1e9)


class Recorder:
    """Stands between a run and its Trainer's `train_step`."""

    def __init__(self, run: Any, trace: str, stop_at: int) -> None:
        self._run, self._trainer, self._stop_at = run, run.trainer, stop_at
        self._file = open(f"{trace}.{run.trainer.data_parallel_rank}", "a", encoding="utf-8")
        self._step = run.trainer.train_step
        self._facts = {"num_workers": run.cfg.dataset.num_workers}

    def attach(self) -> None:
        self._trainer.train_step = self.train_step

    def train_step(self, samples: list) -> Any:
        trainer = self._trainer
        update = trainer.get_num_updates() + 1
        self._write({"before": update, "kept": kept_by(trainer), "state": state_digests(trainer), **self._facts})
        batch = {"indices": [list(one) for one in self._run.itr.last_indices], "batch": digest_of(samples)}
        if update == self._stop_at:
            self._run.requests.request_stop()
        stats = self._step(samples)
        numbers = {name: repr(value) for name, value in (stats or {}).items()}
        self._write({"update": update, **batch, "numbers": numbers, "state": state_digests(trainer)})
        return stats

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


# ---- digests


def state_digests(trainer: Any) -> dict[str, str]:
    """A digest of each tensor on this rank: parameters and buffers, then moments, then averages, then task state."""
    found: dict[str, str] = {}
    parts = [("model", trainer.model)]
    if isinstance(trainer.criterion, nn.Module):
        parts.append(("criterion", trainer.criterion))
    for part, module in parts:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found[f"{part}.{name}"] = digest_of(local_of(tensor))
    for name, tensor in trainer._named_parameters:
        for key, value in trainer.optimizer.state.get(tensor, {}).items():
            found[f"optimizer.{name}.{key}"] = digest_of(value)
    if trainer.ema is not None:
        found |= {f"ema.{name}": digest_of(local_of(value)) for name, value in trainer.ema._averages.items()}
    found["task_state"] = digest_of(trainer.task_state_dict())
    found["lr"] = repr(trainer.get_lr())
    return found


def digest_of(value: Any) -> str:
    """Some text that is equal for equal values, bit by bit; the order of containers counts."""
    checksum = 0
    for data in _bytes_of(value):
        checksum = crc32(data, checksum)
    return f"{checksum:08x}"


def _bytes_of(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        local = local_of(value).cpu().contiguous()
        yield f"{local.dtype}{tuple(local.shape)}".encode()
        yield local.reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _bytes_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _bytes_of(item)
    elif hasattr(value, "sample"):  # a DummyBatch
        yield from _bytes_of(value.sample)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, complex)):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()


# ---- what is kept beside the checkpoint


def kept_by(trainer: Any) -> dict[str, str]:
    """Values that the task's own class, model, criterion and datasets keep as attributes: name to what it was.

    Attributes that the Trainer itself sets are its own business, and so are tensors of modules.
    """
    own = attributes_set_by(Trainer)
    found: dict[str, str] = {}
    name = type(trainer).__name__
    for key, value in vars(trainer).items():
        if key not in own and key != "train_step":
            found |= dict(_described(value, f"{name}.{key}"))
    for part, module in (("model", trainer.model), ("criterion", trainer.criterion)):
        for path, inner in module.named_modules() if isinstance(module, nn.Module) else ():
            where = f"{part}.{path}" if path else part
            for key, value in _own_attributes(inner):
                found |= dict(_described(value, f"{where}.{key}"))
    for split, dataset in trainer._datasets.items():
        found |= dict(_described(dataset, f"dataset({split!r})"))
    return found


def attributes_set_by(cls: type) -> set[str]:
    functions = [value for value in vars(cls).values() if isinstance(value, FunctionType)]
    return {
        one.argval for function in functions for one in dis.get_instructions(function) if one.opname == "STORE_ATTR"
    }


def _own_attributes(module: nn.Module) -> Iterable[tuple[str, Any]]:
    of_torch = vars(nn.Module())
    return [
        (key, value) for key, value in vars(module).items() if key not in of_torch and not isinstance(value, nn.Module)
    ]


def _described(value: Any, where: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    generator = generator_state(value)
    if generator is not None:
        yield where, f"generator {generator}"
    elif isinstance(value, (Tensor, np.ndarray)):
        yield where, f"tensor {digest_of(value)}"
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        yield where, repr(value)[:200]
    elif depth >= MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, item in list(value.items())[:MAX_ITEMS]:
            yield from _described(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        if all(item is None or isinstance(item, (bool, int, float, str, Tensor)) for item in value):
            yield where, f"{len(value)} items {digest_of(list(value))}"
        else:
            for index, item in enumerate(value[:MAX_ITEMS]):
                yield from _described(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, (set, frozenset)):
        yield where, f"{len(value)} items {digest_of(sorted(map(repr, value)))}"
    elif hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, nn.Module, torch.optim.Optimizer)):
        for key, item in vars(value).items():
            yield from _described(item, f"{where}.{key}", depth + 1)


def generator_state(value: Any) -> str | None:
    """A digest of where a random generator stands; None for what is none."""
    if isinstance(value, torch.Generator):
        return digest_of(value.get_state())
    if isinstance(value, np.random.Generator):
        return digest_of(repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return digest_of(repr(value.get_state(legacy=False)))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return digest_of(repr(value.getstate()))
    return None


if __name__ == "__main__":
    from trainer.launch import leave

    leave(main())
