"""`fairtrain`: composes the config with Hydra, checks it, launches the ranks, leaves with the run's exit status.

Owns: the command line. Values typed come last, over the options of the groups, over the defaults of the dataclasses;
with `resume=DIR` over the config that is saved there. Hydra composes and nothing else: no output folder, no logging.
Must not know: how a run trains (trainer.train does), how ranks are started (trainer.launch).

Exit status: 0 done; 2 bad input, found before the first update; 75 stopped early with a checkpoint: start me again;
1 anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from trainer.compose import Composed, compose, composed_by_hydra, hydra_of, parse_flags, require_task, run_mode
from trainer.config import NODES, complete_config, section_classes
from trainer.errors import ConfigError

DONE, FAILED, BAD_INPUT = 0, 1, 2


def main() -> NoReturn:
    """The command. Leaves by os._exit: destructors of threads and libraries were seen to change the status."""
    status = run(sys.argv[1:])
    from trainer.launch import leave

    leave(status)


def run(argv: Sequence[str]) -> int:
    """Do what the command line says. Returns the exit status; errors are printed, never raised."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # a task in the current folder, as `python -m trainer` finds it
    try:
        return _run(argv)
    except ConfigError as error:
        print(f"fairtrain: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # of what is printed here: a run reports its own errors
        return DONE
    except Exception:
        traceback.print_exc()
        return FAILED


def _run(argv: Sequence[str]) -> int:
    flags = parse_flags(argv)
    if flags.help:
        print(help_text(flags))
        return DONE
    if flags.info:
        with hydra_of(flags) as hydra:
            hydra.show_info(flags.info, flags.config_name, flags.overrides, run_mode())
        return DONE
    if flags.multirun:
        from trainer import sweep

        return sweep.run(flags)
    composed = compose(flags)
    if flags.cfg:
        print(_shown(flags, composed), end="")
        return DONE
    cfg = complete_config(require_task(composed.cfg))
    _tell(composed.notices)
    return _launch(cfg, composed.typed, argv)


def _tell(notices: Sequence[str]) -> None:
    """Of the processes that compose the same config one tells them."""
    if notices:
        from trainer import launch

        if launch.speaks_for_all():
            for notice in notices:
                print(f"fairtrain: {notice}", file=sys.stderr)


def _launch(cfg: DictConfig, typed: list[str], argv: Sequence[str]) -> int:
    from trainer import launch

    heartbeat = launch.Heartbeat()

    def train() -> int:
        from trainer import train

        launch.set_num_threads(cfg.common.num_threads)
        return train.main(cfg, typed, heartbeat)

    return launch.run(train, cfg.distributed_training, list(argv), cpu=cfg.common.cpu, heartbeat=heartbeat)


def help_text(flags: argparse.Namespace) -> str:
    """Usage, the options of each group, and every field with its default and meaning."""
    import dataclasses

    lines = [
        "fairtrain task=OPTION [group=OPTION ...] [section.field=value ...] [flags]",
        "fairtrain resume=DIR [...]         continue the run in DIR; what is typed comes last",
        "",
        "Flags: --cfg job, --multirun, --config-dir DIR, --config-name NAME, --info, --help",
        "Status: 0 done, 2 bad input, 75 stopped with a checkpoint (start me again), 1 anything else",
        "",
        "Groups:",
    ]
    with hydra_of(flags) as hydra:
        lines += [f"  {group}={'|'.join(hydra.config_loader.get_group_options(group))}" for group in NODES]
    lines += ["", "  run_dir=outputs/${task_name}", "      the folder of the run; the same command again continues it"]
    for name, cls in section_classes().items():
        lines += ["", f"{name}: {(cls.__doc__ or '').strip().splitlines()[0]}"]
        default = cls()
        for entry in dataclasses.fields(cls):
            lines += [
                f"  {name}.{entry.name}={_yaml_word(getattr(default, entry.name))}",
                f"      {entry.metadata.get('help', '')}",
            ]
    return "\n".join(lines)


def _yaml_word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _shown(flags: argparse.Namespace, composed: Composed) -> str:
    if flags.cfg == "job":
        cfg = composed.cfg
    else:
        with hydra_of(flags) as hydra:
            cfg = composed_by_hydra(hydra, flags.config_name, [override.text for override in composed.options])
        if flags.cfg == "hydra":
            cfg = OmegaConf.create({"hydra": cfg.hydra})
        else:
            cfg = OmegaConf.merge({"hydra": cfg.hydra}, composed.cfg)
    if flags.package:
        cfg = OmegaConf.select(cfg, flags.package)
    return OmegaConf.to_yaml(cfg, resolve=flags.resolve) if OmegaConf.is_config(cfg) else f"{cfg}\n"
