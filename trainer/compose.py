"""The config that a command line asks for, composed with Hydra and not yet checked.

Owns: the flags, Hydra (which composes the options of groups and nothing else), the order in which values win.
Must not know: what a config is used for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.config import SECTIONS, with_defaults
from trainer.errors import ConfigError
from trainer.overrides import Override, apply_values, parse
from trainer.targets import nearest


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
    with hydra_of(flags) as hydra:
        options, values = split_options(hydra, rest)
        chosen = composed_by_hydra(hydra, flags.config_name, [override.text for override in options])
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


class hydra_of:
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


def run_mode() -> Any:
    from hydra.types import RunMode

    return RunMode.RUN


def composed_by_hydra(hydra: Any, config_name: str, overrides: list[str]) -> DictConfig:
    """What Hydra composes of the groups' options; its errors become ConfigErrors with the option that may be meant."""
    import yaml
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return hydra.compose_config(config_name, overrides, run_mode(), with_log_configuration=False, from_shell=False)
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
