"""What a state becomes in a file: which values may stand in it, and which ranges of memory become records.

Nothing here reads or writes a byte of a tensor, or talks to another rank. docs/checkpoint.md numbers what must hold
(F1, F2, F4).
"""

from __future__ import annotations

import bisect
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint_file.errors import UnsavableValueError
from checkpoint_file.nests import ShardedTensor, empty_storage, is_dense, map_leaves, tensor_in, type_name

MAX_DEPTH = 100
MAX_INT_BITS = 2000  # torch.load(weights_only=True) reads integers of at most 255 bytes


@dataclass
class PlannedRecord:
    """One distinct range of memory that becomes one record: `parts` are flat tensors, each with its first byte.

    sharded: the parts are this rank's pieces; otherwise they are all of the record, on every rank alike.
    owner: the key path of the first tensor in it. itemsize: bytes of one of its elements.
    """

    name: str
    nbytes: int
    parts: list[tuple[int, Tensor]] = field(default_factory=list)
    storage: torch.UntypedStorage | None = None
    sharded: bool = False
    owner: str = ""
    itemsize: int = 1


@dataclass
class FilePlan:
    """What this rank knows of a file before a byte is written.

    skeleton: the state with stand-ins for its tensors (shapes and sharing, no bytes). records: in the order of their
    numbers. lines: one for each tensor, all that the ranks of a group must agree on.
    """

    skeleton: dict[str, Any]
    records: list[PlannedRecord]
    lines: list[str]

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.records)

    def pieces(self) -> np.ndarray:
        """int64 [n, 3]: (index of the record, first byte, end) of each piece that this rank has of a sharded record."""
        rows = [
            (index, begin, begin + values.numel() * values.element_size())
            for index, record in enumerate(self.records)
            if record.sharded
            for begin, values in record.parts
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)


def plan_file(state: dict[str, Any], path: str) -> FilePlan:
    """Decide which record each tensor of the state becomes. Raises: UnsavableValueError, by key path."""
    found = check_values(state, path)
    tensors = {id(leaf): leaf for _, leaf in found if isinstance(leaf, Tensor)}
    shards = {id(leaf): leaf for _, leaf in found if isinstance(leaf, ShardedTensor)}
    stand_ins, records = lay_out(tensors)
    for key, shard in shards.items():
        stand_ins[key] = lay_out_shard(shard, records)
    skeleton = map_leaves(state, (Tensor, ShardedTensor), lambda leaf: stand_ins[id(leaf)])
    record_of = {record.storage._cdata: record for record in records}
    number_of: dict[int, int] = {}  # torch.save numbers storages in the order in which it meets them
    lines = []
    for keys, leaf in found:
        made = stand_ins[id(leaf)]
        storage = made.untyped_storage()._cdata
        name = f"data/{number_of.setdefault(storage, len(number_of))}"
        lines.append(f"{key_path(keys)}: {described_layout(made, name, isinstance(leaf, ShardedTensor))}")
        if storage in record_of and not record_of[storage].name:
            record = record_of[storage]
            record.name, record.owner, record.itemsize = name, key_path(keys), made.element_size()
    for record in records:
        record.storage = None
    return FilePlan(skeleton, sorted(records, key=lambda record: int(record.name.partition("/")[2])), lines)


def described_layout(made: Tensor, record: str, sharded: bool) -> str:
    strides = [stride if size > 1 else 0 for stride, size in zip(made.stride(), made.shape)]
    kind = "sharded" if sharded else "whole"
    dtype = str(made.dtype).removeprefix("torch.")
    return f"{kind} {dtype} {list(made.shape)}, strides {strides}, in {record} from {made.storage_offset()}"


