"""Names and containers of a file, read without making a tensor and without running anything (docs/checkpoint.md, F7)."""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint_file.archive import Place
from checkpoint_file.errors import CheckpointDamagedError, NotACheckpointError
from checkpoint_file.limits import SPREAD_BYTES, RefusedBytes, check_nest, check_pickle, reason_of, shown
from checkpoint_file.nests import type_name
from checkpoint_file.stand_ins import RefusedName, as_plain, find_data


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

    def __setstate__(self, state: Any) -> None:
        raise RefusedBytes("it changes a tensor after it was described")  # or checked sizes could be replaced

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

    def __setstate__(self, state: Any) -> None:
        raise RefusedBytes("it changes a storage after it was described")


class _SkeletonUnpickler(pickle.Unpickler):
    """Reads data.pkl without making a tensor. Only the names below mean anything; all others are refused by name.

    find_other: what the names mean that are not below, in files of other programs (stand_ins.find_data).
    """

    def __init__(self, file: Any, find_other: Callable[[str, str], Any] | None = None) -> None:
        super().__init__(file, encoding="utf-8")
        self._find_other = find_other
        self.is_own = find_other is None
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
        if module == "torch" and name in dtypes():
            return dtypes()[name]
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
            raise RefusedName(f"torch._tensor._rebuild_from_type_v2 of {shown(rebuild)}")
        return rebuild(*arguments)

    def persistent_load(self, saved_id: Any) -> _StorageRef:
        kind, dtype, key, _, count = saved_id
        if kind != "storage" or type(key) is not str or type(count) is not int or count < 0:
            raise RefusedBytes(f"it describes the storage {shown(saved_id)}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise RefusedBytes(f"it describes a storage of {shown(dtype)}")
        record = f"data/{key}"
        self.sizes[record] = max(self.sizes.get(record, 0), count * (dtype.itemsize if dtype else 1))
        return _StorageRef(record, dtype)

    def tensor(self, storage: _StorageRef, offset: int, shape: tuple, stride: tuple, *_: Any) -> TensorRef:
        return self.tensor_of_dtype(storage, offset, shape, stride, None, None, storage.dtype)

    def tensor_of_dtype(self, storage: _StorageRef, offset: int, shape: tuple, stride: tuple, *rest: Any) -> TensorRef:
        dtype = rest[2]
        if not isinstance(storage, _StorageRef) or not isinstance(dtype, torch.dtype):
            raise RefusedBytes(f"it describes a tensor of {shown(dtype)} in {shown(storage)}")
        check_layout(dtype, offset, shape, stride)
        ref = TensorRef(dtype, tuple(shape), storage.record, offset * dtype.itemsize, stride)
        begin, end = ref.span()
        if end > begin and end > self.sizes[storage.record]:
            raise RefusedBytes(f"{ref} reaches beyond its record")
        return ref

    # Bound methods, which nothing in a pickle can change; a function has attributes that BUILD would set.
    def parameter(self, data: TensorRef, *_: Any) -> TensorRef:
        if not isinstance(data, TensorRef):
            raise RefusedBytes(f"it makes a parameter of {shown(data)}")
        return data

    def shape(self, sizes: Any = ()) -> tuple:
        return tuple(sizes)


def check_layout(dtype: torch.dtype, offset: Any, shape: Any, stride: Any) -> None:
    """Raise RefusedBytes unless these can be the layout of a tensor, one not much larger than its memory."""
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or any(type(number) is not int or number < 0 for number in numbers):
        raise RefusedBytes(f"it describes a tensor of shape {shown(shape)}, strides {shown(stride)}, offset {shown(offset)}")
    nbytes = math.prod(shape) * dtype.itemsize
    reach = sum((size - 1) * step for size, step in zip(shape, stride)) + 1 if nbytes else 0
    if max(numbers) * dtype.itemsize >= 2**62 or nbytes > reach * dtype.itemsize + SPREAD_BYTES or len(shape) > 64:
        raise RefusedBytes(f"it describes a tensor of shape {shown(shape)} and strides {shown(stride)}, which is too large")


@functools.cache
def dtypes() -> dict[str, torch.dtype]:
    """By name. Looked up in torch itself a name could import whatever torch loads when it is first asked for."""
    return {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


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
    skeleton = unpickled(reader, data, path, "its record data.pkl")
    for record, nbytes in reader.sizes.items():
        if record not in places or places[record].nbytes < nbytes:
            raise CheckpointDamagedError(path, f"record {record} is missing or too short", record)
    return skeleton


def unpickled(reader: _SkeletonUnpickler, data: bytes, path: str, what: str) -> Any:
    """The object in `data`, which the reader reads, as plain data where it reads other people's classes.

    Raises: NotACheckpointError, saying which name was refused.
    """
    try:
        check_pickle(data)
        nest = reader.load()
        nest = nest if reader.is_own else as_plain(nest)
        check_nest(nest, len(data))
        return nest
    except RefusedName as refused:
        problem = f"holds objects of {str(refused)[:200]}, which is neither a tensor nor plain data; nothing of it was run"
        raise NotACheckpointError(path, problem) from None
    except Exception as error:  # whatever a pickle of another make can raise: its bytes are as they were written
        raise NotACheckpointError(path, f"{what} cannot be read: {reason_of(error)}") from error


def is_own_format(skeleton: Any) -> bool:
    """Whether it is a checkpoint of fairtrain, of whatever version."""
    return isinstance(skeleton, dict) and "format_version" in skeleton and isinstance(skeleton.get("model"), dict)


def require_own_format(skeleton: Any, path: str) -> None:
    """Raise NotACheckpointError, saying what the file holds, unless the skeleton is one that fairtrain wrote."""
    if not isinstance(skeleton, dict):
        raise NotACheckpointError(path, f"holds a {type_name(skeleton)}, not the dict of a checkpoint")
    if is_own_format(skeleton):
        return  # `versions.upgraded` says whether this version can be read
    keys = ", ".join(key if isinstance(key, str) else shown(key) for key in list(skeleton)[:6]) + (", ..." if len(skeleton) > 6 else "")
    if skeleton and all(isinstance(value, TensorRef) for value in skeleton.values()):
        found = f"a bare state dict of {len(skeleton)} tensors ({keys})"
    elif {"model", "ema", "opt"} <= set(skeleton):
        found = "a checkpoint of DiT's own training script (model, ema, opt)"
    elif {"model", "optimizer_history"} <= set(skeleton):
        found = "a checkpoint of fairseq"
    else:
        found = f"a dict with the keys {keys or '(none)'}"
    raise NotACheckpointError(path, f"is no checkpoint of fairtrain: it holds {found}")


def require_containers(skeleton: dict[str, Any], path: str) -> None:
    """Raise NotACheckpointError where an entry of a checkpoint is another kind of value than it is in every other."""
    kinds = {
        "cfg": dict, "model": dict, "criterion": dict, "extra_state": dict, "task_state": dict,
        "optimizer_history": list, "last_optimizer_state": (dict, type(None)), "run_id": (str, type(None)),
    }  # fmt: skip
    wrong = [key for key, kind in kinds.items() if key in skeleton and not isinstance(skeleton[key], kind)]
    history = skeleton.get("optimizer_history") or []
    if not wrong and not all(isinstance(entry, dict) for entry in history):
        wrong = ["optimizer_history"]
    if wrong:
        found = shown(type_name(skeleton[wrong[0]]))
        raise NotACheckpointError(path, f"is no checkpoint of fairtrain: its {wrong[0]} is a {found}")


def owners(skeleton: Any, record: str) -> str:
    """The names of the tensors that lie in a record: the first, and how many more; empty where none does."""
    names = [".".join(map(str, keys)) for keys, ref in refs_with_keys(skeleton) if ref._record == record]
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


def refs_with_keys(nest: Any, keys: tuple = ()) -> Iterator[tuple[tuple, TensorRef]]:
    """Each tensor of a nest with the keys that lead to it."""
    if isinstance(nest, TensorRef):
        yield keys, nest
    elif isinstance(nest, (dict, list, tuple)):
        for key, value in nest.items() if isinstance(nest, dict) else enumerate(nest):
            yield from refs_with_keys(value, (*keys, key))
