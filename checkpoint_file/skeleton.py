"""Names and containers of a file, read without making a tensor and without running anything (docs/checkpoint.md, F7)."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint_file.archive import Place
from checkpoint_file.errors import CheckpointDamagedError, NotACheckpointError
from checkpoint_file.nests import type_name

FORMAT_VERSION = 1


class TensorRef:
    """A tensor of the file, by its description: `dtype`, `shape`, `nbytes` (of the full tensor). The rest is opaque.

    A tensor lies in one record, or box by box in several: `_chunks` are then (offsets, ref of the box), and `_record`
    is no record but a name, equal for tensors of the same bytes.
    """

    __slots__ = ("dtype", "shape", "nbytes", "_record", "_offset", "_stride", "_chunks")

    def __init__(
        self, dtype: torch.dtype, shape: tuple, record: str, offset: int, stride: tuple, chunks: tuple = ()
    ) -> None:
        self.dtype, self.shape = dtype, torch.Size(shape)
        self.nbytes = self.shape.numel() * dtype.itemsize
        self._record, self._offset, self._stride, self._chunks = record, offset, tuple(stride), tuple(chunks)

    def __reduce__(self):
        return TensorRef, (self.dtype, tuple(self.shape), self._record, self._offset, self._stride, self._chunks)

    def __repr__(self) -> str:
        return f"TensorRef({self.dtype}, {tuple(self.shape)}, {self._record})"

    def span(self) -> tuple[int, int]:
        """The bytes [begin, end) of the record between which all elements lie."""
        if self.shape.numel() == 0:
            return self._offset, self._offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self._stride))
        return self._offset, self._offset + (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class _StorageRef:
    record: str
    dtype: torch.dtype | None


class _SkeletonUnpickler(pickle.Unpickler):
    """Reads data.pkl without making a tensor. Only the names below mean anything; all others are refused by name."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.sizes: dict[str, int] = {}  # bytes that each record must have at least

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self.tensor_of_dtype,
            ("torch._utils", "_rebuild_parameter"): self.parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): self.parameter,
            ("torch.storage", "UntypedStorage"): None,
            ("torch", "UntypedStorage"): None,
            ("torch", "Size"): self.shape,
            ("collections", "OrderedDict"): OrderedDict,
            ("__builtin__", "complex"): complex,
            ("builtins", "complex"): complex,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch" and name in storage_dtypes():
            return storage_dtypes()[name]
        raise UnknownClass(f"{module}.{name}")

    def persistent_load(self, saved_id: Any) -> _StorageRef:
        _, dtype, key, _, count = saved_id
        record = f"data/{key}"
        self.sizes[record] = max(self.sizes.get(record, 0), int(count) * (dtype.itemsize if dtype else 1))
        return _StorageRef(record, dtype)

    def tensor(self, storage: _StorageRef, offset: int, shape: tuple, stride: tuple, *_: Any) -> TensorRef:
        return self.tensor_of_dtype(storage, offset, shape, stride, None, None, storage.dtype)

    def tensor_of_dtype(self, storage: _StorageRef, offset: int, shape: tuple, stride: tuple, *rest: Any) -> TensorRef:
        dtype = rest[2]
        ref = TensorRef(dtype, tuple(shape), storage.record, offset * dtype.itemsize, stride)
        begin, end = ref.span()
        if min((0, offset, *shape, *stride)) < 0 or (end > begin and end > self.sizes[storage.record]):
            raise ValueError(f"{ref} reaches beyond its record")
        return ref

    @staticmethod
    def parameter(data: TensorRef, *_: Any) -> TensorRef:
        return data

    @staticmethod
    def shape(sizes: Any = ()) -> tuple:
        return tuple(sizes)


class UnknownClass(pickle.UnpicklingError):
    pass


def storage_dtypes() -> dict[str, torch.dtype]:
    names = {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    }  # fmt: skip
    return {f"{name}Storage": dtype for name, dtype in names.items()}


def parse_skeleton(data: bytes, places: dict[str, Place], path: str) -> Any:
    reader = _SkeletonUnpickler(data)
    try:
        skeleton = reader.load()
    except UnknownClass as unknown:
        problem = f"holds objects of {unknown}, which is neither a tensor nor plain data; nothing of it was run"
        raise NotACheckpointError(path, problem) from None
    except Exception as error:  # whatever a pickle of another make can raise: its bytes are as they were written
        problem = f"its record data.pkl cannot be read ({type(error).__name__}: {error})"
        raise NotACheckpointError(path, problem) from error
    for record, nbytes in reader.sizes.items():
        if record not in places or places[record].nbytes < nbytes:
            raise CheckpointDamagedError(path, f"record {record} is missing or too short", record)
    return skeleton


def require_own_format(skeleton: Any, path: str) -> None:
    """Raise NotACheckpointError, saying what the file holds, unless the skeleton is one that fairtrain wrote."""
    if not isinstance(skeleton, dict):
        raise NotACheckpointError(path, f"holds a {type_name(skeleton)}, not the dict of a checkpoint")
    if "format_version" in skeleton and isinstance(skeleton.get("model"), dict):
        if skeleton["format_version"] == FORMAT_VERSION:
            return
        version = skeleton["format_version"]
        problem = f"has format version {version!r}; this fairtrain reads version {FORMAT_VERSION}"
        raise NotACheckpointError(path, problem)
    keys = ", ".join(map(str, list(skeleton)[:6])) + (", ..." if len(skeleton) > 6 else "")
    if skeleton and all(isinstance(value, TensorRef) for value in skeleton.values()):
        found = f"a bare state dict of {len(skeleton)} tensors ({keys})"
    elif {"model", "ema", "opt"} <= set(skeleton):
        found = "a checkpoint of DiT's own training script (model, ema, opt)"
    elif {"model", "optimizer_history"} <= set(skeleton):
        found = "a checkpoint of fairseq"
    else:
        found = f"a dict with the keys {keys or '(none)'}"
    raise NotACheckpointError(path, f"is no checkpoint of fairtrain: it holds {found}")
