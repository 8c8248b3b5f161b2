"""`fairtrain-checkpoint inspect FILE…`: what is in a checkpoint. Reads no tensor unless --stats asks for its values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from checkpoint_file import TensorRef
from trainer.printed import as_json, first, plain, size, table
from trainer.tools.opened import Checkpoint, leaves_by_name, mapping, open_any, tensors_of
from trainer.tools.statistics import statistics_of

HELP = "what run a checkpoint is of, where it stood, what is in it"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", nargs="+", metavar="FILE", help="checkpoint files or folders")
    command.add_argument(
        "--depth", type=int, default=1, metavar="N", help="names of this many parts make a module (default 1)"
    )
    command.add_argument("--tensors", action="store_true", help="every tensor with its dtype, shape and bytes")
    command.add_argument("--stats", action="store_true", help="… and mean, std, min, max and what is not finite")
    command.add_argument("--config", action="store_true", help="the saved config, as YAML")


def run(arguments: argparse.Namespace) -> int:
    reports = []
    for path in arguments.files:
        with open_any(checkpoint_at(path)) as checkpoint:
            reports.append(report_on(checkpoint, arguments.depth, arguments.tensors, arguments.stats, arguments.config))
    if arguments.json:
        print(as_json(reports[0] if len(reports) == 1 else reports))
    else:
        print("\n\n".join("\n".join(lines_of(report)) for report in reports))
    return 0


def checkpoint_at(path: str) -> str:
    """`path`; where it is the folder of a run or of its checkpoints, the newest one, checkpoint_last, in it."""
    folder = os.path.expanduser(path)
    names = [os.path.join(*inner, last) for inner in ((), ("checkpoints",)) for last in ("checkpoint_last", "checkpoint_last.pt")]
    found = [file for name in names if os.path.exists(file := os.path.join(folder, name))]
    return max(found, key=os.path.getmtime) if found else path


# ---- what is known


def report_on(
    checkpoint: Checkpoint, depth: int = 1, tensors: bool = False, stats: bool = False, config: bool = False
) -> dict:
    """All that is said of a checkpoint, as plain containers."""
    state = checkpoint.state
    report = {
        "path": checkpoint.path,
        "program": checkpoint.program,
        "format_version": state.get("format_version") if checkpoint.program == "fairtrain" else None,
        "bytes": bytes_on_disk(checkpoint.path),
        **standing(checkpoint),
        "model": _summary(mapping(state.get("model")), set(checkpoint.parameter_names())),
        "modules": modules(mapping(state.get("model")), depth),
        "parts": {part: _sum_of(value) for part, value in parts_of(state).items()},
        "resumable": resumable(checkpoint),
        "notes": checkpoint.notes,
        "left": checkpoint.left,
    }
    if tensors or stats:
        report["tensors"] = [
            {"name": name, **described(ref), **(statistics_of(checkpoint.pieces(ref)).as_dict() if stats else {})}
            for name, ref in tensors_of(state).items()
        ]
    if config:
        report["config"] = plain(state.get("cfg"))
    return report


def standing(checkpoint: Checkpoint) -> dict[str, Any]:
    """Which run, and where it stood."""
    extra, entry, cfg = checkpoint.extra_state, checkpoint.last_entry, mapping(checkpoint.state.get("cfg"))
    position = mapping(extra.get("train_iterator"))
    optimizer = mapping(checkpoint.state.get("last_optimizer_state"))
    groups = [mapping(group) for group in optimizer.get("param_groups") or []]
    return {
        "run_id": checkpoint.state.get("run_id"),
        "task": cfg.get("task_name"),
        "run_dir": cfg.get("run_dir"),
        "num_updates": entry.get("num_updates"),
        "epoch": position.get("epoch"),
        "position": position.get("samples_in_epoch", position.get("iterations_in_epoch")),
        "best": extra.get("best"),
        "best_metric": mapping(cfg.get("checkpoint")).get("best_checkpoint_metric"),
        "training_seconds": extra.get("previous_training_time"),
        "ranks": extra.get("ranks"),
        "num_threads": extra.get("num_threads"),
        "criterion": entry.get("criterion_name"),
        "optimizer": entry.get("optimizer_name"),
        "lr_scheduler": entry.get("lr_scheduler_name"),
        "lr": [group["lr"] for group in groups if isinstance(group.get("lr"), (int, float))],
    }


def parts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What else has tensors, beside the model."""
    extra = mapping(state.get("extra_state"))
    parts = {
        "criterion": state.get("criterion"),
        "optimizer": state.get("last_optimizer_state"),
        "ema": extra.get("ema"),
        "task state": state.get("task_state"),
    }
    return {name: value for name, value in parts.items() if value}


def resumable(checkpoint: Checkpoint) -> list[str]:
    """What a run can take back from the file."""
    state, extra = checkpoint.state, checkpoint.extra_state
    optimizer = mapping(state.get("last_optimizer_state"))
    facts = {
        "parameters": bool(state.get("model")),
        "criterion": bool(state.get("criterion")),
        "optimizer moments": bool(optimizer.get("state")),
        "ema": bool(extra.get("ema")),
        "number of updates": bool(checkpoint.num_updates),
        "lr scheduler": bool(checkpoint.last_entry.get("lr_scheduler_state")),
        "position in the data": bool(extra.get("train_iterator")),
        "meters": bool(extra.get("metrics")),
        "best score": extra.get("best") is not None,
        "loss scale": bool(extra.get("scaler")),
        "task state": bool(state.get("task_state")),
    }
    return [name for name, there in facts.items() if there]


