"""Classes named by a config: `_target_: package.module.Class` becomes the class, and its node becomes an object.

Owns: which names may be imported, what a node may say (constructor or `Config` of the class), building the object.
Only what is typed now is imported. Words found in a file (`saved_target_problem`) are held against a list first.
Functions are never called. Must not know: what the sections of a config mean, Hydra.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from trainer.errors import ConfigError

TRUSTED_MODULES = ("trainer", "torch.nn", "torch.optim")  # whose classes a saved config may name


def nearest(name: str, candidates: Iterable[str]) -> str:
    """' Did you mean x?', or '' where no candidate is near. For the end of a sentence.

    Dotted names are compared by what follows the section, with some favour for the section named; the whole name
    counts where there is no such section. So `lr` and `common.lr` bring `optimization.lr`, `optimisation.lr` too.
    """
    candidates = list(candidates)
    section = name.rpartition(".")[0]
    section_exists = section in {candidate.rpartition(".")[0] for candidate in candidates}
    scores = {candidate: _likeness(name, candidate, section_exists) for candidate in candidates}
    best = max(scores, key=scores.__getitem__, default=None)
    return f" Did you mean {best}?" if best is not None and scores[best] >= 0.6 else ""


def _likeness(name: str, candidate: str, section_exists: bool) -> float:
    section, _, leaf = name.rpartition(".")
    candidates_section, _, candidates_leaf = candidate.rpartition(".")
    if section and not candidates_section:
        return 0.0  # whoever wrote a section and a field did not mean a section alone
    by_leaf = difflib.SequenceMatcher(None, leaf, candidates_leaf).ratio()
    if section_exists and section:
        return by_leaf + (0.1 if section == candidates_section else 0.0)
    return max(difflib.SequenceMatcher(None, name, candidate).ratio(), by_leaf)


def get_target(
    node: Mapping | DictConfig | str, expected: type | tuple[type, ...] = (), where: str = "_target_"
) -> type:
    """The class that `node._target_` names, a subclass of one of `expected` (empty: any class).

    `where` is the key that the message names. Raises ConfigError for a name that cannot be imported, for functions
    and other objects, and for classes of another kind.
    """
    target = node if isinstance(node, str) else node.get("_target_")
    if not isinstance(target, str) or not target:
        raise ConfigError(f"{where}: needs _target_, the dotted name of a class, got {target!r}")
    found = _find(target, where)
    if not isinstance(found, type):
        raise ConfigError(f"{where}: {target} is {_kind(found)}, not a class; functions are never called by a config")
    expected = expected if isinstance(expected, tuple) else (expected,)
    if expected and not issubclass(found, expected):
        names = " or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in expected)
        raise ConfigError(f"{where}: {target} is not a subclass of {names}")
    return found


def instantiate(
    node: Mapping | DictConfig, expected: type | tuple[type, ...] = (), where: str = "_target_", **extra: Any
) -> Any:
    """Build the object of a node: its class, called with the node's other keys and `extra`, which wins.

    Nested nodes with a `_target_` are built first; lists and mappings arrive as plain `list` and `dict`.
    """
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True)
    target = get_target(node, expected, where)
    arguments = {
        key: _built(value, f"{where}.{key}") for key, value in node.items() if key != "_target_" and key not in extra
    }
    try:
        return target(**arguments, **extra)
    except TypeError as error:
        if (
            error.__traceback__ is not None and error.__traceback__.tb_next is None
        ):  # the call itself, not the constructor's body
            raise ConfigError(f"{where}: {node['_target_']} cannot be built: {error}") from error
        raise


def _built(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return instantiate(value, where=where)
        return {key: _built(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple, ListConfig)):
        return [_built(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return value


def _find(target: str, where: str) -> Any:
    """The object of a dotted name: the longest prefix that is a module, then attributes of classes only."""
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where}: {target!r} is not the dotted name of a class, such as my_module.MyClass")
    for length in range(len(parts) - 1, 0, -1):
        module = _imported(".".join(parts[:length]), target, where)
        if module is not None:
            return _attribute(module, parts[length:], target, where)
    raise ConfigError(
        f"{where}: there is no module {parts[0]!r} to take {target} from (looked in the current folder too)"
    )


def _imported(name: str, target: str, where: str) -> Any:
    """The module `name`, or None where no such module exists. An error inside the module is told as that."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise ConfigError(f"{where}: importing {name} for {target} failed: {error}") from error
    except Exception as error:  # whatever the user's module does while it is imported
        raise ConfigError(f"{where}: importing {name} for {target} failed: {type(error).__name__}: {error}") from error


