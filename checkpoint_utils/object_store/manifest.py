"""The object that says which objects are the checkpoints, and under which names. Whoever reads it trusts no word of it."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

from checkpoint_utils.names import CheckpointName
from checkpoint_utils.object_store.store import ObjectStoreError, Store

NAME = "manifest.json"
FORMAT = 1
_KEY = re.compile(r"data/[0-9]{8}-[A-Za-z0-9.+_-]{1,200}\.pt")


@dataclass(frozen=True)
class Entry:
    """One name. key: of its object, below the prefix; names of one content share it."""

    key: str
    bytes: int
    crc32: int
    num_updates: int
    run_id: str


@dataclass(frozen=True)
class Manifest:
    """generation: counts the manifests of a prefix. writer: of this one, a random word."""

    generation: int = 0
    writer: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def stamp(self) -> tuple[int, str]:
        return self.generation, self.writer

    @property
    def keys(self) -> set[str]:
        return {entry.key for entry in self.entries.values()}

    def newest_first(self) -> list[str]:
        """Names, one for each object: checkpoint_last.pt, then by updates."""
        order = sorted(
            self.entries, key=lambda name: (name == str(CheckpointName("last")), self.entries[name].num_updates)
        )
        seen: dict[str, str] = {}
        for name in reversed(order):
            seen.setdefault(self.entries[name].key, name)
        return list(seen.values())

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: bytes | str, url: str) -> Manifest:
        """Raises: ObjectStoreError unless it is a manifest, of names and keys as we write them."""
        try:
            read = json.loads(text)
            if read["format"] != FORMAT:
                raise ValueError(f"it has format {read['format']!r}, and {FORMAT} is read here")
            entries = {str(name): _checked(name, fields) for name, fields in read["entries"].items()}
            return cls(int(read["generation"]), str(read["writer"]), entries)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ObjectStoreError(url, f"it is not a manifest of checkpoints: {error}") from error


def _checked(name: str, fields: Any) -> Entry:
    parsed = CheckpointName.parse(name)
    if parsed is None or str(parsed) != name or "/" in name:
        raise ValueError(f"{name!r} is no name of a checkpoint")
    entry = Entry(**fields)
    if not isinstance(entry.key, str) or not _KEY.fullmatch(entry.key):
        raise ValueError(f"{entry.key!r} is no key of a checkpoint")
    if not all(isinstance(number, int) and number >= 0 for number in (entry.bytes, entry.crc32, entry.num_updates)):
        raise ValueError(f"{name}: sizes are counted")
    return entry


def read_manifest(store: Store, url: str) -> Manifest | None:
    """The manifest below the prefix `url`, None if there is none."""
    place = f"{url}/{NAME}"
    text = store.read(place)
    return None if text is None else Manifest.from_json(text, place)


def object_named(store: Store, url: str) -> str:
    """The URL of the object that `url` stands for: of a name in the manifest beside it, else of itself."""
    prefix, _, name = url.rpartition("/")
    manifest = read_manifest(store, prefix) if CheckpointName.parse(name) is not None else None
    entry = manifest.entries.get(name) if manifest is not None else None
    return url if entry is None else f"{prefix}/{entry.key}"
