"""Checkpoints of fairseq, of the days of argparse (`args`) and of those since (`cfg`), down to 0.6.

Owns: where fairseq keeps what, and what it means here. Must not know: the model of this run, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.foreign.found import Found, is_optimizer, is_state_dict, number, scalar, tensors_of

# fairseq's adam decouples the decay from the gradient, which is torch's AdamW.
OPTIMIZERS = {
    "FairseqAdam": ("AdamW", "AdamW"), "FairseqCPUAdam": ("AdamW", "AdamW"), "FairseqAdaGrad": ("Adagrad",),
    "Adagrad": ("Adagrad",), "FairseqSGD": ("SGD",), "SGD": ("SGD",), "FairseqAdamax": ("Adamax",), "Adadelta": ("Adadelta",),
}  # fmt: skip
BY_OPTION = {"adam": "FairseqAdam", "cpu_adam": "FairseqCPUAdam", "sgd": "SGD", "adagrad": "Adagrad", "adamax": "FairseqAdamax", "adadelta": "Adadelta"}  # fmt: skip
SCHEDULES = {
    "fixed": "Fixed", "inverse_sqrt": "InverseSqrt", "cosine": "Cosine", "polynomial_decay": "PolynomialDecay",
    "tri_stage": "TriStage", "reduce_lr_on_plateau": "ReduceLROnPlateau",
}  # fmt: skip
WRAPPED = ("FP16Optimizer", "MemoryEfficientFP16Optimizer", "AMPOptimizer", "FairseqBMUF")
EMA_KEYS = ("ema_fp32_params", "ema")
OWN_KEYS = {
    "args",
    "cfg",
    "model",
    "criterion",
    "optimizer_history",
    "task_state",
    "extra_state",
    "last_optimizer_state",
}
OWN_EXTRA = {
    "train_iterator",
    "metrics",
    "best",
    "val_loss",
    "previous_training_time",
    "epoch",
    "batch_offset",
    *EMA_KEYS,
}


def is_fairseq(saved: Mapping) -> bool:
    has_run = "optimizer_history" in saved or "extra_state" in saved or "last_optimizer_state" in saved
    return (
        is_state_dict(saved.get("model"))
        and ("args" in saved or "cfg" in saved or "optimizer_history" in saved)
        and has_run
    )


def found_in(saved: Mapping[str, Any]) -> Found:
    cfg = settings_of(saved)
    extra = saved.get("extra_state") if isinstance(saved.get("extra_state"), Mapping) else {}
    history = saved.get("optimizer_history") or []
    last = history[-1] if isinstance(history, list) and history and isinstance(history[-1], Mapping) else {}
    found = Found(kind="fairseq", cfg=saved.get("cfg") or saved.get("args"))
    found.models = {"model": tensors_of(saved["model"])}
    found.tied = tied_names(saved["model"], cfg)
    found.averages = {f"extra_state.{key}": tensors_of(extra[key]) for key in EMA_KEYS if is_state_dict(extra.get(key))}
    found.criterion = tensors_of(saved.get("criterion") or {})
    found.criterion_name = last.get("criterion_name")
    found.num_updates = int(number(last.get("num_updates")) or 0)
    take_optimizer(found, saved, last, cfg)
    take_schedule(found, last, cfg)
    take_position(found, extra, saved, cfg)
    found.best = scalar(extra.get("best", last.get("best_loss")))
    found.training_time = scalar(extra.get("previous_training_time")) or 0.0
    if "metrics" in extra or "train_meter" in extra:
        found.left.append("meters of fairseq")
    if saved.get("task_state"):
        found.left.append("task_state (" + ", ".join(map(str, list(saved["task_state"])[:5])) + ")")
    found.left += [f"extra_state.{key}" for key in extra if key not in OWN_EXTRA and not key.endswith("_meter")]
    found.left += [str(key) for key in saved if key not in OWN_KEYS]
    return found


def settings_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What the run was started with, under the names of its options, of either era."""
    args, cfg = saved.get("args"), saved.get("cfg")
    flat = dict(args) if isinstance(args, Mapping) else {}
    for name, section in cfg.items() if isinstance(cfg, Mapping) else ():
        if isinstance(section, Mapping):
            flat.update(
                {key: value for key, value in section.items() if key not in flat and not str(key).startswith("_")}
            )
            if "_name" in section:
                flat[name] = section["_name"]
    return flat


