"""Names and containers of a file, read without making a tensor and without running anything (docs/checkpoint.md, F7)."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint_file.archive import Place
from checkpoint_file.errors import CheckpointDamagedError, NotACheckpointError
from checkpoint_file.nests import type_name
from checkpoint_file.stand_ins import RefusedName, as_plain, find_data

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
    """Reads data.pkl without making a tensor. Only the names below mean anything; all others are refused by name.

    find_other: what the names mean that are not below, in files of other programs (stand_ins.find_data).
    """

    def __init__(self, file: Any, find_other: Callable[[str, str], Any] | None = None) -> None:
        super().__init__(file, encoding="utf-8")
        self._find_other = find_other
        self.sizes: dict[str, int] = {}  # bytes that each record must have at least

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch._utils", "_rebuild_tensor"): self.tensor,
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
        if module in ("torch", "torch.cuda") and name in storage_dtypes():
            return storage_dtypes()[name]
        if self._find_other is not None:
            if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
                return self.tensor_with_attributes
            return self._find_other(module, name)
        raise RefusedName(f"{module}.{name}")

    def tensor_with_attributes(self, rebuild: Any, _: Any, arguments: tuple, __: Any) -> Any:
        """A tensor with attributes of its own, or of a subclass: the tensor."""
        if getattr(rebuild, "__func__", None) not in (type(self).tensor, type(self).tensor_of_dtype):
            raise RefusedName(f"torch._tensor._rebuild_from_type_v2 of {rebuild!r}")
        return rebuild(*arguments)

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


def storage_dtypes() -> dict[str, torch.dtype]:
    names = {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    }  # fmt: skip
    return {f"{name}Storage": dtype for name, dtype in names.items()}


def parse_skeleton(data: bytes, places: dict[str, Place], path: str, own_format: bool = True) -> Any:
    """What data.pkl says. own_format: objects of other people's classes are refused, not read as plain data."""
    reader = _SkeletonUnpickler(io.BytesIO(data), None if own_format else find_data)
    skeleton = unpickled(reader, path, "its record data.pkl")
    for record, nbytes in reader.sizes.items():
        if record not in places or places[record].nbytes < nbytes:
            raise CheckpointDamagedError(path, f"record {record} is missing or too short", record)
    return skeleton if own_format else as_plain(skeleton)


def unpickled(reader: _SkeletonUnpickler, path: str, what: str) -> Any:
    """The object that the reader comes to next. Raises: NotACheckpointError, saying which name was refused."""
    try:
        return reader.load()
    except RefusedName as refused:
        problem = f"holds objects of {refused}, which is neither a tensor nor plain data; nothing of it was run"
        raise NotACheckpointError(path, problem) from None
    except Exception as error:  # whatever a pickle of another make can raise: its bytes are as they were written
        problem = f"{what} cannot be read ({type(error).__name__}: {error})"
        raise NotACheckpointError(path, problem) from error


def is_own_format(skeleton: Any) -> bool:
    """Whether it is a checkpoint of fairtrain, of whatever version."""
    return isinstance(skeleton, dict) and "format_version" in skeleton and isinstance(skeleton.get("model"), dict)


def require_own_format(skeleton: Any, path: str) -> None:
    """Raise NotACheckpointError, saying what the file holds, unless the skeleton is one that fairtrain wrote."""
    if not isinstance(skeleton, dict):
        raise NotACheckpointError(path, f"holds a {type_name(skeleton)}, not the dict of a checkpoint")
    if is_own_format(skeleton):
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