def check_values(state: Any, path: str) -> list[tuple[tuple, Any]]:
    """The tensors of the state, sharded ones too, each with its keys.

    Raises: UnsavableValueError for the first value that would not come back equal in value and type.
    """
    if type(state) not in (dict, OrderedDict):
        raise UnsavableValueError(path, f"a checkpoint is a dict, not a {type_name(state)}")
    open_containers: list[int] = []
    tensors: list[tuple[tuple, Any]] = []

    def walk(value: Any, keys: tuple) -> None:
        problem = leaf_problem(value)
        if problem is None and type(value) in (dict, OrderedDict, list, tuple):
            if id(value) in open_containers:
                problem = "a container that contains itself"
            elif len(open_containers) >= MAX_DEPTH:
                problem = f"containers nested more than {MAX_DEPTH} deep"
        if problem is not None:
            raise UnsavableValueError(path, f"{key_path(keys)} cannot be saved: it is {problem}")
        if type(value) in (dict, OrderedDict):
            items = value.items()
            odd = next((key for key in value if type(key) not in (str, int)), None)
            if odd is not None:
                raise UnsavableValueError(path, f"{key_path(keys)} cannot be saved: key {odd!r} is neither str nor int")
        elif type(value) in (list, tuple):
            items = enumerate(value)
        else:
            if isinstance(value, (Tensor, ShardedTensor)):
                tensors.append((keys, value))
            return
        open_containers.append(id(value))
        for key, item in items:
            walk(item, keys + (key,))
        open_containers.pop()

    walk(state, ())
    return tensors


def leaf_problem(value: Any) -> str | None:
    """Why `value` cannot stand in a checkpoint (None: it can, or it is a container)."""
    kind = type(value)
    if value is None or kind in (bool, float, complex, dict, OrderedDict, list, tuple):
        return None
    if kind is int:
        return None if value.bit_length() <= MAX_INT_BITS else f"an integer of {value.bit_length()} bits"
    if kind is str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return "a text with characters that UTF-8 does not have"
        return None
    if isinstance(value, Tensor):
        if kind not in (Tensor, torch.nn.Parameter):
            return f"a {type_name(value)}; give it as a plain tensor"
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            return f"a tensor without plain values (layout {value.layout}, device {value.device})"
        return None
    if isinstance(value, ShardedTensor):
        return shard_problem(value)
    hint = "give it as plain dicts, lists, numbers, text and tensors"
    if kind.__module__ == "numpy" and hasattr(value, "item"):
        hint = "give it as .item()" if getattr(value, "ndim", 0) == 0 else "give it as torch.from_numpy(...)"
    elif isinstance(value, (set, frozenset)):
        hint = "give it as sorted(...)"
    elif isinstance(value, (bytes, bytearray)):
        hint = "give it as a uint8 tensor"
    elif isinstance(value, os.PathLike) or kind in (torch.dtype, torch.device):
        hint = "give it as str(...)"
    elif isinstance(value, (tuple, list, dict, str, int, float)):
        hint = "give it as the plain type that it derives from"
    return f"a {type_name(value)}; {hint}"


def shard_problem(shard: ShardedTensor) -> str | None:
    if not is_dense(shard.shape, shard.stride):
        return f"a sharded tensor whose strides {shard.stride} leave holes in the shape {tuple(shard.shape)}"
    end_before = 0
    for begin, values in shard.pieces:
        end = begin + values.numel()
        fits = values.dtype == shard.dtype and values.dim() == 1 and values.is_contiguous()
        if not fits or leaf_problem(values) or not end_before <= begin <= end <= shard.shape.numel():
            return f"a sharded tensor whose piece at {begin} is no plain {shard.dtype} range of its elements"
        end_before = end
    return None


def key_path(keys: tuple) -> str:
    return "state" + "".join(f"[{key!r}]" for key in keys)


@dataclass
class Extent:
    """Where the distinct elements of one tensor lie: `base` is the tensor without its expanded dimensions."""

    tensor: Tensor
    base: Tensor
    begin: int
    end: int

    @property
    def memory(self) -> tuple[str, torch.dtype]:
        return str(self.base.device), self.base.dtype


def extent(t: Tensor) -> Extent:
    expanded = [stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape)]
    base = t.detach()
    if any(expanded):
        base = base[tuple(slice(0, 1) if one else slice(None) for one in expanded)]
    last = sum((size - 1) * stride for size, stride in zip(base.shape, base.stride()))
    begin = base.data_ptr()
    return Extent(t, base, begin, begin + (last + 1) * base.element_size() if base.numel() else begin)