def tied_names(model: Mapping[str, Any], cfg: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Second names of shared tensors; half precision files hold such a tensor twice."""
    pairs = []
    for side in ("decoder", "encoder"):
        table, output = f"{side}.embed_tokens.weight", f"{side}.output_projection.weight"
        shared = (
            cfg.get("share_decoder_input_output_embed")
            or cfg.get("share_all_embeddings")
            or cfg.get("tie_adaptive_weights")
        )
        if shared and table in model and output in model and tuple(model[table].shape) == tuple(model[output].shape):
            pairs.append((output, table))
    first, second = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
    if cfg.get("share_all_embeddings") and first in model and second in model:
        pairs.append((second, first))
    return tuple(pairs)


def take_optimizer(found: Found, saved: Mapping[str, Any], last: Mapping[str, Any], cfg: Mapping[str, Any]) -> None:
    state = saved.get("last_optimizer_state", saved.get("optimizer"))
    name = last.get("optimizer_name") or ("FairseqNAG" if state is not None else None)
    if name in WRAPPED:
        inner = BY_OPTION.get(str(cfg.get("optimizer")), str(cfg.get("optimizer")))
        found.notes.append(f"optimizer {name} is {inner} in half precision")
        name = inner
    found.optimizer_class = name
    found.optimizer_names = OPTIMIZERS.get(str(name), (str(name),) if name else ())
    if is_optimizer(state):
        found.optimizer = {
            "state": dict(state["state"]),
            "param_groups": [dict(group) for group in state["param_groups"]],
        }
        found.loss_scale = number(state.get("loss_scale"))
    elif isinstance(state, str):
        found.notes.append(f"the optimizer state of the file is the placeholder {state!r}: moments start from zero")
    elif state is not None:
        found.left.append("optimizer state of a layout that is not torch's")


def take_schedule(found: Found, last: Mapping[str, Any], cfg: Mapping[str, Any]) -> None:
    """fairseq computes the rate from the number of updates; only reduce_lr_on_plateau has a state to go on from."""
    name = cfg.get("lr_scheduler")
    found.lr_scheduler_name = SCHEDULES.get(str(name), str(name)) if name else None
    saved = last.get("lr_scheduler_state") or {}
    if name == "reduce_lr_on_plateau":
        state = {"best": number(saved.get("best"))}
        rate, base = rate_of(found), cfg.get("lr")
        base = number(base[0] if isinstance(base, list) and base else base)
        if rate and base:
            state["factor"] = rate / base
        found.lr_scheduler_state = state


def rate_of(found: Found) -> float | None:
    return (
        number(found.optimizer["param_groups"][0].get("lr"))
        if found.optimizer and found.optimizer["param_groups"]
        else None
    )


def take_position(found: Found, extra: Mapping[str, Any], saved: Mapping[str, Any], cfg: Mapping[str, Any]) -> None:
    """The epoch, and how many samples of it were read: fairseq counts the batches of one rank."""
    iterator = extra.get("train_iterator") or {
        "epoch": extra.get("epoch", saved.get("epoch")),
        "iterations_in_epoch": extra.get("batch_offset", 0),
    }
    epoch, iterations = number(iterator.get("epoch")), number(iterator.get("iterations_in_epoch")) or 0
    if epoch is None:
        return
    found.position = {"epoch": max(1, int(epoch)), "samples_in_epoch": 0}
    if not iterations:
        return
    samples = samples_per_batch(cfg)
    if samples is None:
        found.notes.append(
            f"how many samples the {int(iterations)} batches of epoch {int(epoch)} held is not in the file: the epoch begins anew"
        )
        return
    ranks = int(number(cfg.get("distributed_world_size")) or 1)
    found.position["samples_in_epoch"] = int(iterations) * samples * ranks


def samples_per_batch(cfg: Mapping[str, Any]) -> int | None:
    """Samples in one batch of one rank, where that is the same for all batches."""
    size = number(cfg.get("batch_size")) or number(cfg.get("max_sentences"))
    tokens, block = number(cfg.get("max_tokens")), number(cfg.get("tokens_per_sample"))
    by_tokens = tokens // block if tokens and block and cfg.get("sample_break_mode", "none") in (None, "none") else None
    if size and (by_tokens or not tokens):
        return int(min(size, by_tokens or size))
    return int(by_tokens) if by_tokens and not size else None
