"""Files of safetensors, written piece by piece: eight bytes with the length of a JSON header, the header, the tensors.

Source: the format as its authors describe it, github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping

import torch

from trainer.errors import ConfigError
from trainer.tools.streamed import Computed

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
ALIGNMENT = 8  # of the first tensor's bytes


def write_safetensors(tensors: Mapping[str, Computed], path: str, metadata: Mapping[str, str] | None = None) -> int:
    """Write the tensors under `path`: whole and on the disk, or not at all. Returns its bytes.

    Raises: ConfigError for a dtype that the format does not have, CheckpointError where the values are damaged, OSError.
    """
    head, order = _header(tensors, metadata or {})
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(head)
            for name in order:
                for data in tensors[name].bytes():
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return os.path.getsize(path)


def _header(tensors: Mapping[str, Computed], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The bytes before the tensors, and the order of the tensors: wide elements first, so that each is aligned."""
    odd = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if odd:
        raise ConfigError(
            f"safetensors has no place for {', '.join(odd[:5])}: leave such tensors out, or write --format state_dict"
        )
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for name in order:
        tensor = tensors[name]
        end = position + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, order
