"""Objects of other people's classes, read as the plain data that is in them.

Owns: which names of a pickle may stand for data, and what is made of the objects. Nothing is imported or called: a class
becomes an empty one of ours under its name, which keeps what the pickle gives to an object. What could run code (all of
the standard library, torch and numpy beyond a few data types) is refused by name. docs/checkpoint.md, F7.
"""

from __future__ import annotations

import pickle
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from typing import Any

import numpy as np

# Packages whose functions do things; a pickle that names one is refused, unless the name stands in the tables below.
DOING = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "nt"}
# Modules of those packages with nothing but classes that hold data (a module saved whole, its optimizer).
HOLDING = ("torch.nn.modules.", "torch.optim.", "torch.torch_version", "torch.nn.parallel.data_parallel")
CLASSES = frozenset(
    "argparse.Namespace types.SimpleNamespace pathlib.PosixPath pathlib.WindowsPath pathlib.Path pathlib._local.PosixPath"
    " pathlib._local.WindowsPath pathlib._local.Path typing.Any datetime.datetime datetime.timedelta datetime.date"
    " collections.deque uuid.UUID decimal.Decimal fractions.Fraction torch.device torch.Generator"
    " builtins.object builtins.type".split()
)
TYPES = {name: kind for name, kind in vars(__import__("builtins")).items() if kind in (
    dict, list, tuple, set, frozenset, int, float, str, bool, complex)}  # fmt: skip
MAX_ARRAY = 1 << 20  # elements of an array of numpy that becomes a list


class Fixed:
    """A function of ours that a pickle may call, and of which nothing can be set."""

    __slots__ = ("_do",)

    def __init__(self, do: Any) -> None:
        self._do = do

    def __call__(self, *args: Any) -> Any:
        return self._do(*args)

    def __setstate__(self, state: Any) -> None:
        raise RefusedName("changes a function")


class RefusedName(pickle.UnpicklingError):
    """The pickle names something that is neither data nor the class of an object of data."""


class StandIn:
    """An object of another program's class: `args` it was made from, `state` that it was given, `items` put into it."""

    class_name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        self = object.__new__(cls)
        self.args, self.kwargs, self.state, self.items, self.pairs = args, kwargs, None, [], []
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))


def find_data(module: str, name: str) -> Any:
    """What stands for `module.name` while a pickle is read. Raises: RefusedName."""
    # Pickles of torch.save name things as Python 2 did: commands.Popen, __builtin__.long.
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    whole = f"{module}.{name}"
    if module == "builtins" and name in TYPES:
        return TYPES[name]
    if whole in FUNCTIONS:
        found = FUNCTIONS[whole]
        return found if isinstance(found, type) else Fixed(found)
    package = module.partition(".")[0]
    if package in DOING and whole not in CLASSES and not whole.startswith(HOLDING):
        raise RefusedName(whole)
    return type("StandIn", (StandIn,), {"class_name": whole})


# ---- what pickles of data call, done here on data alone


def reconstructed(cls: Any, base: Any, state: Any) -> Any:
    """As copyreg._reconstructor, for stand-ins and plain types."""
    if isinstance(cls, type) and issubclass(cls, StandIn):
        return cls() if state is None else cls(state)
    raise RefusedName(f"copyreg._reconstructor of {cls!r}")


def encoded(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise RefusedName("_codecs.encode of something else than text")
    return text.encode(encoding)


def raw_bytes(data: Any = b"", *encoding: Any) -> bytes:
    """bytes or bytearray of what the pickle holds; a number would make as many zeros."""
    if isinstance(data, str):
        return encoded(data, *encoding)
    if not isinstance(data, (bytes, bytearray, list, tuple)):
        raise RefusedName("bytes of something else than data")
    return bytes(data)


class ArrayType(StandIn):
    class_name = "numpy.dtype"

    def as_dtype(self) -> np.dtype:
        code = self.args[0] if self.args else ""
        order = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "="
        if not isinstance(code, str) or code[:1] not in "biufc?" or order not in ("<", ">", "=", "|"):
            raise RefusedName(f"numpy.dtype {code!r}")
        return np.dtype(code).newbyteorder(order) if order in "<>" else np.dtype(code)


class Array(StandIn):
    """An array of numpy: what it holds as nested lists, None for objects or where it is too large."""

    class_name = "numpy.ndarray"

    def value(self) -> Any:
        try:
            _, shape, dtype, by_column, data = self.state
            dtype = dtype.as_dtype()
        except (TypeError, ValueError, AttributeError, RefusedName):
            return None
        if not isinstance(data, bytes) or len(data) > MAX_ARRAY * dtype.itemsize:
            return None
        return np.frombuffer(data, dtype).reshape(shape, order="F" if by_column else "C").tolist()


def array(*_: Any) -> Array:
    return Array()


def scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, ArrayType) or not isinstance(data, (bytes, str)):
        raise RefusedName("numpy scalar of something else than bytes")
    data = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(data, dtype.as_dtype())[0].item()


