"""The config of a run: completed, checked, made plain, compared.

Owns: the sections `common` and `optimization`, what crosses sections, the one error that lists all mistakes. The other
sections' dataclasses stand beside what they configure. Must not import: the Trainer, Hydra (omegaconf holds it).

A config is a DictConfig of checked sections (a dataclass each), of nodes (`task`, `model`, ...: a `_target_` and what
that class takes), and of `run_dir` and `task_name`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Optional

from omegaconf import BooleanNode, DictConfig, FloatNode, IntegerNode, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from trainer.errors import ConfigError
from trainer.fields import FieldError, fit, takes_null
from trainer.targets import (
    TargetFields,
    get_target,
    instantiate,
    is_schedule,
    is_trainer,
    nearest,
    target_fields,
)

__all__ = [
    "ABSENT",
    "NODES",
    "SECTIONS",
    "CommonConfig",
    "OptimizationConfig",
    "complete_config",
    "config_differences",
    "get_target",
    "instantiate",
    "section_classes",
    "to_plain",
    "typed_keys",
]

SECTIONS = ("common", "dataset", "optimization", "checkpoint", "distributed_training", "ema")
NODES = ("task", "model", "criterion", "optimizer", "lr_scheduler")
TEXTS = {"run_dir": "outputs/${task_name}", "task_name": None}  # top-level text: default
ABSENT = "(absent)"  # what config_differences gives for a key that one side has not


@dataclasses.dataclass
class CommonConfig:
    """What concerns the whole run."""

    seed: int = dataclasses.field(
        default=1, metadata={"help": "all randomness is a function of it and of the position"}
    )
    cpu: bool = dataclasses.field(default=False, metadata={"help": "stay on the CPU although there is an accelerator"})
    fp16: bool = dataclasses.field(default=False, metadata={"help": "float16 autocast with dynamic loss scaling"})
    bf16: bool = dataclasses.field(default=False, metadata={"help": "bfloat16 autocast; needs no loss scaling"})
    fp16_init_scale: float = dataclasses.field(default=128, metadata={"help": "first loss scale of fp16, above 0"})
    fp16_scale_window: Optional[int] = dataclasses.field(
        default=None,
        metadata={
            "help": "updates without overflow before the scale doubles; null or 0: chosen by ranks and update_freq"
        },
    )
    min_loss_scale: float = dataclasses.field(
        default=1e-4, metadata={"help": "the run ends with an error when the loss scale falls to this, above 0"}
    )
    fp16_scale_tolerance: float = dataclasses.field(
        default=0.0,
        metadata={"help": "share of overflows since the last change of the scale that it bears, 0 to 1; 0: none"},
    )
    threshold_loss_scale: Optional[float] = dataclasses.field(
        default=None,
        metadata={"help": "the loss scale is not lowered below this; null: only min_loss_scale ends the fall"},
    )
    num_threads: int = dataclasses.field(
        default=0, metadata={"help": "intra-op threads of a rank; 0: cores of the node divided by its ranks"}
    )
    deterministic: bool = dataclasses.field(
        default=False, metadata={"help": "deterministic kernels: resumes are bit-identical on accelerators too"}
    )
    on_nonfinite: Literal["stop", "skip", "rollback"] = dataclasses.field(
        default="stop",
        metadata={
            "help": "a loss, gradient or parameter that is not finite: stop, skip the update, or rollback to the newest "
            "checkpoint and on behind the data since; fp16 follows its loss scale"
        },
    )
    max_nonfinite: int = dataclasses.field(
        default=10,
        metadata={"help": "updates that a run may skip, or rollbacks, over all its starts; the next one ends it"},
    )
    check_replicas_every: int = dataclasses.field(
        default=0,
        metadata={"help": "updates between two comparisons of the ranks' parameters; 0: only at each save"},
    )
    log_interval: int = dataclasses.field(default=1, metadata={"help": "updates between two train lines, from 1"})
    log_format: Literal["auto", "rich", "simple", "json", "none"] = dataclasses.field(
        default="auto",
        metadata={"help": "progress on the screen: auto (rich on a terminal, else simple), rich, simple, json, none"},
    )
    tensorboard_logdir: Optional[str] = dataclasses.field(
        default=None,
        metadata={"help": "folder of the TensorBoard events, from run_dir on; null: none are written", "path": True},
    )
    wandb_project: Optional[str] = dataclasses.field(
        default=None, metadata={"help": "project of Weights & Biases; null: nothing is sent"}
    )

    def problems(self) -> list[str]:
        found = _below(
            self,
            "common",
            {
                "seed": 0,
                "num_threads": 0,
                "log_interval": 1,
                "fp16_scale_window": 0,
                "fp16_scale_tolerance": 0,
                "max_nonfinite": 0,
                "check_replicas_every": 0,
            },
        )
        found += _not_above_zero(self, "common", ("fp16_init_scale", "min_loss_scale"))
        if self.fp16 and self.bf16:
            found.append("common.fp16 and common.bf16 exclude each other: leave one out")
        return found


@dataclasses.dataclass
class OptimizationConfig:
    """How long to train, and what an update is."""

    max_epoch: int = dataclasses.field(default=0, metadata={"help": "stop after this epoch; 0: no limit"})
    max_update: int = dataclasses.field(default=0, metadata={"help": "stop after this update; 0: no limit"})
    stop_time_hours: float = dataclasses.field(
        default=0, metadata={"help": "stop after so many hours of training, all starts together; 0: no limit"}
    )
    clip_norm: float = dataclasses.field(
        default=0, metadata={"help": "joint L2 norm that gradients are clipped to; 0: no clipping"}
    )
    update_freq: int = dataclasses.field(
        default=1,
        metadata={"help": "micro-batches of a rank in one update, from 1", "one_of_list": "one number for all epochs"},
    )
    global_batch_size: int = dataclasses.field(
        default=0,
        metadata={
            "help": "samples of all ranks in one update, whatever the number of ranks: update_freq follows from it and "
            "dataset.batch_size; 0: dataset.batch_size x ranks x update_freq"
        },
    )
    lr: float = dataclasses.field(
        default=1e-3,
        metadata={"help": "peak learning rate, above 0", "one_of_list": "one number; how it changes is lr_scheduler's"},
    )
    skip_remainder_batch: bool = dataclasses.field(
        default=False, metadata={"help": "leave out the last update of an epoch if it is shorter than the others"}
    )

    def problems(self) -> list[str]:
        limits = {"max_epoch": 0, "max_update": 0, "stop_time_hours": 0, "clip_norm": 0, "update_freq": 1}
        limits["global_batch_size"] = 0
        return _below(self, "optimization", limits) + _not_above_zero(self, "optimization", ("lr",))


def _below(section: Any, name: str, least: Mapping[str, float]) -> list[str]:
    values = {key: getattr(section, key) for key in least}
    return [
        f"{name}.{key} is {value}, it must be {least[key]} or more"
        for key, value in values.items()
        if value is not None and value < least[key]
    ]


def _not_above_zero(section: Any, name: str, keys: Iterable[str]) -> list[str]:
    return [
        f"{name}.{key} is {getattr(section, key)}, it must be above 0" for key in keys if getattr(section, key) <= 0
    ]


def section_classes() -> dict[str, type]:
    """The dataclass of each checked section."""
    from checkpoint_utils import CheckpointConfig
    from distributed_utils import DistributedTrainingConfig
    from trainer.data import DatasetConfig
    from trainer.ema import EMAConfig

    classes = (CommonConfig, DatasetConfig, OptimizationConfig, CheckpointConfig, DistributedTrainingConfig, EMAConfig)
    return dict(zip(SECTIONS, classes))


# Completing and checking


def complete_config(mapping: Mapping | DictConfig | None, task_class: type | None = None) -> DictConfig:
    """A config with all sections and fields, each checked; all mistakes come in one ConfigError.

    Args:    mapping: sections and fields may be left out. Not changed. A completed config comes back equal.
             task_class: the Trainer subclass in use, where `task._target_` does not name it.
    Returns: a new DictConfig. References such as ${oc.env:NAME} are checked but stay references.
    """
    problems: list[str] = []
    cfg = with_defaults(mapping, problems)
    sections = {name: _check_section(cfg, name, cls, problems) for name, cls in section_classes().items()}
    for name in NODES:
        _check_node(cfg, name, task_class if name == "task" else None, problems)
    _check_texts(cfg, problems)
    if all(section is not None for section in sections.values()):
        problems += cross_problems(sections, cfg)
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else _listed(problems))
    for name in NODES:
        if cfg[name] is not None:
            OmegaConf.set_struct(cfg[name], False)
    return cfg


def _listed(problems: list[str]) -> str:
    return f"{len(problems)} settings cannot work:\n" + "\n".join(f"  - {problem}" for problem in problems)


def with_defaults(mapping: Mapping | DictConfig | None, problems: list[str] | None = None) -> DictConfig:
    """The mapping with the defaults of the checked sections. Unknown keys become `problems`, or an error."""
    raw = _raw(mapping)
    found: list[str] = [] if problems is None else problems
    full: dict[str, Any] = {}
    for name in NODES:
        full[name] = raw.get(name)
        if not isinstance(full[name], (dict, type(None))):
            found.append(f"{name} is a section with a _target_, got {full[name]!r}{_group_hint(name, full[name])}")
            full[name] = None
    for name, cls in section_classes().items():
        full[name] = _section_with_defaults(name, cls, raw.get(name), found)
    full |= {name: raw[name] if name in raw else default for name, default in TEXTS.items()}
    if full["task_name"] is None:
        full["task_name"] = _name_of_task(full["task"])
    found += [_unknown(str(key)) for key in raw if key not in full]
    if found and problems is None:
        raise ConfigError(found[0] if len(found) == 1 else _listed(found))
    return OmegaConf.create(full, flags={"struct": True})


def _raw(mapping: Mapping | DictConfig | None) -> dict:
    """Plain containers, references as their text."""
    if isinstance(mapping, DictConfig):
        return OmegaConf.to_container(mapping, resolve=False)
    if not isinstance(mapping, (Mapping, type(None))):
        raise ConfigError(f"a config is a mapping of sections, got {type(mapping).__name__}")
    try:
        return OmegaConf.to_container(OmegaConf.create(dict(mapping or {})), resolve=False)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{_first_line(error)} ({error.full_key}): a config holds numbers, text, lists, mappings, null"
        ) from error


def _section_with_defaults(name: str, cls: type, given: Any, problems: list[str]) -> dict:
    defaults = {field.name: getattr(section, field.name) for section in [cls()] for field in dataclasses.fields(cls)}
    if given is None:
        return defaults
    if not isinstance(given, dict):
        problems.append(f"{name} is a section: write {name}.<field>=..., got {given!r}")
        return defaults
    problems += [_unknown(f"{name}.{key}") for key in given if key not in defaults]
    return defaults | {key: value for key, value in given.items() if key in defaults}


def _group_hint(name: str, value: Any) -> str:
    return f". {name}={value} chooses an option on the command line only" if isinstance(value, str) else ""


def _name_of_task(task: dict | None) -> str:
    target = (task or {}).get("_target_")
    return target.rpartition(".")[2].lower() if isinstance(target, str) and target else "run"


def known_keys() -> list[str]:
    """All keys of the checked sections, with their section, and the names of the top level."""
    fields = [f"{name}.{field.name}" for name, cls in section_classes().items() for field in dataclasses.fields(cls)]
    return [*TEXTS, *SECTIONS, *NODES, *fields]


def _unknown(key: str) -> str:
    return f"there is no {key}.{nearest(key, known_keys())}"


def _check_section(cfg: DictConfig, name: str, cls: type, problems: list[str]) -> Any:
    """The section as an object of its dataclass, or None where a field does not fit."""
    before = len(problems)
    hints = typing.get_type_hints(cls)
    values = {
        field.name: _check_value(cfg, name, field.name, hints[field.name], problems, field.metadata)
        for field in dataclasses.fields(cls)
    }
    if len(problems) > before:
        return None
    section = cls(**values)
    problems += section.problems() if hasattr(section, "problems") else []
    return section


REFERENCE_NODES = {int: IntegerNode, float: FloatNode, bool: BooleanNode}


def _check_value(
    cfg: DictConfig, section: str, name: str, expected: Any, problems: list[str], metadata: Mapping
) -> Any:
    """The value of a field as its type wants it, also stored so; a reference stays one and gives what it stands for."""
    parent = cfg[section] if section else cfg
    where = f"{section}.{name}" if section else name
    try:
        value = _plain(parent[name])
        fitted = fit(_one_of_list(value, metadata), expected)
    except (FieldError, OmegaConfBaseException) as error:
        problems.append(_field_problem(where, error))
        return None
    if metadata.get("path") and isinstance(fitted, str):
        fitted = os.path.expanduser(fitted)
    if OmegaConf.is_interpolation(parent, name):
        kind = next((kind for kind in (expected, *typing.get_args(expected)) if kind in REFERENCE_NODES), None)
        if kind:  # text of an environment variable becomes a number whenever it is read
            parent[name] = REFERENCE_NODES[kind](
                OmegaConf.to_container(parent, resolve=False)[name], is_optional=takes_null(expected)
            )
    elif type(fitted) is not type(value) or fitted != value:
        parent[name] = fitted
    return fitted


def _field_problem(where: str, error: Exception) -> str:
    if isinstance(error, FieldError):
        return f"{where} {error}"
    if isinstance(error, MissingMandatoryValue):
        return f"{where} must be given: {where}=..."
    return f"{where}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _one_of_list(value: Any, metadata: Mapping) -> Any:
    if "one_of_list" not in metadata or not isinstance(value, (list, tuple)):
        return value
    if len(value) != 1:
        raise FieldError(
            f"takes {metadata['one_of_list']}, got the list {value!r} (a list of one is taken as that one)"
        )
    return value[0]


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _check_texts(cfg: DictConfig, problems: list[str]) -> None:
    for name in TEXTS:
        value = _check_value(cfg, "", name, str, problems, {"path": name == "run_dir"})
        if value == "":
            problems.append(f"{name} is empty: {name}=...")


# Nodes

GIVEN_BY_TRAINER = {  # parameters of constructors that the Trainer fills in: to whom the user may turn instead
    "optimizer": {"params": "the model's parameters are taken", "lr": "the rate is optimization.lr"},
    "lr_scheduler": {
        "optimizer": "the run's optimizer is taken",
        "lr": "the rate is optimization.lr",
        "max_update": "the horizon is optimization.max_update, or lr_scheduler.total_num_update",
    },
}
ALSO_READ = {"optimizer": {"groups": Any, "weight_decay": float}}  # keys that the builder of a section reads itself


def _check_node(cfg: DictConfig, name: str, given_class: type | None, problems: list[str]) -> None:
    """Unknown keys and wrong types of a node, as its class says; defaults of a class's `Config` are filled in."""
    node = cfg[name]
    if given_class is None and (node is None or (name == "task" and "_target_" not in node)):
        return  # without a name nobody knows what belongs there; a Trainer that is used directly gives its class
    if node is None:
        cfg[name] = node = {}
        node = cfg[name]
    try:
        target = given_class or get_target(node, _expected_kind(name), where=f"{name}._target_")
        _refuse_other_kind(name, target)
    except ConfigError as error:
        problems.append(str(error))
        return
    fields = target_fields(target) if name != "task" or hasattr(target, "Config") else TargetFields({}, open=True)
    OmegaConf.set_struct(node, False)
    for key, default in fields.defaults.items():
        if key not in node:
            node[key] = default
    problems += [f"{name}.{key} must be given: {name}.{key}=..." for key in fields.required if key not in node.keys()]
    types = node_types(name, fields)
    for key in [key for key in node if key != "_target_"]:
        if key in GIVEN_BY_TRAINER.get(name, {}):
            problems.append(f"{name}.{key} cannot be set: {GIVEN_BY_TRAINER[name][key]}")
        elif key in types:
            _check_value(cfg, name, key, types[key], problems, {})
        elif not fields.open:
            problems.append(f"there is no {name}.{key} in {target.__name__}.{nearest(key, types) or _takes(types)}")


