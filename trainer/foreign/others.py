"""Checkpoints of DiT, Lightning, Hugging Face, accelerate, nanoGPT, and of whoever saves a dictionary.

Owns: by which keys each is known, and where it keeps what. Must not know: the model of this run, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint_file import TensorRef
from checkpoint_file.joined import FILES, INDEX
from trainer.foreign.found import (
    EMA_KEYS,
    MODEL_KEYS,
    OPTIMIZER_KEYS,
    Found,
    is_optimizer,
    is_state_dict,
    number,
    scalar,
    tensors_of,
)

COUNTS = ("num_updates", "global_step", "step", "iter_num", "iteration", "iter", "train_steps", "steps", "global_steps")
EPOCHS = ("epoch", "epochs", "current_epoch", "start_epoch")
BESTS = ("best", "best_score", "best_val_loss", "best_loss", "best_metric")


# ---- DiT


def is_dit(saved: Mapping) -> bool:
    return all(is_state_dict(saved.get(key)) for key in ("model", "ema")) and is_optimizer(saved.get("opt"))


def found_in_dit(saved: Mapping[str, Any]) -> Found:
    """What DiT's train.py writes: no count of updates but the optimizer's, no epoch, no state of the data."""
    args = saved.get("args") if isinstance(saved.get("args"), Mapping) else {}
    found = Found(
        kind="DiT", cfg=args or None, optimizer=saved["opt"], optimizer_class="AdamW", optimizer_names=("AdamW",)
    )
    found.models, found.averages = {"model": tensors_of(saved["model"])}, {"ema": tensors_of(saved["ema"])}
    size = number(args.get("global_batch_size"))
    if size:
        found.position = {"samples_per_update": int(size), "drops_rest": True}
    return found


# ---- Lightning


def is_lightning(saved: Mapping) -> bool:
    known = "pytorch-lightning_version" in saved or "optimizer_states" in saved or "loops" in saved
    return is_state_dict(saved.get("state_dict")) and known


def found_in_lightning(saved: Mapping[str, Any]) -> Found:
    found = Found(
        kind="Lightning", cfg=saved.get("hyper_parameters"), models={"state_dict": tensors_of(saved["state_dict"])}
    )
    states = saved.get("optimizer_states") or []
    if len(states) == 1:
        found.optimizer = states[0] if is_optimizer(states[0]) else None
    elif states:
        found.left.append(f"optimizer states ({len(states)}: there is one here)")
    found.num_updates = int(number(saved.get("global_step")) or 0)
    if len(states) > 1:  # Lightning counts the steps of all optimizers
        found.num_updates //= len(states)
    epoch = number(saved.get("epoch"))
    if epoch is not None:
        take_lightning_position(found, saved, int(epoch))
    found.best = best_of_callbacks(saved.get("callbacks"))
    for key in (
        "lr_schedulers",
        "callbacks",
        "loops",
        "hyper_parameters",
        "native_amp_scaling_state",
        "MixedPrecision",
    ):
        if saved.get(key):
            found.left.append(key)
    scaler = saved.get("native_amp_scaling_state") or saved.get("MixedPrecision") or {}
    found.loss_scale = number(scaler.get("scale")) if isinstance(scaler, Mapping) else None
    return found


def take_lightning_position(found: Found, saved: Mapping[str, Any], epoch: int) -> None:
    """The loops say how many epochs have begun, and how many batches of the last one were read, of one rank.

    Without them (Lightning before 1.5) there is `epoch`, counted from 0, of an epoch that has ended.
    """
    loops = saved.get("loops") if isinstance(saved.get("loops"), Mapping) else {}
    loop = loops.get("fit_loop") if isinstance(loops.get("fit_loop"), Mapping) else {}
    begun = number(((loop.get("epoch_progress") or {}).get("current") or {}).get("ready"))
    progress = loop.get("epoch_loop.batch_progress") or {}
    batches = int(number((progress.get("current") or {}).get("completed")) or 0)
    if begun is None or not progress:
        found.position = {"epoch": epoch + 2, "samples_in_epoch": 0}
    elif progress.get("is_last_batch"):
        found.position = {"epoch": int(begun) + 1, "samples_in_epoch": 0}
    else:
        found.position = {"epoch": max(int(begun), 1), "samples_in_epoch": 0, "batches": batches}


def best_of_callbacks(callbacks: Any) -> Any:
    for state in callbacks.values() if isinstance(callbacks, Mapping) else ():
        best = state.get("best_model_score") if isinstance(state, Mapping) else None
        if scalar(best) is not None:
            return scalar(best)
    return None


# ---- nanoGPT


def is_nanogpt(saved: Mapping) -> bool:
    return is_state_dict(saved.get("model")) and "model_args" in saved and "iter_num" in saved


def found_in_nanogpt(saved: Mapping[str, Any]) -> Found:
    """ckpt.pt of nanoGPT; `iter_num` counts updates, and data is drawn at random, so that there is no epoch."""
    found = Found(kind="nanoGPT", cfg={"model_args": saved.get("model_args"), "config": saved.get("config")})
    found.models = {"model": tensors_of(saved["model"])}
    found.optimizer, found.optimizer_class, found.optimizer_names = saved.get("optimizer"), "AdamW", ("AdamW",)
    found.num_updates = int(number(saved["iter_num"]) or 0)
    found.best = scalar(saved.get("best_val_loss"))
    return found


# ---- folders of Hugging Face and accelerate


def found_in_folder(files: Mapping[str, Any], path: str) -> Found:
    """A folder's files by what is in them: tensors by name are a model, `param_groups` an optimizer."""
    from trainer.foreign.names import AmbiguousNamesError, Fit

    models, optimizers, schedulers, facts = {}, {}, {}, {}
    for name, content in files.items():
        if name in ("config.json", "trainer_state.json"):
            facts[name] = content if isinstance(content, Mapping) else {}
        elif is_optimizer(content):
            optimizers[name] = content
        elif is_state_dict(content):
            models[name] = tensors_of(content)
        elif isinstance(content, Mapping) and {"last_epoch", "_step_count", "base_lrs"} & set(content):
            schedulers[name] = content
    models = main_models(models)
    if len(models) > 1:
        raise AmbiguousNamesError(path, [Fit(f"{name}", "", len(one)) for name, one in models.items()])
    by_trainer = "trainer_state.json" in facts
    found = Found(kind="Hugging Face" if by_trainer or "config.json" in facts else "accelerate", models={"": {}})
    for name, one in models.items():
        found.models = {"": one}
        found.is_ordered = "safetensors" not in name  # which sorts its names
    found.cfg = facts.get("config.json")
    if len(optimizers) == 1:
        (found.optimizer,) = optimizers.values()
    elif optimizers:
        found.left.append(f"optimizer states ({len(optimizers)}: there is one here)")
    state = facts.get("trainer_state.json", {})
    found.num_updates = int(number(state.get("global_step")) or 0) or None
    found.best = number(state.get("best_metric"))
    take_folder_position(found, state)
    found.left += [f"{name} (state of a schedule)" for name in schedulers]
    known = {*models, *optimizers, *schedulers, *facts}
    found.left += [name for name in files if name not in known]
    return found


