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
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from trainer.config import NODES, SECTIONS, complete_config, section_classes, with_defaults
from trainer.errors import ConfigError
from trainer.overrides import Override, apply_values, parse
from trainer.targets import nearest

DONE, FAILED, BAD_INPUT, START_ME_AGAIN = 0, 1, 2, 75


def main() -> NoReturn:
    """The console script. Leaves by os._exit: destructors of threads and libraries were seen to change the status."""
    take_early_signals()
    status = run(sys.argv[1:])
    from trainer.launch import leave

    leave(status)


def take_early_signals() -> None:
    """Until training takes the signals over: a request to stop ends the process with 75, one to save is too early.

    Importing torch takes seconds, in which a signal would otherwise end the process as a failure. The ranks of a launch
    keep the defaults: whoever started them knows why it ends them.
    """
    if "RANK" in os.environ:
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _leave_early)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _leave_early(number: int, frame: Any) -> NoReturn:
    os.write(
        2, f"fairtrain: stopped by {signal.Signals(number).name} before the first update; start me again\n".encode()
    )
    os._exit(START_ME_AGAIN)


def run(argv: Sequence[str]) -> int:
    """Do what the command line says. Returns the exit status; errors are printed, never raised."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # a task in the current folder, as `python -m trainer` finds it
    try:
        return _run(argv)
    except ConfigError as error:
        print(f"fairtrain: {error}", file=sys.stderr)
        return BAD_INPUT
    except Exception:
        traceback.print_exc()
        return FAILED


def _run(argv: Sequence[str]) -> int:
    flags = parse_flags(argv)
    if flags.help:
        print(help_text(flags))
        return DONE
    if flags.info:
        with _hydra(flags) as hydra:
            hydra.show_info(flags.info, flags.config_name, flags.overrides, _run_mode())
        return DONE
    if flags.multirun:
        from trainer import sweep

        return sweep.run(flags)
    composed = compose(flags)
    if flags.cfg:
        print(_shown(flags, composed), end="")
        return DONE
    cfg = complete_config(require_task(composed.cfg))
    for notice in composed.notices:
        print(f"fairtrain: {notice}", file=sys.stderr)
    return _launch(cfg, composed.typed, argv)


def _launch(cfg: DictConfig, typed: list[str], argv: Sequence[str]) -> int:
    from trainer import launch

    def train() -> int:
        from trainer import train

        launch.set_num_threads(cfg.common.num_threads)
        return train.main(cfg, typed)

    return launch.run(train, cfg.distributed_training, list(argv), cpu=cfg.common.cpu)


# The command line


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Flags and overrides in any order. argparse leaves with 2 on a flag that it does not know."""
    parser = argparse.ArgumentParser(prog="fairtrain", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument(
        "--info",
        "-i",
        nargs="?",
        const="all",
        choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"],
    )
    return parser.parse_intermixed_args(list(argv))


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
    with _hydra(flags) as hydra:
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
        with _hydra(flags) as hydra:
            cfg = _composed_by_hydra(hydra, flags.config_name, [override.text for override in composed.options])
        if flags.cfg == "hydra":
            cfg = OmegaConf.create({"hydra": cfg.hydra})
        else:
            cfg = OmegaConf.merge({"hydra": cfg.hydra}, composed.cfg)
    if flags.package:
        cfg = OmegaConf.select(cfg, flags.package)
    return OmegaConf.to_yaml(cfg, resolve=flags.resolve) if OmegaConf.is_config(cfg) else f"{cfg}\n"


# Composing


@dataclass
class Composed:
    """A config as composed, not yet checked; what was typed, without `resume`; what to tell the user."""

    cfg: DictConfig
    typed: list[str]
    options: list[Override]
    notices: list[str] = field(default_factory=list)


def compose(flags: argparse.Namespace) -> Composed:
    """The config that the command line asks for, defaults filled in. Raises ConfigError."""
    overrides = [parse(text) for text in flags.overrides]
    resume = [override for override in overrides if override.key == "resume"]
    rest = [override for override in overrides if override.key != "resume"]
    with _hydra(flags) as hydra:
        options, values = split_options(hydra, rest)
        chosen = _composed_by_hydra(hydra, flags.config_name, [override.text for override in options])
    choices = chosen.hydra.runtime.choices
    OmegaConf.set_struct(chosen, False)
    del chosen["hydra"]
    if "task_name" not in chosen and choices.get("task"):
        chosen["task_name"] = choices["task"]
    typed = [override.text for override in rest]
    if not resume:
        cfg = with_defaults(chosen)
        apply_values(cfg, values)
        return Composed(cfg, typed, options)
    from trainer import resume_folder

    cfg, notices = resume_folder.continued(resume[-1].raw or "", chosen, options, values)
    return Composed(cfg, typed, options, notices)


def split_options(hydra: Any, overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """(options of groups and Hydra's own settings, values). A folder of the config search path makes a group."""
    options, values = [], []
    for override in overrides:
        group = override.key.partition("@")[0]
        is_group = "." not in group and group not in SECTIONS and bool(hydra.config_loader.get_group_options(group))
        is_value = (override.raw or "").startswith("{")  # model={...} gives the node itself
        if override.key.startswith("hydra") and override.key[5:6] in (".", "/"):
            options.append(override)
        else:
            (options if is_group and not is_value else values).append(override)
    return options, values


def require_task(cfg: DictConfig) -> DictConfig:
    if not cfg.task or "_target_" not in cfg.task:
        raise ConfigError("no task is chosen: task=OPTION (see fairtrain --help), or task._target_=my_module.MyTrainer")
    return cfg


def config_folder() -> str:
    """The folder of config.yaml: inside the package where a wheel was installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(
        f"no config.yaml in {package / 'configs'} or {package.parent / 'configs'}: this installation is not whole"
    )


class _hydra:
    """Hydra over our config folder and `--config-dir`, as a context; its global state is cleared at the end."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._config_dir = flags.config_dir

    def __enter__(self) -> Any:
        from hydra._internal.hydra import Hydra
        from hydra._internal.utils import create_config_search_path
        from hydra.core.global_hydra import GlobalHydra

        search_path = create_config_search_path(config_folder())
        if self._config_dir:
            folder = Path(self._config_dir).expanduser().resolve()
            if not folder.is_dir():
                raise ConfigError(f"--config-dir {self._config_dir}: there is no such folder")
            search_path.prepend("command-line", f"file://{folder}", anchor="schema")
        GlobalHydra.instance().clear()
        return Hydra.create_main_hydra2(task_name="fairtrain", config_search_path=search_path)

    def __exit__(self, *error: Any) -> None:
        from hydra.core.global_hydra import GlobalHydra

        GlobalHydra.instance().clear()


def _run_mode() -> Any:
    from hydra.types import RunMode

    return RunMode.RUN


def _composed_by_hydra(hydra: Any, config_name: str, overrides: list[str]) -> DictConfig:
    """What Hydra composes of the groups' options; its errors become ConfigErrors with the option that may be meant."""
    import yaml
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return hydra.compose_config(config_name, overrides, _run_mode(), with_log_configuration=False, from_shell=False)
    except MissingConfigException as error:
        raise ConfigError(_missing_option(error)) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        cause = f": {error.__cause__}" if error.__cause__ is not None and str(error.__cause__) not in str(error) else ""
        raise ConfigError(f"{error}{cause}") from error


def _missing_option(error: Any) -> str:
    """A group's option, or a whole config, that no folder of the search path has."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if not group or not error.options:
        return str(error).partition("Config search path")[0].strip()
    meant = nearest(name, error.options).replace("mean ", f"mean {group}=")
    return f"there is no option {group}={name}.{meant} Options: {', '.join(error.options)}"