def node_types(name: str, fields: TargetFields) -> dict[str, Any]:
    """The keys that a node may have and their types, apart from `_target_`."""
    hidden = GIVEN_BY_TRAINER.get(name, {})
    return {key: kind for key, kind in fields.types.items() if key not in hidden} | ALSO_READ.get(name, {})


def _takes(types: Mapping[str, Any]) -> str:
    return f" It takes {', '.join(types)}." if types else " It takes no settings."


def _expected_kind(name: str) -> type | tuple:
    import torch

    kinds = {"model": torch.nn.Module, "criterion": torch.nn.Module, "optimizer": torch.optim.Optimizer}
    return kinds.get(name, ())


def _refuse_other_kind(name: str, target: type) -> None:
    """What `_expected_kind` cannot say by a class that this part may import."""
    if name == "task" and not is_trainer(target):
        raise ConfigError(f"task._target_: {target.__module__}.{target.__name__} is not a subclass of trainer.Trainer")
    if name == "lr_scheduler" and not (
        is_schedule(target) or hasattr(target, "get_last_lr") or hasattr(target, "step")
    ):
        raise ConfigError(
            f"lr_scheduler._target_: {target.__module__}.{target.__name__} is not a learning-rate schedule"
        )


# What crosses sections


def cross_problems(sections: Mapping[str, Any], cfg: DictConfig) -> list[str]:
    """Sentences on settings that are fine alone and impossible together."""
    from checkpoint_utils.urls import is_url

    optimization, dataset, checkpoint = sections["optimization"], sections["dataset"], sections["checkpoint"]
    common, problems = sections["common"], []
    if not (optimization.max_update or optimization.max_epoch or optimization.stop_time_hours):
        problems.append(
            "nothing would end this run: give optimization.max_update, optimization.max_epoch or "
            "optimization.stop_time_hours"
        )
    if sections["distributed_training"].gather_in_half_precision and not (common.fp16 or common.bf16):
        problems.append(
            "distributed_training.gather_in_half_precision=true needs a half precision: add common.bf16=true"
        )
    if is_url(checkpoint.save_dir) and sections["distributed_training"].use_sharded_state:
        problems.append(
            f"checkpoint.save_dir={checkpoint.save_dir} holds files: leave out distributed_training.use_sharded_state=true"
        )
    return problems + _batch_size_problems(optimization, dataset) + _problems_without_validation(dataset, checkpoint, cfg)


