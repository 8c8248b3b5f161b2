"""The `.metadata` of a torch.distributed.checkpoint folder: which box of which tensor lies where.

It is a pickle of torch's own classes, which torch reads with full pickle. Here it is read by an unpickler to which
these classes are empty containers and all other names are refused. docs/checkpoint.md, F7.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint_file.boxes import Box
from checkpoint_file.errors import CheckpointDamagedError, NotACheckpointError
from checkpoint_file.limits import MAX_DEPTH, check_nest, check_pickle, reason_of, shown
from checkpoint_file.skeleton import dtypes

METADATA = ".metadata"
DCP = "torch.distributed.checkpoint.metadata"
MAX_COMPARED = 20_000_000  # pairs of boxes of a tensor: about ten seconds


@dataclass
class StoredChunk:
    """One box of a tensor, and the bytes of `torch.save` that hold it: [offset, offset + length) of `file`."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[StoredChunk] = field(default_factory=list)


@dataclass
class FolderContents:
    """tensors, values: by their flattened names. paths: the keys that lead to a name in the nest, None: unknown."""

    tensors: dict[str, StoredTensor]
    values: dict[str, StoredChunk]
    paths: dict[str, tuple] | None


# ---- writing


def pack_metadata(tensors: dict[str, StoredTensor], paths: dict[str, tuple]) -> bytes:
    """The bytes of `.metadata` by torch's own classes, for torch.distributed.checkpoint to read."""
    from torch.distributed.checkpoint import filesystem, metadata  # a second of imports, which files do not need

    described, stored = {}, {}
    for name, tensor in tensors.items():
        chunks = [
            metadata.ChunkStorageMetadata(torch.Size(c.box.offsets), torch.Size(c.box.sizes)) for c in tensor.chunks
        ]
        properties = metadata.TensorProperties(dtype=tensor.dtype)
        described[name] = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, chunk in enumerate(tensor.chunks):
            index = metadata.MetadataIndex(name, chunk.box.offsets, number)
            stored[index] = filesystem._StorageInfo(chunk.file, chunk.offset, chunk.length)
    whole = metadata.Metadata(described, planner_data=paths, storage_data=stored)
    if hasattr(whole, "version") and hasattr(filesystem, "CURRENT_DCP_VERSION"):
        whole.version = filesystem.CURRENT_DCP_VERSION
    return pickle.dumps(whole, protocol=4)


# ---- reading


