"""What was found in a file of another program, laid out as a checkpoint of ours.

Owns: names of this run for the tensors of the file, optimizer state by name, classes by their meaning.
Must not know: the kinds of files (`Found` says what they hold), the Trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from checkpoint_file import FORMAT_VERSION, TensorRef
from trainer.foreign import moments
from trainer.foreign.found import Found
from trainer.foreign.names import COMPUTED, Fit, common_prefix, find_fit, without_wrappers
from trainer.foreign.position import ELSEWHERE
from trainer.partial_state import WHOLE, Selection

# Classes that keep the same state: a file that has no class names is told by these what its moments are.
BY_STATE = {
    frozenset({"exp_avg", "exp_avg_sq"}): ("AdamW", "Adam", "NAdam", "RAdam"),
    frozenset({"momentum_buffer"}): ("SGD", "RMSprop"),
    frozenset({"square_avg"}): ("RMSprop", "Adadelta"),
    frozenset({"sum"}): ("Adagrad",),
    frozenset({"exp_avg"}): ("Lion",),
}


@dataclass
class Here:
    """What this run builds: shapes by name, parameters in order, groups of names that are one tensor, class names."""

    shapes: dict[str, tuple]
    parameters: list[str] = field(default_factory=list)
    tied: list[list[str]] = field(default_factory=list)
    classes: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, classes: Mapping[str, str | None] | None = None) -> Here:
        """classes: as of state.class_names."""
        tensors = {name: one for name, one in model.state_dict(keep_vars=True).items() if hasattr(one, "shape")}
        groups: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            groups.setdefault(id(tensor), []).append(name)
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(shapes, parameters, [names for names in groups.values() if len(names) > 1], dict(classes or {}))


@dataclass
class Translation:
    """How a tensor of the file is called here (before checkpoint.load_rename), and whether it is turned round."""

    fit: Fit
    here: Here | None
    turned: bool = False

    def name(self, name: str) -> str | None:
        return self.fit.name_here(name)

    def tensor(self, name: str, ref: TensorRef) -> TensorRef:
        return transposed(ref) if self.turned and is_conv1d(name) else ref


def own_layout(found: Found, path: str, here: Here | None = None, selection: Selection = WHOLE) -> dict[str, Any]:
    """The state in our layout; notes and what is left are added to those of `found`."""
    parts = {**found.models, **found.averages}
    names = {full(key, without_wrappers(name)): (key, name) for key, part in parts.items() for name in part}
    fit = choose_fit(found, names, path, here, selection)
    model = {short: parts[key][name] for short, (key, name) in names.items()}
    known = {name for name in model if is_known(name, fit, here, selection)}
    in_use = {names[name][0] for name in known} or {next(iter(found.models))}
    taken = {
        name: ref
        for name, ref in model.items()
        if fit.name_here(name) is not None
        and names[name][0] in in_use
        and (here is None or name in known or not selection.rename)
    }
    translation = Translation(fit, here, turned=conv1d_is_turned(taken, fit, here))
    key = names[next(iter(taken))][0] if taken else next(iter(found.models))
    state_model = named_here(taken, translation, found, here, full(key, ""))
    if fit.prefix.rstrip(".") not in ("", key) or fit.added:
        found.notes.append(f"names of the file: {described(fit, key)}")
    rest = [name for name in model if name not in taken]
    note_the_rest(found, rest, key)
    averages = average_of(found, fit, key, translation, here)
    optimizer = optimizer_by_name(found, key, translation, selection)
    return {
        "format_version": FORMAT_VERSION,
        "run_id": None,
        "cfg": {},
        "model": state_model,
        "criterion": dict(found.criterion),
        "optimizer_history": [history_entry(found, optimizer, here)],
        "last_optimizer_state": optimizer,
        "task_state": {},
        "extra_state": extra_state(found, optimizer, averages),
    }


def is_known(name: str, fit: Fit, here: Here | None, selection: Selection) -> bool:
    """Whether this run's model has the tensor."""
    inside = fit.name_here(name)
    return here is not None and inside is not None and selection.name_here(inside) in here.shapes