def _batch_size_problems(optimization: Any, dataset: Any) -> list[str]:
    size = optimization.global_batch_size
    if size <= 0:  # none; a negative one is refused as out of range
        return []
    found = []
    if optimization.update_freq != 1:
        found.append(
            f"optimization.global_batch_size={size} decides update_freq by itself: leave out "
            f"optimization.update_freq={optimization.update_freq}"
        )
    if dataset.max_tokens is not None:
        found.append(
            f"optimization.global_batch_size={size} counts samples, dataset.max_tokens={dataset.max_tokens} makes batches "
            "of tokens: leave one of them out"
        )
    elif dataset.batch_size and dataset.batch_size > size:
        found.append(
            f"dataset.batch_size={dataset.batch_size} of one rank is more than optimization.global_batch_size={size} of "
            f"all: set dataset.batch_size={size} or less"
        )
    return found


def _problems_without_validation(dataset: Any, checkpoint: Any, cfg: DictConfig) -> list[str]:
    never = dataset.validate_interval <= 0 and dataset.validate_interval_updates <= 0
    if dataset.valid_subset and not never:
        return []
    lacks, mends = (
        ("dataset.valid_subset is empty", "dataset.valid_subset")
        if not dataset.valid_subset
        else ("dataset.validate_interval and validate_interval_updates are 0", "dataset.validate_interval")
    )
    default = type(checkpoint)()
    wishes = {
        "checkpoint.patience": checkpoint.patience > 0,
        "checkpoint.keep_best_checkpoints": checkpoint.keep_best_checkpoints > 0,
        "checkpoint.best_checkpoint_metric": checkpoint.best_checkpoint_metric != default.best_checkpoint_metric,
        "lr_scheduler=reduce_lr_on_plateau": str((cfg.lr_scheduler or {}).get("_target_")).endswith(
            ".ReduceLROnPlateau"
        ),
    }
    return [
        f"{key} needs a validation, and {lacks}: give {mends} or leave {key} out"
        for key, wished in wishes.items()
        if wished
    ]