def without_factory(*_: Any) -> dict:
    return {}


def counted(pairs: Any = ()) -> dict:
    return dict(pairs)


FUNCTIONS: dict[str, Any] = {
    "copyreg._reconstructor": reconstructed,
    "_codecs.encode": encoded,
    "builtins.bytes": raw_bytes,
    "builtins.bytearray": raw_bytes,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": without_factory,
    "collections.Counter": counted,
    "numpy.dtype": ArrayType,
    "numpy.ndarray": Array,
}
for _module in ("numpy.core", "numpy._core"):
    FUNCTIONS[f"{_module}.multiarray._reconstruct"] = array
    FUNCTIONS[f"{_module}.multiarray.scalar"] = scalar


# ---- what is made of the objects


def as_plain(value: Any, known: dict[int, Any] | None = None) -> Any:
    """The nest without stand-ins: containers, numbers, text, and whatever else (descriptions of tensors) as it is.

    An object becomes the dictionary of its attributes or items, an enum or a scalar its value, a class its name; one
    that is met again inside itself becomes None, as the parents do that nodes of omegaconf point to.
    """
    known = {} if known is None else known
    if isinstance(value, type):
        return getattr(value, "class_name", value.__name__)
    if not isinstance(value, (dict, list, tuple, set, frozenset, StandIn)):
        return value
    if id(value) not in known:
        known[id(value)] = None  # while it is being made
        known[id(value)] = _made_plain(value, known)
    return known[id(value)]


def _made_plain(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return _plain_dict(value, known)
    if isinstance(value, (list, set, frozenset)):
        return [as_plain(item, known) for item in value]
    if isinstance(value, tuple):
        return tuple(as_plain(item, known) for item in value)
    return _plain_object(value, known)


def _plain_dict(value: dict, known: dict[int, Any]) -> dict:
    kind = OrderedDict if isinstance(value, OrderedDict) else dict
    return kind((as_plain(key, known), as_plain(item, known)) for key, item in value.items())


def _plain_object(value: StandIn, known: dict[int, Any]) -> Any:
    if isinstance(value, Array):
        return value.value()
    name = value.class_name
    state = _attributes(value.state)
    if name.startswith("omegaconf."):
        inner = state.get("_content", state.get("_val"))
        return as_plain(inner, known)
    if name.startswith("pathlib."):
        return "/".join(str(part) for part in value.args).replace("//", "/")
    if name == "torch.device":
        return ":".join(str(part) for part in value.args)
    if "_parameters" in state and "_modules" in state:
        return _module_state(state, known)
    content: Any = {key: item for key, item in (*state.items(), *value.pairs)}
    if content:
        return {as_plain(key, known): as_plain(item, known) for key, item in content.items()}
    if value.items:
        return [as_plain(item, known) for item in value.items]
    arguments = [as_plain(item, known) for item in value.args]
    if len(arguments) == 1 and isinstance(arguments[0], (str, int, float, bool, dict, list)):
        return arguments[0]  # an enum, a text or number of its own kind
    return {} if name == "argparse.Namespace" else f"an object of {name}"


def _attributes(state: Any) -> dict:
    """What was given to an object: a dictionary, or a pair of one and the values of its slots."""
    if isinstance(state, tuple) and len(state) == 2 and all(part is None or isinstance(part, dict) for part in state):
        return {**(state[0] or {}), **(state[1] or {})}
    return state if isinstance(state, dict) else {}


def _module_state(state: dict, known: dict[int, Any]) -> dict:
    """The state dict of a module that was saved whole."""
    own = {**(state.get("_parameters") or {}), **(state.get("_buffers") or {})}
    transient = _listed(state.get("_non_persistent_buffers_set"))
    found = {name: tensor for name, tensor in own.items() if tensor is not None and name not in transient}
    for name, module in (state.get("_modules") or {}).items():
        inner = as_plain(module, known)
        if isinstance(inner, dict):
            found.update({f"{name}.{key}": tensor for key, tensor in inner.items()})
    return found


def _listed(value: Any) -> Any:
    return value if isinstance(value, (set, frozenset, list, tuple)) else ()
