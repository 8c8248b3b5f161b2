"""`fairtrain-checkpoint export FILE -o OUT --format …`: the weights of a checkpoint for other programs.

safetensors    one file; tied tensors are written under each of their names
state_dict     one file of torch.save, names to tensors
huggingface    a folder: config.json, model.safetensors (several and an index from --max-shard-size on)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from checkpoint_file import TensorRef
from trainer.errors import ConfigError
from trainer.printed import as_json, first, size
from trainer.tools.copied import copied
from trainer.tools.opened import Checkpoint, mapping, open_any
from trainer.tools.safetensors import write_safetensors
from trainer.tools.streamed import Computed, write_streamed

HELP = "the weights of a checkpoint as safetensors, as a bare state dict or as a Hugging Face folder"
SHIPPED = {  # models whose constructor's arguments are the config of a Hugging Face folder
    "trainer.tasks.dit.model.DiT": "fairtrain_dit",
    "trainer.tasks.language_modeling.model.TransformerLM": "fairtrain_transformer_lm",
}
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="a checkpoint, file or folder")
    command.add_argument(
        "-o", "--output", required=True, metavar="OUT", help="what is written; a folder with huggingface"
    )
    command.add_argument("--format", required=True, choices=["safetensors", "state_dict", "huggingface"])
    command.add_argument("--ema", action="store_true", help="the averaged weights in place of the trained ones")
    command.add_argument("--dtype", choices=list(FLOATS), help="of floating-point tensors (default: as they are)")
    command.add_argument(
        "--max-shard-size",
        type=float,
        default=5.0,
        metavar="GB",
        help="of one file in a Hugging Face folder (default 5)",
    )


def run(arguments: argparse.Namespace) -> int:
    with open_any(arguments.file) as checkpoint:
        weights, left = weights_of(checkpoint, arguments.ema)
        tensors = copied(checkpoint, weights, FLOATS.get(arguments.dtype))
        output = os.path.expanduser(arguments.output)
        if arguments.format == "huggingface":
            nbytes = write_folder(
                tensors, config_of(checkpoint, arguments.dtype), output, int(arguments.max_shard_size * 1e9)
            )
        elif arguments.format == "safetensors":
            nbytes = write_safetensors(tensors, output)
        else:
            nbytes = write_streamed(tensors, output)
    report = {"output": output, "bytes": nbytes, "tensors": len(tensors), "ema": arguments.ema, "left_out": left}
    if arguments.json:
        print(as_json(report))
    else:
        kind = "averaged" if arguments.ema else "trained"
        print(f"{output}: {len(tensors)} tensors, {kind} weights, {size(nbytes)}")
        if left:
            print(f"  left out, for it is no tensor: {first(left)}")
    return 0


def weights_of(checkpoint: Checkpoint, ema: bool) -> tuple[dict[str, TensorRef], list[str]]:
    """(tensors of the model by name, names of what is no tensor). Raises ConfigError where there are none."""
    model = dict(mapping(checkpoint.state.get("model")))
    if ema:
        average = mapping(checkpoint.extra_state.get("ema"))
        if not average:
            raise ConfigError(f"{checkpoint.path} holds no average of the weights: leave --ema out")
        model |= average
    tensors = {name: ref for name, ref in model.items() if isinstance(ref, TensorRef)}
    if not tensors:
        raise ConfigError(f"{checkpoint.path} holds no model")
    return tensors, [name for name in model if name not in tensors]


def config_of(checkpoint: Checkpoint, dtype: str | None) -> dict[str, Any]:
    """config.json: the constructor's arguments. Raises ConfigError for a model that is not one of ours."""
    model = mapping(mapping(checkpoint.state.get("cfg")).get("model"))
    target = model.get("_target_")
    if target not in SHIPPED:
        raise ConfigError(
            f"{checkpoint.path} holds {target or 'a model that it does not name'}; Hugging Face folders are written of "
            f"{' and '.join(SHIPPED)}. For any model: --format safetensors"
        )
    arguments = {key: value for key, value in model.items() if key != "_target_"}
    kind = {"model_type": SHIPPED[target], "architectures": [target.rpartition(".")[2]]}
    return {**kind, **({"torch_dtype": dtype} if dtype else {}), "_target_": target, **arguments}


def write_folder(tensors: Mapping[str, Computed], config: dict[str, Any], output: str, shard_bytes: int) -> int:
    """A folder that appears under its name whole, or not at all. Returns the bytes of its tensors' files."""
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: give the folder another name, or remove it")
    if shard_bytes < 1:
        raise ConfigError("--max-shard-size must be above 0")
    temporary = f"{output.rstrip('/')}.{os.getpid()}.tmp"
    os.makedirs(temporary)
    try:
        shards = cut_into_shards(tensors, shard_bytes)
        total = 0
        for name, shard in shards.items():
            total += write_safetensors(shard, os.path.join(temporary, name))
        _write_json(os.path.join(temporary, "config.json"), config)
        if len(shards) > 1:
            weight_map = {name: file for file, shard in shards.items() for name in shard}
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
            _write_json(os.path.join(temporary, "model.safetensors.index.json"), index)
        os.rename(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return total


def cut_into_shards(tensors: Mapping[str, Computed], shard_bytes: int) -> dict[str, dict[str, Computed]]:
    """Files by name, each with at most so many bytes of tensors, or one tensor."""
    shards: list[dict[str, Computed]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _write_json(path: str, value: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