class Fields:
    """An instance of one of torch's classes, of which nothing is known but its fields."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class TensorFields(Fields):
    pass


class ValueFields(Fields):
    pass


class IndexFields(Fields):
    pass


class TextMaker:
    """Makes a text of parts. An object without attributes, which nothing in a pickle can change."""

    __slots__ = ()

    def __call__(self, *parts: Any) -> str:
        return "/".join(part if isinstance(part, str) else shown(part) for part in parts)


as_text = TextMaker()


class UnknownName(pickle.UnpicklingError):
    pass


class MetadataUnpickler(pickle.Unpickler):
    known = {
        (DCP, "Metadata"): Fields,
        (DCP, "TensorStorageMetadata"): TensorFields,
        (DCP, "BytesStorageMetadata"): ValueFields,
        (DCP, "ChunkStorageMetadata"): Fields,
        (DCP, "TensorProperties"): Fields,
        (DCP, "_MEM_FORMAT_ENCODING"): as_text,
        (DCP, "MetadataIndex"): IndexFields,
        (DCP, "StorageMeta"): Fields,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Fields,
        ("torch.serialization", "_get_layout"): as_text,
        ("torch", "Size"): tuple,
        ("collections", "OrderedDict"): OrderedDict,
        ("pathlib", "PosixPath"): as_text,
        ("pathlib", "WindowsPath"): as_text,
        ("pathlib._local", "PosixPath"): as_text,
        ("pathlib._local", "WindowsPath"): as_text,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.known:
            return self.known[module, name]
        if module == "torch" and name in dtypes():
            return dtypes()[name]
        raise UnknownName(f"{module}.{name}")


def parse_metadata(data: bytes, path: str) -> FolderContents:
    """What `.metadata` says. Raises: NotACheckpointError for names that it may not hold, CheckpointDamagedError."""
    try:
        check_pickle(data)
        whole = MetadataUnpickler(io.BytesIO(data)).load()
        check_nest(list(vars(whole).values()), len(data))
        contents = contents_of(whole)
    except UnknownName as unknown:
        problem = f"its {METADATA} names {str(unknown)[:200]}, which no {METADATA} needs; nothing of it was run"
        raise NotACheckpointError(path, problem) from None
    except NotACheckpointError as error:
        raise NotACheckpointError(path, error.problem) from None
    except Exception as error:  # whatever a damaged pickle can raise
        problem = f"its {METADATA} is cut off or damaged ({reason_of(error)})"
        raise CheckpointDamagedError(path, problem, METADATA) from error
    for name, tensor in contents.tensors.items():
        if problem := size_problem(tensor) or cover_problem(tensor):
            raise CheckpointDamagedError(path, f"its {METADATA} says of {name} that {problem}", METADATA)
    return contents


def contents_of(whole: Any) -> FolderContents:
    tensors, values = {}, {}
    places = {(index.fqn, box_offsets(index)): info for index, info in whole.storage_data.items()}
    for name, described in whole.state_dict_metadata.items():
        if isinstance(described, ValueFields):
            values[name] = stored_chunk(Box((), ()), places[name, None])
            continue
        if not isinstance(described, TensorFields):
            raise TypeError(f"{name} is a {type(described).__name__}")
        dtype, shape = described.properties.state[0], plain_sizes(described.size)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name} has the dtype {dtype!r}")
        boxes = [Box(plain_sizes(chunk.offsets), plain_sizes(chunk.sizes)) for chunk in described.chunks]
        # torch gives an empty tensor one empty box.
        chunks = [stored_chunk(box, places[name, box.offsets]) for box in boxes if box.numel]
        tensors[name] = StoredTensor(dtype, shape, chunks)
    paths = getattr(whole, "planner_data", None)
    if not (isinstance(paths, dict) and set(paths) >= set(tensors) | set(values) and all(map(is_path, paths.values()))):
        paths = None
    return FolderContents(tensors, values, paths)


def is_path(path: Any) -> bool:
    return isinstance(path, tuple) and 0 < len(path) <= MAX_DEPTH and all(isinstance(key, (str, int)) for key in path)


def box_offsets(index: Any) -> tuple[int, ...] | None:
    offset = getattr(index, "offset", None)
    return None if offset is None else plain_sizes(offset)


def plain_sizes(sizes: Any) -> tuple[int, ...]:
    sizes = tuple(sizes)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} are no sizes")
    return sizes


def stored_chunk(box: Box, info: Any) -> StoredChunk:
    if getattr(info, "transform_descriptors", None):
        names = ", ".join(map(str, info.transform_descriptors))
        raise NotACheckpointError("", f"its files are transformed ({names}), which is not read here: save it without")
    file, offset, length = info.relative_path, info.offset, info.length
    if type(file) is not str or os.path.basename(file) != file or file in ("", ".", ".."):
        raise ValueError(f"{file!r} is no name of a file in the folder")
    if min(plain_sizes((offset, length))) < 0:
        raise ValueError(f"{offset}, {length} are no place in a file")
    return StoredChunk(box, file, offset, length)


def size_problem(tensor: StoredTensor) -> str | None:
    """Why no tensor has this size, or none whose bytes lie in files."""
    stored = sum(chunk.length for chunk in tensor.chunks)
    nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    if max((len(tensor.shape), *tensor.shape), default=0) >= 2**62 or len(tensor.shape) > 64:
        return f"its shape is {shown(tensor.shape)}"
    if nbytes > stored:
        return f"it has {shown(nbytes)} bytes, of which {shown(stored)} are stored"
    return None


def cover_problem(tensor: StoredTensor) -> str | None:
    """Why the chunks do not hold each element of the tensor exactly once."""
    whole = Box((0,) * len(tensor.shape), tensor.shape)
    for chunk in tensor.chunks:
        if len(chunk.box.offsets) != len(tensor.shape) or chunk.box.common(whole) != chunk.box:
            return f"a part of it lies at {chunk.box.offsets}, outside its shape {tensor.shape}"
    stored = sum(chunk.box.numel for chunk in tensor.chunks)
    if stored != whole.numel:
        return f"{stored:,} of its {whole.numel:,} elements are stored"
    boxes = [chunk.box for chunk in tensor.chunks]
    # Along the dimension that is cut into the most parts few boxes stand beside each other.
    d = max(range(len(tensor.shape)), key=lambda d: len({box.offsets[d] for box in boxes}), default=0)
    boxes.sort(key=lambda box: box.offsets[d : d + 1])
    compared = 0
    for number, box in enumerate(boxes):
        for other in itertools.islice(boxes, number + 1, None):
            if box.offsets and other.offsets[d] >= box.offsets[d] + box.sizes[d]:
                break
            compared += 1
            if compared > MAX_COMPARED:
                return f"it has {len(boxes):,} parts, too many to tell whether they overlap"
            if box.common(other):
                return f"two parts of it overlap, at {box.offsets} and {other.offsets}"
    return None
