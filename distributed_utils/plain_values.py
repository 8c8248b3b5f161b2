"""Builtin values as bytes.

The plain part is a pickle that may hold builtin containers and numbers only: the reader refuses every name of a class
or function, so nothing can be executed on arrival. Tensors stand in it as references to (spec, bytes).
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from distributed_utils.blocks import check_sendable, dtype_named
from distributed_utils.errors import CannotSendError


def referring(tensors: dict[int, tuple[int, Tensor]]) -> Callable[[Tensor], tuple[str, int]]:
    """Numbers tensors in the order in which they are met, each once."""

    def refer(tensor: Tensor) -> tuple[str, int]:
        check_sendable(tensor)
        return "tensor", tensors.setdefault(id(tensor), (len(tensors), tensor))[0]

    return refer


class Counter:
    nbytes = 0

    def write(self, data: Any) -> int:
        self.nbytes += memoryview(data).nbytes
        return memoryview(data).nbytes


class PlainPickler(pickle.Pickler):
    """Pickles builtin values; what is known beyond them becomes a reference, anything else is refused."""

    def __init__(self, file: Any, refer: Callable[[Tensor], Any]) -> None:
        super().__init__(file, protocol=5)
        self._refer = refer

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _BUILTIN:
            return None
        if isinstance(obj, Tensor):
            return self._refer(obj)
        if kind is OrderedDict:
            return "OrderedDict", list(obj.items())
        if kind is torch.Size:
            return "Size", tuple(obj)
        if kind is complex:
            return "complex", obj.real, obj.imag
        if kind in (torch.dtype, torch.device):
            return kind.__name__, str(obj).removeprefix("torch.")
        raise CannotSendError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be sent between ranks")


_BUILTIN = frozenset(
    {dict, list, tuple, set, frozenset, type(None), bool, int, float, str, bytes, bytearray}
)  # exactly these: a subclass would arrive as something else


def dumps(obj: Any, refer: Callable[[Tensor], Any]) -> bytes:
    file = io.BytesIO()
    dump(obj, file, refer)
    return file.getvalue()


def dump(obj: Any, file: Any, refer: Callable[[Tensor], Any]) -> None:
    try:
        PlainPickler(file, refer).dump(obj)
    except CannotSendError as error:
        raise CannotSendError(f"{_path_of_unsendable(obj, refer)}: {error}") from None
    except RecursionError:
        raise CannotSendError("nested too deeply to be sent between ranks") from None


def _path_of_unsendable(obj: Any, refer: Callable[[Tensor], Any], path: str = "obj") -> str:
    """Where in `obj` the first value stands that cannot be sent. Only asked when there is one."""
    children: Iterable[tuple[str, Any]] = ()
    if type(obj) in (dict, OrderedDict):
        children = ((f"{path}[{key!r}]", value) for key, value in obj.items())
    elif type(obj) in (list, tuple, set, frozenset):
        children = ((f"{path}[{index}]", value) for index, value in enumerate(obj))
    for name, child in children:
        try:
            PlainPickler(io.BytesIO(), refer).dump(child)
        except CannotSendError:
            return _path_of_unsendable(child, refer, name)
    return path


class PlainUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, dereference: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._dereference = dereference

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a message between ranks names {module}.{name}; only plain values are read")

    def persistent_load(self, reference: Any) -> Any:
        return self._dereference(reference)


def loads(data: bytes, dereference: Callable[[Any], Any]) -> Any:
    return PlainUnpickler(io.BytesIO(data), dereference).load()


def refuse_tensor(tensor: Tensor) -> NoReturn:
    raise CannotSendError("tensors are sent by broadcast_object and broadcast_tensors, not here")


def refuse(reference: Any) -> Any:
    return dereference(reference, [])


def dereference(reference: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    kind, *value = reference
    if kind == "tensor":
        return tensors[value[0]]
    if kind == "OrderedDict":
        return OrderedDict(value[0])
    if kind == "Size":
        return torch.Size(value[0])
    if kind == "complex":
        return complex(*value)
    if kind == "device":
        return torch.device(value[0])
    assert kind == "dtype", kind
    return dtype_named(value[0])
