"""`fairtrain-eval FILE… task=… [overrides]`: the metrics of checkpoints on the validation subsets.

Neither the training data nor an optimizer is built, nothing is written. The numbers are those that a run's validation
logs, bit by bit. Several checkpoints give a table. Status: 0 done; 2 bad input; 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

import distributed_utils
from checkpoint_file import CheckpointNotFoundError
from trainer import launch
from trainer.compose import Composed, compose, parse_flags, require_task
from trainer.config import complete_config, get_target
from trainer.data import valid_subsets
from trainer.errors import ConfigError
from trainer.lr_scheduler import Fixed
from trainer.printed import as_json, as_long_as_it_is_read, show, table
from trainer.tools.opened import mapping, open_any
from trainer.trainer import Trainer

BAD_INPUT = 2


@as_long_as_it_is_read
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a task in the current folder
    arguments = parser().parse_intermixed_args(argv)
    try:
        files, overrides = apart(arguments.words)
        cfg = config_for(files, overrides, arguments)
    except (ConfigError, CheckpointNotFoundError) as error:
        print(f"fairtrain-eval: {error}", file=sys.stderr)
        return BAD_INPUT

    def run() -> int:
        launch.set_num_threads(cfg.common.num_threads)
        rows = evaluated(cfg, files, arguments.ema)
        if distributed_utils.is_master():
            show(as_json(rows) if arguments.json else "\n".join(lines_of(rows)))
        return 0

    ranks = [sys.executable, "-m", "trainer.tools.eval"]
    return launch.run(run, cfg.distributed_training, argv, cpu=cfg.common.cpu, command=ranks)


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="fairtrain-eval",
        description="Metrics of checkpoints on the validation subsets, without the training data or an optimizer.",
    )
    command.add_argument(
        "words", nargs="+", metavar="FILE|OVERRIDE", help="checkpoints, and what fairtrain takes: task=…"
    )
    command.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="averaged weights, or trained ones (default: ema.ema_validate)",
    )
    command.add_argument("--config-dir", metavar="DIR", help="as of fairtrain: a folder with options of your own")
    command.add_argument(
        "--json", action="store_true", help="for programs: a list with an object for each file and subset"
    )
    return command


def apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(checkpoints, overrides). Raises: ConfigError, CheckpointNotFoundError."""
    files = [os.path.expanduser(word) for word in words if "=" not in word or os.path.exists(word)]
    overrides = [word for word in words if "=" in word and not os.path.exists(word)]
    if not files:
        raise ConfigError("which checkpoint? fairtrain-eval FILE… task=…")
    missing = next((path for path in files if not os.path.exists(path)), None)
    if missing is not None:
        raise CheckpointNotFoundError(missing, "no such file or folder")
    return files, overrides


def config_for(files: Sequence[str], overrides: list[str], arguments: argparse.Namespace) -> Any:
    """The config that is typed; what its model leaves open (null) is as the first checkpoint has it."""
    flags = parse_flags(overrides)
    flags.config_dir = arguments.config_dir
    composed = compose(flags)
    require_task(composed.cfg)
    _fill_model(composed, files[0])
    cfg = composed.cfg
    if arguments.ema is None:
        arguments.ema = bool(cfg.ema.ema_validate)
    cfg.ema.store_ema = cfg.ema.ema_validate = False  # the average is loaded into the model itself
    if not (cfg.optimization.max_update or cfg.optimization.max_epoch or cfg.optimization.stop_time_hours):
        cfg.optimization.max_update = 1
    cfg = complete_config(cfg)
    if not valid_subsets(cfg.dataset):
        raise ConfigError("dataset.valid_subset is empty: name what to evaluate on, such as dataset.valid_subset=valid")
    return cfg


def _fill_model(composed: Composed, path: str) -> None:
    with open_any(path) as checkpoint:
        saved = mapping(mapping(checkpoint.state.get("cfg")).get("model"))
    model = composed.cfg.model
    if model is None or saved.get("_target_") != model.get("_target_"):
        return
    for key, value in saved.items():
        if key in model and model[key] is None and (value is None or isinstance(value, (bool, int, float, str))):
            model[key] = value


def evaluated(cfg: Any, files: Sequence[str], ema: bool) -> list[dict[str, Any]]:
    """A row for each checkpoint and subset. All ranks call it."""
    trainer = evaluator_class(get_target(cfg.task, Trainer))(cfg)
    rows = []
    for path in files:
        num_updates = load(trainer, path, ema)
        for subset in valid_subsets(cfg.dataset):
            stats = trainer.validate(subset)
            rows.append({"file": path, "num_updates": num_updates, "subset": subset, "ema": ema, "metrics": stats})
    return rows


def evaluator_class(task: type[Trainer]) -> type[Trainer]:
    """The task's class, for which no training data and no optimizer state are made."""

    class Evaluator(task):
        evaluates_only = True

        def build_optimizer(self, named_parameters: list) -> torch.optim.Optimizer:
            return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.0)

        def build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
            return Fixed(optimizer, lr=0.0, max_update=0)

        def dataset(self, split: str) -> Any:
            if split == self.cfg.dataset.train_subset and split not in valid_subsets(self.cfg.dataset):
                raise ConfigError(
                    f"{task.__name__} asks for its training data (dataset.train_subset={split}) to be evaluated"
                )
            return super().dataset(split)

    return Evaluator


def load(trainer: Trainer, path: str, ema: bool) -> int | None:
    """Parameters and buffers into the trainer's modules; averaged ones where they are wanted. Returns the update."""
    trainer.load_model(path)
    with open_any(path) as checkpoint:
        if ema:
            average = mapping(checkpoint.extra_state.get("ema"))
            if not average:
                raise ConfigError(f"{path} holds no average of the weights: leave --ema out, or type --no-ema")
            own = trainer.model.state_dict()
            checkpoint.reader.copy([(average[name], own[name]) for name in own if name in average])
        return checkpoint.num_updates


def lines_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    header = ["checkpoint", "update", "subset", *names]
    cells = [
        [row["file"], "-" if row["num_updates"] is None else row["num_updates"], row["subset"]]
        + [f"{row['metrics'][name]:.6g}" if name in row["metrics"] else "-" for name in names]
        for row in rows
    ]
    return table(cells, header, indent="")


def command() -> None:
    """The console script: leaves with the status whatever threads are still there."""
    launch.leave(main())


if __name__ == "__main__":
    command()