def main_models(models: dict[str, dict]) -> dict[str, dict]:
    """One of several files with the same tensors: an index before a file, safetensors before a pickle."""
    order = sorted(models, key=lambda name: (not name.endswith(INDEX), "safetensors" not in name, name))
    kept: dict[str, dict] = {}
    for name in order:
        if not any(set(models[name]) <= set(other) for other in kept.values()):
            kept[name] = models[name]
    return kept


def take_folder_position(found: Found, state: Mapping[str, Any]) -> None:
    """trainer_state.json has the epoch as a fraction and the number of updates."""
    epoch, steps = number(state.get("epoch")), number(state.get("global_step"))
    if epoch is not None:
        whole = int(epoch + 1e-9)
        found.position = {"epoch": whole + 1, "samples_in_epoch": 0, "share_of_epoch": max(0.0, epoch - whole)}
        if steps and not state.get("best_metric"):
            found.best = None


# ---- whatever else is a dictionary


def found_in_dict(saved: Mapping[str, Any]) -> Found:
    """A bare state dict, or a dictionary with one somewhere, an optimizer, counts under their usual names."""
    if is_state_dict(saved) and all(isinstance(value, TensorRef) for value in saved.values()):
        return Found(kind="a bare state dict", models={"": tensors_of(saved)})
    found = Found(kind="a dictionary with a model")
    parts = dict(state_dicts(saved))
    for key in sorted(parts, key=lambda key: (*usual(key), -len(parts[key]))):
        (found.averages if is_average(key) else found.models)[key] = parts[key]
    if not found.models:
        found.models, found.averages = found.averages, {}
    optimizers = {key: value for key, value in saved.items() if is_optimizer(value)}
    key = next((key for key in (*OPTIMIZER_KEYS, *optimizers) if key in optimizers), None)
    found.optimizer = optimizers.get(key)
    places = [
        saved,
        *(
            saved[key]
            for key in ("train_state", "trainer_state", "state", "meta")
            if isinstance(saved.get(key), Mapping)
        ),
    ]
    counts = (number(place.get(key)) for place in places for key in COUNTS)
    found.num_updates = next((int(count) for count in counts if count is not None), None)
    epoch = next((int(n) for key in EPOCHS if (n := number(saved.get(key))) is not None), None)
    if epoch is not None:
        found.left.append(
            f"epoch {epoch} (whether it is done or begins is not in the file: the data starts at epoch 1)"
        )
    found.best = next((n for key in BESTS if (n := scalar(saved.get(key))) is not None), None)
    taken = {*COUNTS, *EPOCHS, *BESTS, key, *(name.partition(".")[0] for name in parts)}
    inside = parts.get("", {})
    found.left += [str(name) for name in saved if name not in taken and name not in inside]
    return found


def state_dicts(nest: Any, path: str = "", depth: int = 0) -> list[tuple[str, dict[str, TensorRef]]]:
    """The state dicts in a nest by the keys that lead to them, each with the tensors that stand in it directly."""
    if not isinstance(nest, Mapping) or is_optimizer(nest) or depth > 4:
        return []
    found = [(path, tensors_of(nest))] if is_state_dict(nest) else []
    for key, value in nest.items():
        if isinstance(key, str):
            found += state_dicts(value, f"{path}.{key}" if path else key, depth + 1)
    return found


def is_average(key: str) -> bool:
    parts = key.lower().split(".")
    return any(part in EMA_KEYS or part.startswith("ema") or part.endswith("_ema") for part in parts)


def usual(key: str) -> tuple[int]:
    last = key.rpartition(".")[2]
    return (MODEL_KEYS.index(last) if last in MODEL_KEYS else len(MODEL_KEYS),)


def files_of(saved: Any) -> Mapping[str, Any] | None:
    return saved.get(FILES) if isinstance(saved, Mapping) else None