def full(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def choose_fit(found: Found, names: Collection[str], path: str, here: Here | None, selection: Selection) -> Fit:
    parts = {**found.models, **found.averages}
    if here is None:
        (key, model), *_ = found.models.items()
        prefix = full(key, "")
        usual = ("module.", "model.", "net.", "network.", "module.module.", "model.model.")
        inner = [full(key, without_wrappers(name)) for name in model]
        if found.kind not in ("Hugging Face", "nanoGPT", "accelerate"):
            prefix = common_prefix(inner, [prefix + one for one in usual]) or prefix
        else:
            prefix = common_prefix(inner, [prefix + "module."]) or prefix
        return Fit(prefix, "", len(model))
    shapes = {
        full(key, without_wrappers(name)): tuple(ref.shape) for key, part in parts.items() for name, ref in part.items()
    }
    rename = selection.name_here if selection.rename else None
    return find_fit(shapes, here.shapes, rename, [full(key, "") for key in parts], path)


def described(fit: Fit, key: str) -> str:
    inner = fit.prefix.removeprefix(full(key, ""))
    said = [f"without the prefix {inner!r}"] if inner else []
    return (
        " and ".join([*said, *([f"with the prefix {fit.added!r}"] if fit.added else [])])
        or f"those under {fit.prefix!r}"
    )


def note_the_rest(found: Found, rest: list[str], key: str) -> None:
    """Say which tensors of the chosen part, and which other parts, nobody takes."""
    inner = [name for name in rest if name.startswith(full(key, ""))]
    if inner:
        more = f", and {len(inner) - 5} more" if len(inner) > 5 else ""
        found.left.append(f"{len(inner)} tensors beside the model ({', '.join(inner[:5])}{more})")
    found.left += [f"the model under {other!r}" for other in found.models if other != key]


# ---- tensors


def named_here(
    taken: Mapping[str, TensorRef], translation: Translation, found: Found, here: Here | None, part: str
) -> dict[str, TensorRef]:
    """The tensors by their names here. Computed ones that the model does not have are dropped, tied ones completed."""
    named = {translation.name(name): translation.tensor(name, ref) for name, ref in taken.items()}
    if here is None:
        return named
    twins = {second: first for second, first in found.tied}
    places = {place_of(ref): name for name, ref in named.items() if name in here.shapes and ref.nbytes}
    dropped = []
    for name in list(named):
        if name in here.shapes:
            continue
        twin = places.get(place_of(named[name])) or translation.name(part + twins.get(name, "")) in here.shapes
        if twin or COMPUTED.search(name):
            dropped.append(name)
            del named[name]
    if dropped:
        found.notes.append(
            f"not needed here: {', '.join(dropped[:5])}" + (f" and {len(dropped) - 5} more" if len(dropped) > 5 else "")
        )
    for group in here.tied:
        first = next((name for name in group if name in named), None)
        named.update({name: named[first] for name in group if first and name not in named})
    return named


def place_of(ref: TensorRef) -> tuple:
    return ref._record, ref._offset, tuple(ref.shape), ref._stride


def is_conv1d(name: str) -> bool:
    """Whether Hugging Face's GPT-2 keeps this matrix as [inputs, outputs], and not as a Linear does."""
    return name.endswith(
        ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight", "q_attn.weight")
    )


def conv1d_is_turned(taken: Mapping[str, TensorRef], fit: Fit, here: Here | None) -> bool:
    """Whether the file has these matrices the other way round than the model; square ones follow the others."""
    if here is None:
        return False
    for name, ref in taken.items():
        wanted = here.shapes.get(fit.name_here(name) or "")
        if is_conv1d(name) and wanted is not None and len(wanted) == 2 and wanted[0] != wanted[1]:
            return tuple(ref.shape) == wanted[::-1]
    return False


def transposed(ref: TensorRef) -> TensorRef:
    if len(ref.shape) != 2 or ref._chunks:
        return ref
    return TensorRef(ref.dtype, tuple(ref.shape)[::-1], ref._record, ref._offset, ref._stride[::-1])


def average_of(found: Found, fit: Fit, key: str, translation: Translation, here: Here | None) -> dict[str, TensorRef]:
    """The moving average that belongs to the model taken: the first one of the file."""
    if not found.averages or key in found.averages:
        return {}
    average_key, average = next(iter(found.averages.items()))
    prefixes = [full(key, ""), ""]
    for prefix in prefixes:
        inner = fit.prefix.removeprefix(full(key, "")) if prefix else ""
        named = {}
        for name, ref in average.items():
            short = without_wrappers(name)
            if short.startswith(inner):
                named[fit.added + short[len(inner) :]] = translation.tensor(short, ref)
        if named and (here is None or any(name in here.shapes for name in named)):
            return {name: ref for name, ref in named.items() if here is None or name in here.shapes}
    found.left.append(f"the average under {average_key!r}, whose names are not those of the model")
    return {}


# ---- optimizer


def optimizer_by_name(found: Found, key: str, translation: Translation, selection: Selection) -> dict[str, Any] | None:
    """The optimizer's state with param_names, None where there is none or its parameters cannot be told."""
    if found.optimizer is None or key not in found.models:
        return None
    model = {without_wrappers(name): ref for name, ref in found.models[key].items()}
    model.update({f"criterion.{name}": ref for name, ref in found.criterion.items()})
    optimizer, state = found.optimizer, found.optimizer["state"]
    if any(isinstance(index, str) and not index.isdigit() for index in state):
        return named_optimizer(found, key, translation)
    tied = {second for second, _ in found.tied}
    computed = {name for name in model if COMPUTED.search(name)}
    candidates = []
    if translation.here is not None:
        ours = {name: selection.name_here(translation.name(full(key, name)) or "") for name in model}
        order = {name: number for number, name in enumerate(translation.here.parameters)}
        known = [name for name in model if ours[name] in order or name.startswith("criterion.")]
        if not found.is_ordered:
            known.sort(key=lambda name: order.get(ours[name], len(order)))
        candidates.append(moments.parameters_in_order({name: model[name] for name in known}, tied))
    if found.is_ordered:
        candidates.append(moments.parameters_in_order(model, tied | computed))
        candidates.append(moments.parameters_in_order(model, tied))
    count = sum(len(group["params"]) for group in optimizer["param_groups"])
    if len(state) == 1 and count == 1 and len(model) > 1:
        whole = next((one for names in candidates if (one := moments.unflattened(optimizer, model, names))), None)
        if whole is not None:
            found.notes.append("moments that are one vector for all parameters were cut into theirs")
            names = next(names for names in candidates if moments.unflattened(optimizer, model, names))
            return packed(whole, dict(enumerate(names)), key, translation)
    by_index = moments.names_by_index(optimizer, model, candidates)
    if by_index is None:
        found.left.append(f"optimizer state ({count} parameters, which the file does not name and nothing tells)")
        return None
    return packed(optimizer, by_index, key, translation)


def named_optimizer(found: Found, key: str, translation: Translation) -> dict[str, Any]:
    """State by parameter name, as torch.distributed.checkpoint writes it."""
    names = [name for name in found.optimizer["state"] if isinstance(name, str)]
    state = {index: found.optimizer["state"][name] for index, name in enumerate(names)}
    group = {**found.optimizer["param_groups"][0], "params": list(range(len(names)))}
    by_index = {index: without_wrappers(name) for index, name in enumerate(names)}
    return packed({"state": state, "param_groups": [group]}, by_index, key, translation)


def packed(
    optimizer: Mapping[str, Any], names: Mapping[int, str], key: str, translation: Translation
) -> dict[str, Any]:
    def here(name: str) -> str:
        if name.startswith("criterion."):
            return name
        return translation.name(full(key, name)) or name

    def turned(name: str, entry: Mapping) -> dict:
        return {k: translation.tensor(name, v) if isinstance(v, TensorRef) else v for k, v in entry.items()}

    state = {index: turned(names[index], entry) for index, entry in optimizer["state"].items() if index in names}
    groups = [
        {**group, "param_names": [here(names[index]) for index in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


# ---- counters and classes


def history_entry(found: Found, optimizer: Mapping[str, Any] | None, here: Here | None) -> dict[str, Any]:
    """The last entry of optimizer_history, its classes by what they mean here."""
    built = here.classes if here is not None else {}
    name, accepted = found.optimizer_class, found.optimizer_names or classes_by_state(optimizer)
    if built.get("optimizer_name") in accepted:
        if name not in (None, built["optimizer_name"]):
            found.notes.append(f"optimizer {name} is {built['optimizer_name']} here")
        name = built["optimizer_name"]
    elif here is None and accepted:
        name = accepted[0]
    criterion = found.criterion_name
    if criterion is not None and not found.criterion and criterion != built.get("criterion_name"):
        if here is not None:
            found.notes.append(
                f"criterion {criterion}, which has no parameters, is {built.get('criterion_name') or 'this task'} here"
            )
            criterion = built.get("criterion_name")
    schedule = built.get("lr_scheduler_name")
    same = found.lr_scheduler_name in (schedule, None) or here is None
    if not same:
        found.notes.append(f"the schedule was {found.lr_scheduler_name}, here it is {schedule}")
    return {
        "criterion_name": criterion,
        "optimizer_name": name,
        "lr_scheduler_name": schedule if here is not None else found.lr_scheduler_name,
        "lr_scheduler_state": dict(found.lr_scheduler_state) if same else {},
        "num_updates": found.num_updates,
    }


def classes_by_state(optimizer: Mapping[str, Any] | None) -> tuple[str, ...]:
    keys = set().union(*(entry for entry in (optimizer or {}).get("state", {}).values() if isinstance(entry, Mapping)))
    for marks, classes in BY_STATE.items():
        if marks <= keys:
            return classes
    return ()


def extra_state(found: Found, optimizer: Mapping[str, Any] | None, averages: Mapping[str, TensorRef]) -> dict[str, Any]:
    position = None
    if found.position is not None:
        position = {"epoch": found.position.get("epoch", 1), ELSEWHERE: dict(found.position)}
    extra: dict[str, Any] = {
        "train_iterator": position,
        "metrics": None,
        "best": found.best,
        "val_loss": None,
        "patience": {"best": found.best},
        "previous_training_time": found.training_time,
    }
    if found.loss_scale is not None:
        extra["scaler"] = {"loss_scale": found.loss_scale}
    if averages:
        extra["ema"] = dict(averages)
    return extra
