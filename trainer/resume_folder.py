"""`resume=DIR`: the config of the run in DIR, with what is typed now on top.

Owns: which value wins, and what a saved config may name. Its words are data: references in it are not resolved, its
`_target_`s are held against a list before anything is imported. Must not know: checkpoints, Hydra.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from checkpoint_file.limits import shown
from trainer.config import NODES, SECTIONS, TEXTS, node_types, section_classes, with_defaults
from trainer.errors import ConfigError
from trainer.overrides import Override, apply_values
from trainer.run_folder import saved_config
from trainer.targets import get_target, saved_target_problem, target_fields

MISSING = "???"


def continued(
    run_dir: str, chosen: DictConfig, options: Sequence[Override], values: Sequence[Override]
) -> tuple[DictConfig, list[str]]:
    """The config with which the run in `run_dir` goes on, and notices for the user.

    Args:    chosen: what the typed options compose to; of it only the sections of typed options are taken.
    Raises:  ConfigError: no saved config, a saved name that is not trusted, a saved reference that must be typed again.
    """
    if not run_dir:
        raise ConfigError("resume= needs the folder of a run: resume=outputs/digits")
    run_dir = os.path.expanduser(run_dir)
    saved, source = saved_config(run_dir)
    notices = [f"resume={run_dir}: the config saved in {source} is the base", *_drop_unknown(saved)]
    _follow(saved, run_dir)
    replaced = _take_options(saved, chosen, options)
    typed = {override.key for override in values}
    if not source.endswith(".yaml"):
        _check_written_paths(saved, run_dir, source, typed)
    references = list(_blank_references(saved, replaced))
    _check_targets(saved, replaced, typed, _modules(chosen, replaced, values))
    notices += _drop_unknown_of_nodes(saved, replaced, typed)
    cfg = with_defaults(saved)
    apply_values(cfg, values)
    _check_references(cfg, references)
    return cfg, notices


def _drop_unknown(saved: dict) -> list[str]:
    """Leave out fields of another version, and say which."""
    dropped = [key for key in saved if key not in (*TEXTS, *SECTIONS, *NODES)]
    for key in dropped:
        del saved[key]
    for name, cls in section_classes().items():
        if not isinstance(saved.get(name), dict):
            saved.pop(name, None)
            continue
        unknown = [key for key in saved[name] if key not in cls.__dataclass_fields__]
        dropped += [f"{name}.{key}" for key in unknown]
        saved[name] = {key: value for key, value in saved[name].items() if key not in unknown}
    return (
        [f"the saved config has fields that this version does not know, left out: {', '.join(dropped)}"]
        if dropped
        else []
    )


def _drop_unknown_of_nodes(saved: dict, replaced: set[str], typed: set[str]) -> list[str]:
    """Leave out what the class of a saved node no longer takes, and say what. Targets have been found good."""
    dropped = []
    for name in NODES:
        node = saved.get(name)
        if name in replaced or not isinstance(node, dict) or not {name, f"{name}._target_"}.isdisjoint(typed):
            continue
        if not isinstance(node.get("_target_"), str) or node["_target_"] == MISSING:
            continue
        target = get_target(node, where=f"{name}._target_")
        fields = target_fields(target)
        if fields.open or (name == "task" and not hasattr(target, "Config")):
            continue
        unknown = [key for key in node if key != "_target_" and key not in node_types(name, fields)]
        dropped += [f"{name}.{key}={node.pop(key)!r}" for key in unknown]
    return [f"saved settings that their classes no longer take, left out: {', '.join(dropped)}"] if dropped else []


def _follow(saved: dict, run_dir: str) -> None:
    """`run_dir` is where the run lies now; paths below the old one follow."""
    old = saved.get("run_dir")
    if isinstance(old, str) and old:
        for section in SECTIONS:
            for key, value in saved.get(section, {}).items():
                if isinstance(value, str) and (value == old or value.startswith(old.rstrip("/") + "/")):
                    saved[section][key] = run_dir.rstrip("/") + value[len(old.rstrip("/")) :]
    saved["run_dir"] = run_dir


def _check_written_paths(saved: dict, run_dir: str, source: str, typed: set[str]) -> None:
    """A config that comes from a checkpoint chooses no folder outside of the run's to write into."""
    for section, key in (("checkpoint", "save_dir"), ("common", "tensorboard_logdir")):
        value, name = saved.get(section, {}).get(key), f"{section}.{key}"
        if not isinstance(value, str) or "${" in value or name in typed:
            continue
        folder = os.path.realpath(run_dir)
        path = os.path.realpath(os.path.join(folder if key != "save_dir" else os.curdir, os.path.expanduser(value)))
        if os.path.commonpath([folder, path]) != folder:
            raise ConfigError(
                f"the config saved in {source} would write into {shown(value)}, outside of {run_dir}. "
                f"If that is meant, type it: {name}={value}"
            )


def _take_options(saved: dict, chosen: DictConfig, options: Sequence[Override]) -> set[str]:
    """Replace the sections whose option is typed. Returns their names."""
    replaced = set()
    plain = OmegaConf.to_container(chosen, resolve=False)
    for option in options:
        group = option.key.partition("@")[0]
        if group.startswith("hydra"):
            continue
        if group not in NODES:
            raise ConfigError(
                f"{option.text}: resume=DIR takes options of {', '.join(NODES)} and values, no other groups"
            )
        saved[group] = plain.get(group)
        replaced.add(group)
        if group == "task":
            saved["task_name"] = plain.get("task_name")
    return replaced


def _blank_references(tree: Any, replaced: Iterable[str] = (), where: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of each saved reference, which becomes '???': a value that must be given."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        name = f"{where}.{key}" if where else str(key)
        if not where and key in replaced:
            continue
        if isinstance(value, str) and "${" in value:
            tree[key] = MISSING
            yield name, value
        elif isinstance(value, (dict, list)):
            yield from _blank_references(value, where=name)


def _check_references(cfg: DictConfig, references: Iterable[tuple[str, str]]) -> None:
    owed = [(key, text) for key, text in references if _is_blank(cfg, key)]
    if owed:
        lines = [f"  - {key} was saved as the reference {text}; type it again: '{key}={text}'" for key, text in owed]
        raise ConfigError("\n".join(["references in a saved config are not resolved again:", *lines]))


def _is_blank(cfg: DictConfig, key: str) -> bool:
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    if isinstance(node, DictConfig):
        return OmegaConf.is_missing(node, last)
    return OmegaConf.is_list(node) and int(last) < len(node) and OmegaConf.is_missing(node, int(last))


def _modules(chosen: DictConfig, replaced: Iterable[str], values: Sequence[Override]) -> set[str]:
    """Modules that the command names now: those of typed targets and of typed options."""
    targets = [override.raw for override in values if override.key.endswith("_target_")]
    targets += [chosen[name].get("_target_") for name in replaced if chosen.get(name)]
    return {target.strip("'\"").rpartition(".")[0] for target in targets if isinstance(target, str) and "." in target}


def _check_targets(saved: dict, replaced: set[str], typed: set[str], modules: set[str]) -> None:
    """Hold each saved `_target_` that stays against what may be imported; what is typed is not the file's."""
    words = {key: value for key, value in saved.items() if key not in replaced and key not in typed}
    problems = [saved_target_problem(target, key, modules) for key, target in _targets(words) if key not in typed]
    found = [problem for problem in problems if problem]
    if found:
        raise ConfigError("\n".join(found))


def _targets(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        name = f"{where}.{key}" if where else str(key)
        if key == "_target_":
            yield name, value
        elif isinstance(value, (dict, list)):
            yield from _targets(value, name)