def _attribute(module: Any, path: list[str], target: str, where: str) -> Any:
    found = module
    for depth, name in enumerate(path):
        if depth and not isinstance(found, type):
            raise ConfigError(f"{where}: {target}: {'.'.join(path[:depth])} is {_kind(found)}, not a class")
        try:
            found = getattr(found, name)
        except AttributeError:
            classes = [key for key, value in vars(found).items() if isinstance(value, type)]
            raise ConfigError(
                f"{where}: {module.__name__} has no class {'.'.join(path)}.{nearest(name, classes)}"
            ) from None
    return found


def _kind(found: Any) -> str:
    if inspect.ismodule(found):
        return "a module"
    return "a function" if callable(found) else f"an object of type {type(found).__name__}"


# What a node may say


@dataclasses.dataclass(frozen=True)
class TargetFields:
    """The keys that a node of a class may have: name to type (Any where it is not known).

    `open`: other names are taken as well. `defaults`: what is filled in. `required`: what must be there.
    """

    types: dict[str, Any]
    open: bool
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    required: tuple[str, ...] = ()


def target_fields(target: type) -> TargetFields:
    """The fields of the class's own dataclass `Config`, else the parameters of its constructor."""
    config = getattr(target, "Config", None)
    if dataclasses.is_dataclass(config):
        return _dataclass_fields(config)
    return _constructor_fields(target)


def _dataclass_fields(config: type) -> TargetFields:
    types, defaults, required = {}, {}, []
    hints = _hints(config)
    for field in dataclasses.fields(config):
        types[field.name] = hints.get(field.name, Any)
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        else:
            required.append(field.name)
    return TargetFields(types, open=False, defaults=defaults, required=tuple(required))


def _constructor_fields(target: type) -> TargetFields:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # classes written in C may have none
        return TargetFields({}, open=True)
    hints = _hints(target.__init__)
    kinds = inspect.Parameter
    types = {}
    for name, parameter in parameters.items():
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            types[name] = hints.get(name, _type_of_default(parameter.default))
    return TargetFields(types, open=any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values()))


def _type_of_default(default: Any) -> Any:
    """float for `eps=1e-8`: a number written as text is then read as one. Any where it says nothing."""
    return float | Any if type(default) in (int, float) else Any


def _hints(of: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(of)
    except (NameError, TypeError, AttributeError):  # annotations that only a type checker can read
        return {}


# Words of a file


def saved_target_problem(target: Any, where: str, typed_modules: Iterable[str] = ()) -> str | None:
    """Why a `_target_` found in a saved config is not imported, or None where it is one that may be built.

    Allowed: Trainer, Module, Optimizer, LR scheduler and Dataset classes of this package, torch.nn, torch.optim, a
    module that the command names now (`typed_modules`), or a module that lies in the current folder.
    """
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        return f"{where}: the saved {target!r} is not the name of a class"
    trusted = (*TRUSTED_MODULES, *typed_modules)
    if not any(target.startswith(module + ".") for module in trusted) and not _lies_here(target.partition(".")[0]):
        return (
            f"{where}: the saved config names {target}, which is neither of this package, torch.nn or torch.optim nor "
            f"of the current folder. If you trust it, name it yourself: {where}={target}"
        )
    try:
        found = get_target(target, where=where)
    except ConfigError as error:
        return str(error)
    if not _may_be_saved(found):
        return (
            f"{where}: the saved config names {target}, which is no Trainer, Module, Optimizer, LR scheduler or Dataset"
        )
    return None


def _lies_here(top_level: str) -> bool:
    """Whether the top-level module is a file or package directly in the current folder. Imports nothing."""
    here = os.path.realpath(os.getcwd())
    try:
        spec = importlib.util.find_spec(top_level)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    return any(os.path.dirname(os.path.realpath(place)) == here for place in places if os.path.isabs(place))


def _may_be_saved(found: type) -> bool:
    import torch

    kinds = (
        torch.nn.Module,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        torch.utils.data.Dataset,
    )
    return issubclass(found, kinds) or is_trainer(found) or is_schedule(found)


def is_trainer(found: type) -> bool:
    """Whether a class is a Trainer, known by name since this part must not import the Trainer."""
    return any(base.__module__ == "trainer.trainer" and base.__name__ == "Trainer" for base in found.__mro__)


def is_schedule(found: type) -> bool:
    """Whether a class is a learning-rate schedule of this package or derived from one."""
    return any(base.__module__ == "trainer.lr_scheduler" for base in found.__mro__)