def lay_out(tensors: dict[int, Tensor]) -> tuple[dict[int, Tensor], list[PlannedRecord]]:
    """A stand-in for each tensor, and the records: one for each distinct range of memory of one dtype.

    Dense tensors that overlap become one record, and a strided view lies in it if the record covers it; any other
    strided tensor gets a record of its own, row-major, so that of a large base only the view's bytes are written.
    """
    extents = [extent(t) for t in tensors.values()]
    plain = [e for e in extents if e.base.numel() and not e.base.is_conj() and not e.base.is_neg()]
    dense = [e for e in plain if is_dense(e.base.shape, e.base.stride())]
    dense.sort(key=lambda e: (str(e.memory), e.begin, -e.end))
    ranges: list[tuple[Extent, int, PlannedRecord]] = []  # first member, end of the range
    record_of: dict[int, tuple[int, PlannedRecord]] = {}  # id of a tensor: address of its record's first byte
    for e in dense:
        first, end, record = ranges[-1] if ranges else (None, 0, None)
        apart = first is None or e.memory != first.memory or e.begin >= end
        if apart or (e.begin - first.begin) % e.base.element_size():
            first, end, record = e, e.begin, PlannedRecord("", 0)
            ranges.append((first, end, record))
        if e.end > end:
            flat = e.base.as_strided((e.base.numel(),), (1,))
            record.parts.append((end - first.begin, flat[(end - e.begin) // e.base.element_size() :]))
            record.nbytes = e.end - first.begin
            ranges[-1] = (first, e.end, record)
        record_of[id(e.tensor)] = (first.begin, record)
    begins = [(str(first.memory), first.begin) for first, _, _ in ranges]
    for e in plain:
        at = bisect.bisect_right(begins, (str(e.memory), e.begin)) - 1
        if id(e.tensor) in record_of or at < 0 or begins[at][0] != str(e.memory):
            continue
        first, end, record = ranges[at]
        if e.end <= end and (e.begin - first.begin) % e.base.element_size() == 0:
            record_of[id(e.tensor)] = (first.begin, record)
    records = [record for _, _, record in ranges]
    for record in records:
        record.storage = empty_storage(record.nbytes)
    twins: dict[tuple, Tensor] = {}
    stand_ins = {id(e.tensor): stand_in(e, record_of.get(id(e.tensor)), records, twins) for e in extents}
    return stand_ins, records


def lay_out_shard(shard: ShardedTensor, records: list[PlannedRecord]) -> Tensor:
    """A stand-in for the whole of a sharded tensor; adds its record, of which this rank has the pieces."""
    if shard.nbytes == 0:
        return torch.empty(shard.shape, dtype=shard.dtype, device="cpu")
    parts = [(begin * shard.dtype.itemsize, values.detach()) for begin, values in shard.pieces if values.numel()]
    record = PlannedRecord("", shard.nbytes, parts, empty_storage(shard.nbytes), sharded=True)
    records.append(record)
    return tensor_in(record.storage, shard.dtype, 0, shard.shape, shard.stride)


def stand_in(
    e: Extent, shared: tuple[int, PlannedRecord] | None, records: list[PlannedRecord], twins: dict[tuple, Tensor]
) -> Tensor:
    """A tensor with the shape, dtype and sharing that `e` has in the file; adds its record if it has one of its own."""
    base = e.base
    if shared is not None:
        address, record = shared
        made = tensor_in(record.storage, base.dtype, e.begin - address, base.shape, base.stride())
    elif base.numel() == 0:
        return torch.empty(e.tensor.shape, dtype=base.dtype, device="cpu")
    else:
        key = (e.memory, e.begin, base.shape, base.stride(), base.is_conj(), base.is_neg())
        if key not in twins:
            record = PlannedRecord("", base.numel() * base.element_size(), [(0, base)])
            record.storage = empty_storage(record.nbytes)
            records.append(record)
            row_major = torch.empty(base.shape, device="meta").stride()
            twins[key] = tensor_in(record.storage, base.dtype, 0, base.shape, row_major)
        made = twins[key]
    return made.expand(e.tensor.shape) if made.shape != e.tensor.shape else made
