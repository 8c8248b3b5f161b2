"""A folder of checkpoints, and the objects that follow it.

    begin   at a start: the newer of the two, the folder or the objects, is what the run goes on from
    push    after a save: a thread uploads what is new, then writes the manifest, then removes what that no longer names
    flush   before the end: wait for it

The instant at which a save counts for other machines is that of the manifest: one object, replaced whole. Objects are
never replaced, so that what a manifest names is what its writer meant. `.mirror.json` in the folder says which manifest
the folder agrees with, written before that manifest is: a folder that agrees with the one in the store, or is ahead of
it, goes on; any other is out of date. Of all ranks rank 0 alone has a mirror.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

from checkpoint_file import CheckpointWriteError
from checkpoint_utils.errors import NoUsableCheckpointError
from checkpoint_utils.facts import read_facts
from checkpoint_utils.file_system import link_or_copy, move_to_free_name, unlink
from checkpoint_utils.names import ABANDONED, CheckpointName, stale_checkpoints, temporary_name
from checkpoint_utils.object_store.manifest import NAME, Entry, Manifest, read_manifest
from checkpoint_utils.object_store.store import ObjectStoreError, Store, crc_of

logger = logging.getLogger(__name__)

RECORD = ".mirror.json"


@dataclass(frozen=True)
class _Content:
    """One file to upload: a link to it that stays when its names go, and the names."""

    path: str
    names: tuple[str, ...]


class Mirror:
    """The checkpoints of `folder` under the prefix `url`. One process, one upload at a time.

    seconds: what the last upload took, from the save on, 0.0 before the first. failed_in_a_row: uploads that went wrong.
    """

    def __init__(self, url: str, folder: str, store: Store) -> None:
        self.url, self.folder, self._store = url.rstrip("/"), folder, store
        self._writer = uuid.uuid4().hex
        self._manifest = Manifest()
        self._files: dict[str, list[int]] = {}  # name: identity of the file that the manifest has under it
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.seconds, self.failed_in_a_row = 0.0, 0

    # ---- at a start ----

    def begin(self) -> str:
        """Bring the folder to what the run goes on from; says in a sentence what was found. Removes what is left over.

        Raises: ObjectStoreError where the store does not answer, NoUsableCheckpointError where all objects are damaged.
        """
        os.makedirs(self.folder, exist_ok=True)
        found = read_manifest(self._store, self.url)
        record = self._read_record()
        self._manifest = found or Manifest()
        if found is None:
            said = f"nothing is in {self.url} yet"
        elif record is not None and list(found.stamp) in (record["stamp"], record["before"]):
            self._files, said = record["files"], f"{self.folder} agrees with {self.url}"
            if list(found.stamp) != record["stamp"]:
                self._files = record["files_before"]
        else:
            said = self._take_from_store(known=record is not None)
        self._clear()
        return said

    def _take_from_store(self, known: bool) -> str:
        """The folder is out of date: put away what is there, and fetch the newest object that is sound."""
        for name in self._names():
            path = os.path.join(self.folder, name)
            if known:
                unlink(path)
            else:  # never seen by the store: nobody but its owner should delete it
                os.makedirs(os.path.join(self.folder, ABANDONED), exist_ok=True)
                kept = move_to_free_name(path, os.path.join(self.folder, ABANDONED, name))
                logger.warning("%s IS TAKEN FROM %s; WHAT LAY THERE IS KEPT AS %s", self.folder, self.url, kept)
        problems = []
        for name in self._manifest.newest_first():
            problem = self._fetch(name)
            if problem is None:
                self._write_record(self._manifest, self._files, self._manifest)
                return f"{name} (update {self._manifest.entries[name].num_updates}) was fetched from {self.url}"
            logger.error("DAMAGED CHECKPOINT PASSED OVER: %s", problem)
            problems.append(problem)
        if problems:
            raise NoUsableCheckpointError(self.url, "none of its checkpoints can be used: " + "; ".join(problems))
        return f"{self.url} has no checkpoints"

    def _fetch(self, name: str) -> str | None:
        """Fetch the object of a name under all of its names; returns what is wrong with it, None if it is sound."""
        entry = self._manifest.entries[name]
        url, path = f"{self.url}/{entry.key}", os.path.join(self.folder, name)
        temporary = os.path.join(self.folder, temporary_name(name))
        try:
            crc = self._store.download(url, temporary)
            if (os.path.getsize(temporary), crc) != (entry.bytes, entry.crc32):
                return (
                    f"{url} is not what was uploaded ({os.path.getsize(temporary)} of {entry.bytes} bytes, or changed)"
                )
            os.replace(temporary, path)
        except FileNotFoundError as error:
            return f"{url}: {error}"
        finally:
            unlink(temporary)
        for other, its in self._manifest.entries.items():
            if its.key == entry.key:
                if other != name:
                    link_or_copy(path, os.path.join(self.folder, other))
                self._files[other] = _identity(os.path.join(self.folder, other))
        return None

    def _clear(self) -> None:
        """Remove what killed uploads and removals left: all older than the manifest that it does not name."""
        for name in os.listdir(self.folder):
            if name.startswith(".upload-"):
                unlink(os.path.join(self.folder, name))
        try:
            urls = self._store.list(f"{self.url}/data")
            for url in filter(self._is_garbage, urls):
                self._store.remove(url)
            self._store.abort_uploads(f"{self.url}/data", self._is_garbage)
        except ObjectStoreError as error:
            logger.warning("%s: what earlier uploads left could not be removed: %s", self.url, error)

    def _is_garbage(self, url: str) -> bool:
        key = url.removeprefix(f"{self.url}/")
        generation = key.removeprefix("data/")[:8]
        return key not in self._manifest.keys and generation.isdigit() and int(generation) <= self._manifest.generation

    # ---- after a save ----

    def push(self, cfg: Any) -> None:
        """Upload what is new in the folder, in a thread; waits for the upload before, if one is on its way.

        cfg: the section `checkpoint`, for retention. What goes wrong is counted, told in the log, and made good by the
        next upload, which takes all that the store lacks.
        """
        self.wait()
        begun = time.monotonic()
        contents, gone = self._what_is_new(), {name for name in self._files if not self._has(name)}
        if contents or gone:
            self._thread = threading.Thread(target=self._upload, args=(cfg, contents, gone, begun), name="upload")
            self._thread.start()

    def wait(self) -> None:
        """Until the upload that is on its way is done, well or not."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        error, self._error = self._error, None
        self.failed_in_a_row = self.failed_in_a_row + 1 if error is not None else 0
        self.last_error = error
        if error is not None:
            logger.error("AN UPLOAD FAILED, number %d in a row: %s", self.failed_in_a_row, error)

    last_error: Exception | None = None

    def raise_failure(self, at: int) -> None:
        """Raise CheckpointWriteError if `at` uploads in a row, or more, have failed (checkpoint.max_failed_saves)."""
        if 0 < at <= self.failed_in_a_row:
            problem = (
                f"{self.failed_in_a_row} uploads in a row have failed: {self.last_error}. The checkpoints are in "
                f"{self.folder}; start again from there when the store answers (checkpoint.max_failed_saves={at})"
            )
            raise CheckpointWriteError(self.url, problem) from self.last_error

    def flush(self, cfg: Any) -> None:
        """Wait for what is on its way, and try once more what failed. Raises: CheckpointWriteError if that fails too."""
        self.wait()
        if self.failed_in_a_row:
            self.push(cfg)
            self.wait()
        self.raise_failure(1)

    def _names(self) -> list[str]:
        parsed = map(CheckpointName.parse, sorted(os.listdir(self.folder)))
        return [str(name) for name in parsed if name is not None and not name.folder]

    def _has(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.folder, name))

    def _what_is_new(self) -> list[_Content]:
        """The files that the store has not, each held by a link, so that retention may take their names."""
        by_identity: dict[tuple[int, ...], list[str]] = {}
        for name in self._names():
            identity = _identity(os.path.join(self.folder, name))
            if self._files.get(name) != identity:
                by_identity.setdefault(tuple(identity), []).append(name)
        contents = []
        for number, names in enumerate(by_identity.values()):
            path = os.path.join(self.folder, f".upload-{number}.pt")
            unlink(path)
            link_or_copy(os.path.join(self.folder, names[0]), path)
            contents.append(_Content(path, tuple(names)))
        return contents

    def _upload(self, cfg: Any, contents: list[_Content], gone: set[str], begun: float) -> None:
        """In the thread: objects, then the manifest, then what it no longer names."""
        try:
            files = {name: identity for name, identity in self._files.items() if name not in gone}
            entries = {name: entry for name, entry in self._manifest.entries.items() if name not in gone}
            for content in contents:
                entry = self._upload_content(content, entries)
                entries.update(dict.fromkeys(content.names, entry))
                files.update(dict.fromkeys(content.names, _identity(content.path)))
            self._prune(cfg, entries, files)
            self._publish(entries, files)
            self.seconds = time.monotonic() - begun
        except Exception as error:  # told by `wait`
            self._error = error
        finally:
            for content in contents:
                unlink(content.path)

    def _upload_content(self, content: _Content, entries: dict[str, Entry]) -> Entry:
        facts = read_facts(content.path)
        nbytes, crc = os.path.getsize(content.path), crc_of(content.path)
        same = [e for e in entries.values() if (e.bytes, e.crc32, e.run_id) == (nbytes, crc, facts.run_id)]
        if same:  # another name of what is there, or a copy of it
            return same[0]
        key = f"data/{self._manifest.generation + 1:08d}-{uuid.uuid4().hex[:8]}-{content.names[0]}"
        self._store.upload(content.path, f"{self.url}/{key}")
        return Entry(key, nbytes, crc, max(facts.num_updates, 0), facts.run_id or "")

    def _prune(self, cfg: Any, entries: dict[str, Entry], files: dict[str, list[int]]) -> None:
        """Retention, of names that are not in the folder too: an earlier session may have run elsewhere."""
        run_ids = [entry.run_id for name, entry in entries.items() if name in files]
        elsewhere = [name for name, entry in entries.items() if not run_ids or entry.run_id in run_ids]
        for name in stale_checkpoints(elsewhere, cfg):
            if name not in files:
                del entries[name]

    def _publish(self, entries: dict[str, Entry], files: dict[str, list[int]]) -> None:
        """Make these the checkpoints of the prefix, unless somebody else has written there since."""
        found = read_manifest(self._store, self.url) or Manifest()
        if found.stamp != self._manifest.stamp and found.writer != self._writer:  # ours: its answer was lost on the way
            raise ObjectStoreError(
                self.url, "another run writes there: give each run a prefix of its own (checkpoint.save_dir=s3://…)"
            )
        manifest = Manifest(found.generation + 1, self._writer, entries)
        self._write_record(manifest, files, found)
        path = os.path.join(self.folder, ".upload-manifest.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(manifest.to_json())
        self._store.upload(path, f"{self.url}/{NAME}")
        unlink(path)
        self._manifest, self._files = manifest, files
        self._remove(found.keys - manifest.keys)

    def _remove(self, keys: set[str]) -> None:
        for key in sorted(keys):
            try:
                self._store.remove(f"{self.url}/{key}")
            except ObjectStoreError as error:
                logger.warning("%s: no longer kept, but cannot be removed now: %s", key, error)

    # ---- what the folder agrees with ----

    def _read_record(self) -> dict[str, Any] | None:
        try:
            with open(os.path.join(self.folder, RECORD), encoding="utf-8") as file:
                record = json.load(file)
            return record if record["url"] == self.url and record["files"] is not None else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_record(self, manifest: Manifest, files: dict[str, list[int]], before: Manifest) -> None:
        record = {
            "url": self.url,
            "stamp": manifest.stamp,
            "files": files,
            "before": before.stamp,
            "files_before": self._files,
        }
        path = os.path.join(self.folder, RECORD)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)


def _identity(path: str) -> list[int]:
    """Which file it is: names of one content share it, and a file written anew has another."""
    stat = os.stat(path)
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns]
