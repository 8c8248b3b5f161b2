"""A saved state into the parts of a Trainer: modules, optimizer, averages.

Owns: what is taken, what starts fresh, and the words on it in the report. Names and shapes are compared by state.py, the
bytes come by the reader. Must not know: the Trainer, counters, where the file is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import checkpoint_file
from trainer import foreign, optim, state
from trainer.ema import EMA
from trainer.partial_state import Selection

logger = logging.getLogger(__name__)


def own_layout(
    reader: Any, model: nn.Module, classes: Mapping[str, str | None], selection: Selection, report: state.LoadReport
) -> dict[str, Any]:
    """The state of a file in the layout of ours, whoever wrote it; says in `report` what was taken for what.

    classes: as of state.class_names. Raises: NotACheckpointError, foreign.names.AmbiguousNamesError.
    """
    if checkpoint_file.is_own_format(reader.skeleton):
        checkpoint_file.require_own_format(reader.skeleton, reader.path)
        return reader.skeleton
    saved, found = foreign.in_own_layout(reader, foreign.Here.of(model, classes), selection)
    logger.info("%s is a checkpoint of another program: %s", reader.path, found.kind)
    report.restored += [f"from {found.kind}", *found.notes]
    report.dropped += found.left
    return saved


def fill_modules(
    model: nn.Module,
    criterion: Any,
    saved: Mapping[str, Any],
    reader: Any,
    selection: Selection,
    report: state.LoadReport,
    continues: bool = True,
) -> list[str]:
    """Fill model and criterion; returns the names of what was not taken as it is, which starts fresh.

    continues: the run goes on, so that buffers may take the shape of the file (state.plan_module).
    Raises: state.ModelMismatchError, ConfigError where another number of tensors is taken than was demanded.
    """
    modules = [("model", "", model)]
    if isinstance(criterion, nn.Module):
        modules.append(("criterion", "criterion.", criterion))
    plans = [
        state.plan_module(module, saved.get(key) or {}, report.path, key, selection, prefix, continues)
        for key, prefix, module in modules
    ]
    file_names = [prefix + name for key, prefix, _ in modules for name in saved.get(key) or {}]
    for pattern in selection.idle_patterns(file_names):
        logger.warning("%s: no tensor is found by the pattern %r of checkpoint.load_include or load_exclude", report.path, pattern)
    selection.check_count(sum(len(plan.taken) + len(plan.sliced) for plan in plans), report.path)
    reader.copy([pair for plan in plans for pair in plan.pairs])
    for source, target in (pair for plan in plans for pair in plan.slices):
        state.copy_common_part(reader.materialize(source), target)
    for key, _, module in modules:
        state.load_module_extras(module, saved.get(key) or {}, reader.materialize)
    report.add_module(plans[0])
    grown = [text for plan in plans for text in plan.grown]
    report.restored += [f"buffers that took the shape of the file: {'; '.join(grown)}"] if grown else []
    return [prefix + name for (_, prefix, _), plan in zip(modules, plans) for name in (*plan.fresh, *plan.sliced)]


def fill_optimizer(
    optimizer: torch.optim.Optimizer,
    names: list[str],
    saved: Mapping[str, Any],
    reader: Any,
    selection: Selection,
    fresh: list[str],
    reset: bool,
    report: state.LoadReport,
) -> None:
    """Give `optimizer` the saved moments, or those that it begins with (`reset`, or the file has none).

    names: of the trained parameters, in the model's order. fresh: parameters that were not taken from the file.
    """
    saved_optimizer = saved.get("last_optimizer_state")
    if saved_optimizer is None and not reset:
        logger.warning("%s holds no optimizer state: moments start from zero", report.path)
        report.fresh.append("optimizer (none in the file)")
    at_first = optim.fresh_state(optimizer)
    optimizer.state.clear()
    optimizer.state.update(at_first)
    if reset:
        report.reset.append("optimizer moments")
    elif saved_optimizer is not None:
        renamed = selection.optimizer_state(saved_optimizer)
        report.add_optimizer(optim.restore_optimizer_state(optimizer, renamed, reader.copy, fresh, model_order=names))


def fill_ema(
    ema: EMA, saved: Mapping[str, Any], reader: Any, selection: Selection, fresh: list[str], report: state.LoadReport
) -> None:
    """Give `ema` the saved averages; those of `fresh` tensors, and those that the file lacks, start from the weights."""
    tensors = selection.tensors(saved["extra_state"].get("ema") or {})
    restored = ema.restore({name: value for name, value in tensors.items() if name not in fresh}, reader.copy)
    if restored.restored:
        report.restored.append("ema")
        report.fresh += [f"ema of {name}" for name in restored.missing]
    else:
        report.fresh.append("ema (none in the file: it starts from the loaded weights)")


def override_optimizer(optimizer: Any, lr_scheduler: Any, overrides: Any) -> None:
    """Replace hyperparameters, as a mapping or fairseq's text gives them; a new rate goes to the schedule."""
    if overrides:
        new_lr = optim.apply_optimizer_overrides(optimizer, optim.parse_overrides(overrides))
        if new_lr is not None:
            lr_scheduler.set_base_lr(new_lr)