def modules(model: Mapping[str, Any], depth: int) -> list[dict[str, Any]]:
    """Tensors of the model by the first `depth` parts of their names, in the order of the file."""
    grouped: dict[str, dict[str, Any]] = {}
    for name, ref in model.items():
        if isinstance(ref, TensorRef):
            parts = name.split(".")
            grouped.setdefault(".".join(parts[: max(1, min(depth, len(parts) - 1))]), {})[name] = ref
    return [{"module": name, **_sum_of(tensors)} for name, tensors in grouped.items()]


def _summary(model: Mapping[str, Any], trained: set[str]) -> dict[str, Any]:
    known = (
        {"trained": _sum_of({name: ref for name, ref in model.items() if name in trained})["elements"]}
        if trained
        else {}
    )
    return {**_sum_of(model), **known}


def _sum_of(nest: Any) -> dict[str, Any]:
    """Tensors, elements, bytes and dtypes. What shares its memory in the file is counted once."""
    refs = [ref for ref in leaves_by_name({"": nest}).values() if isinstance(ref, TensorRef)]
    distinct = {(ref._record, ref._offset, tuple(ref.shape), ref._stride): ref for ref in refs}.values()
    return {
        "tensors": len(refs),
        "elements": sum(ref.shape.numel() for ref in distinct),
        "bytes": sum(ref.nbytes for ref in distinct),
        "dtypes": sorted({str(ref.dtype).removeprefix("torch.") for ref in refs}),
    }


def described(ref: TensorRef) -> dict[str, Any]:
    return {"dtype": str(ref.dtype).removeprefix("torch."), "shape": list(ref.shape), "bytes": ref.nbytes}


def bytes_on_disk(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())


# ---- how it is said


def lines_of(report: Mapping[str, Any]) -> list[str]:
    model = report["model"]
    version = f", format version {report['format_version']}" if report["format_version"] is not None else ""
    trained = f", {model['trained']:,} of them trained" if "trained" in model else ""
    lines = [
        f"{report['path']}: {report['program']}{version}, {size(report['bytes'])}",
        *(f"  {title:<12} {text}" for title, text in _standing_lines(report)),
        f"  {'model':<12} {model['elements']:,} numbers in {model['tensors']} tensors{trained}, {size(model['bytes'])}",
        *(
            f"  {part:<12} {found['elements']:,} numbers in {found['tensors']} tensors, {size(found['bytes'])}"
            for part, found in report["parts"].items()
        ),
        f"  {'resumable':<12} {', '.join(report['resumable']) or 'nothing'}",
        *(f"  {'note':<12} {note}" for note in report["notes"]),
        *([f"  {'not taken':<12} {first(report['left'])}"] if report["left"] else []),
        "",
        *table(
            [
                [m["module"], m["tensors"], f"{m['elements']:,}", size(m["bytes"]), " ".join(m["dtypes"])]
                for m in report["modules"]
            ],
            ["module", "tensors", "numbers", "bytes", "dtype"],
        ),
    ]
    if "tensors" in report:
        lines += ["", *_tensor_lines(report["tensors"])]
    if "config" in report:
        lines += ["", *_config_lines(report["config"])]
    return lines


def _standing_lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    if report["run_id"] or report["task"]:
        where = f" in {report['run_dir']}" if report["run_dir"] else ""
        found.append(("run", f"{report['run_id'] or ''} task {report['task']}{where}".strip()))
    if report["num_updates"] is not None:
        epoch = f", epoch {report['epoch']}" if report["epoch"] is not None else ""
        place = f", {report['position']} of its samples done" if report["position"] is not None else ""
        spent = (
            f", {report['training_seconds'] / 3600:.2f} hours of training"
            if _is_number(report["training_seconds"])
            else ""
        )
        found.append(("stood at", f"update {report['num_updates']}{epoch}{place}{spent}"))
    if report["best"] is not None:
        found.append(("best", f"{report['best_metric'] or 'score'} {report['best']!r}"))
    if report["ranks"] is not None:
        found.append(("saved by", f"{report['ranks']} ranks, {report['num_threads']} threads each"))
    classes = [f"{kind} {report[kind]}" for kind in ("criterion", "optimizer", "lr_scheduler") if report[kind]]
    if classes:
        lr = f", lr {', '.join(f'{one:.6g}' for one in report['lr'][:4])}" if report["lr"] else ""
        found.append(("classes", ", ".join(classes) + lr))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _tensor_lines(tensors: list[dict[str, Any]]) -> list[str]:
    columns = [key for key in (tensors[0] if tensors else {"name": ""}) if key != "bytes"]

    def cell(value: Any) -> Any:
        return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else value

    return table([[cell(tensor[key]) for key in columns] for tensor in tensors], columns)


def _config_lines(config: Any) -> list[str]:
    import yaml

    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True).splitlines()
