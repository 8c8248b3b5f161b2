"""Several files that are one checkpoint: the parts that an index names, or what lies in a folder.

Owns: which files belong together, and one set of names and records over them. Each file is opened by what is in it.
Must not know: what the parts mean; a folder's skeleton is {FILES: {name of the file: what is in it}}.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from checkpoint_file.archive import Place
from checkpoint_file.errors import CheckpointDamagedError, CheckpointError, NotACheckpointError, cannot_read
from checkpoint_file.nests import map_leaves
from checkpoint_file.skeleton import TensorRef
from checkpoint_file.sources import RecordSource

FILES = "files of the folder"
INDEX = ".index.json"
FACTS = ("config.json", "trainer_state.json")  # of a folder, beside its tensors
MAX_JSON_BYTES = 256 << 20
TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
NOT_NEEDED = ("training_args", "rng_state", "random_states", "tokenizer", "sampler")  # arguments, random numbers


class JoinedSource(RecordSource):
    """Files read as one. parts: name -> path of a file, or an index (name -> the names of the files it joins).

    open_part: gives the source of one file.
    """

    def __init__(
        self, path: str, parts: Mapping[str, Any], open_part: Callable[[str], RecordSource], read_method: str = "auto"
    ) -> None:
        super().__init__(read_method)
        self.path, self._parts = path, parts
        self._sources: dict[str, Any] = {}
        self._of_record: dict[str, tuple[Any, str]] = {}
        self.places = {}
        try:
            for file in files_of(parts):
                self._add(file, open_part(file))
        except BaseException:
            self.close()
            raise

    def _add(self, file: str, source: Any) -> None:
        self._sources[file] = source
        for name, place in source.places.items():
            joined = f"{os.path.basename(file)}:{name}"
            self._of_record[joined] = source, name
            self.places[joined] = Place(joined, place.offset, place.nbytes, place.crc)

    def opened(self, name: str) -> contextlib.AbstractContextManager[int]:
        source, record = self._of_record[name]
        return source.opened(record)

    def mapped(self, name: str) -> Tensor:
        source, record = self._of_record[name]
        return source.mapped(record)

    def skeleton(self, own_format: bool = False) -> Any:
        if not isinstance(self._parts, Folder):
            return self._joined(self._parts)
        return {FILES: {name: self._content(part) for name, part in self._parts.items()}}

    def _content(self, part: Any) -> Any:
        if isinstance(part, str):
            return self._of_file(part)
        return part.facts if isinstance(part, Facts) else self._joined(part)

    def _joined(self, parts: Mapping[str, str]) -> dict:
        found: dict[str, Any] = {}
        for file in parts.values():
            content = self._of_file(file)
            if not isinstance(content, dict):
                raise NotACheckpointError(file, "holds no tensors by their names, though an index names it")
            found.update(content)
        return found

    def _of_file(self, file: str) -> Any:
        def renamed(ref: TensorRef) -> TensorRef:
            record = f"{os.path.basename(file)}:{ref._record}"
            return TensorRef(ref.dtype, ref.shape, record, ref._offset, ref._stride)

        return map_leaves(self._sources[file].skeleton(own_format=False), (TensorRef,), renamed)

    def signature(self) -> tuple:
        return tuple((os.path.basename(file), *source.signature()) for file, source in self._sources.items())

    def close(self) -> None:
        super().close()
        for source in self._sources.values():
            source.close()


class Folder(dict):
    """The parts of a folder by the names of its files: a path, Facts, or an index's {file: path}."""


class Facts:
    """What a JSON file of the folder says."""

    def __init__(self, facts: Any) -> None:
        self.facts = facts


def files_of(parts: Mapping[str, Any]) -> list[str]:
    """The paths of all files with tensors, each once."""
    found: dict[str, None] = {}
    for part in parts.values():
        if isinstance(part, str):
            found[part] = None
        elif isinstance(part, Mapping):
            found.update(dict.fromkeys(part.values()))
    return list(found)


def files_of_index(path: str) -> dict[str, str] | None:
    """The files that a JSON index names, by name; None where the file is no index.

    Raises: NotACheckpointError for a name that leads out of the folder, CheckpointDamagedError for a missing part.
    """
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        return None
    folder, files = os.path.dirname(path), {}
    for name in sorted(set(map(str, weight_map.values()))):
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise NotACheckpointError(path, f"names the file {name!r}, which is not beside it")
        files[name] = os.path.join(folder, name)
        if not os.path.exists(files[name]):
            raise CheckpointDamagedError(path, f"the part {name} that it names is missing", name)
    return files


def read_json(path: str) -> Any:
    try:
        if os.path.getsize(path) > MAX_JSON_BYTES:
            return None
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError):
        return None
    except OSError as error:
        raise cannot_read(path, error) from error


def contents_of_folder(path: str) -> Folder:
    """The files of a folder that make up a checkpoint. Raises: NotACheckpointError where there are none."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise cannot_read(path, error) from error
    parts, indexed = Folder(), set()
    for name in (name for name in names if name.endswith(INDEX)):
        if files := files_of_index(os.path.join(path, name)):
            parts[name] = files
            indexed |= set(files)
    for name in names:
        file = os.path.join(path, name)
        if name in FACTS and os.path.isfile(file):
            parts[name] = Facts(read_json(file))
        elif (
            name.endswith(TENSORS) and name not in indexed and not name.startswith(NOT_NEEDED) and os.path.isfile(file)
        ):
            parts[name] = file
    if not files_of(parts):
        raise NotACheckpointError(path, nothing_found(path, names))
    return parts


def nothing_found(path: str, names: list[str]) -> str:
    found = "is a folder, but no checkpoint: it has no .metadata and no file of tensors"
    inner = [name for name in names if os.path.isdir(os.path.join(path, name)) and not name.startswith(".")]
    return found + (f". Name one of the folders in it: {', '.join(inner[:6])}" if inner else "")


def verify_parts(path: str, verify_file: Callable[[str], list[str]]) -> list[str]:
    """What is wrong with any file of the folder, a sentence each."""
    try:
        return [problem for file in files_of(contents_of_folder(path)) for problem in verify_file(file)]
    except CheckpointError as error:
        return [str(error)]