# Plain and compared

RESOLVER = re.compile(r"\$\{\s*[\w.]+\s*:")  # ${oc.env:NAME}: goes through a resolver
HELD_BACK = "\0reference\0"


def to_plain(cfg: DictConfig | Mapping) -> dict:
    """Plain containers for a file: references within the config are resolved, others stay text.

    ${run_dir} becomes what it stands for. ${oc.env:NAME}, and whatever would show its value, stays as it is written,
    so that no secret reaches a file.
    """
    if not isinstance(cfg, DictConfig):
        cfg = OmegaConf.create(dict(cfg))
    raw = OmegaConf.to_container(cfg, resolve=False)
    return _resolved(raw, OmegaConf.create(_masked(raw)))


def _masked(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {key: _masked(value) for key, value in raw.items()}
    if isinstance(raw, list):
        return [_masked(value) for value in raw]
    return HELD_BACK if isinstance(raw, str) and RESOLVER.search(raw) else raw


def _resolved(raw: Any, masked: Any) -> Any:
    """`raw` with the values of `masked` where these show nothing that was held back."""
    if isinstance(raw, dict):
        return {key: _resolved(value, _child(masked, key)) for key, value in raw.items()}
    if isinstance(raw, list):
        return [_resolved(value, _child(masked, index)) for index, value in enumerate(raw)]
    if not isinstance(raw, str) or "${" not in raw:
        return str(raw) if isinstance(raw, os.PathLike) else raw
    value = _plain(masked)
    return raw if _shows_held_back(value) else value


def _shows_held_back(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return any(map(_shows_held_back, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and HELD_BACK in value


def _child(parent: Any, key: Any) -> Any:
    if OmegaConf.is_missing(parent, key):
        return "???"
    try:
        return parent[key]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{parent._get_full_key(key)}: {_first_line(error)}") from error


def config_differences(saved: Mapping, now: Mapping) -> list[tuple[str, Any, Any]]:
    """(key, saved value, value now) for each leaf that differs, in the order of `now`, then what only `saved` has."""
    before, after = flat(saved), flat(now)
    keys = list(after) + [key for key in before if key not in after]
    pairs = [(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys]
    return [(key, old, new) for key, old, new in pairs if old != new or isinstance(old, bool) != isinstance(new, bool)]


def flat(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """The leaves of a config by their keys."""
    if isinstance(tree, DictConfig):
        tree = to_plain(tree)
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return leaves


def typed_keys(typed: Iterable[str]) -> set[str]:
    """The keys that the overrides name: {"optimization.lr", "model"} for ["+optimization.lr=1", "model=dit_s_8"]."""
    return {override.partition("=")[0].lstrip("+~").partition("@")[0] for override in typed}
