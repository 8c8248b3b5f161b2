"""Checkpoints that are folders: published by rename, named by relative links."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import Any

import checkpoint_file
from checkpoint_utils.errors import named_in_errors
from checkpoint_utils.facts import read_facts
from checkpoint_utils.file_system import free_name, link_or_copy, lock, remove, sync_folder, unlink
from checkpoint_utils.names import CheckpointName, is_linked_name, linked_name, temporary_name
from checkpoint_utils.publishing import Publication

logger = logging.getLogger(__name__)


def publish_checkpoint_folder(state: dict[str, Any], foldername: str | os.PathLike, group: Any = None) -> int:
    """Write `state` as the folder `foldername`: complete, checksummed and on the disk, or not at all. Collective.

    Every rank writes its part of it. Returns the bytes of all its files.
    Raises: on all ranks UnsavableValueError, CheckpointWriteError; `foldername` is then what it was before.
    """
    with FolderPublication(state, os.fspath(foldername).rstrip("/"), group) as publication:
        publication.write()
        return publication.finish()


class FolderPublication(Publication):
    """A folder between its first byte and its name: the steps of a file's `Publication`, in which every rank writes a
    file of its own.
    """

    _open_writer = staticmethod(checkpoint_file.open_folder_writer)

    def _make_temporary(self) -> None:
        self._open.callback(os.close, hold_folder(self._temporary))

    def _rename(self) -> None:
        put_in_place(self._temporary, self.path)

    def _remove_temporary(self) -> None:
        remove_flat(self._temporary)


def hold_folder(temporary: str) -> int:
    """Make the folder and mark it as being written by a living process. Returns the descriptor that holds it."""
    os.mkdir(temporary)
    fd = os.open(temporary, os.O_RDONLY)
    lock(fd)
    return fd


def remove_flat(folder: str) -> None:
    """Remove a temporary folder as far as that can be done, also by a process that may open no more files."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def put_in_place(temporary: str, path: str) -> None:
    """Give a folder its name. What has the name steps aside for an instant, and back if that was the last one."""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, temporary_name(name).removesuffix(".tmp") + ".old")
    with named_in_errors(path):
        sync_folder(temporary)
        if os.path.lexists(path):
            os.rename(path, aside)
        try:
            os.rename(temporary, path)
        except OSError:
            put_back(aside)
            raise
        sync_folder(folder)
        remove(aside)


def put_back(aside: str) -> bool:
    """Undo the first half of `put_in_place`. False: there is nothing to undo."""
    folder, name = os.path.split(aside)
    path = os.path.join(folder, re.fullmatch(r"\.(.+)\.[0-9]+\.old", name)[1])
    if not os.path.lexists(aside) or os.path.lexists(path):
        return False
    os.rename(aside, path)
    return True


def place_of_folder(path: str, epoch: int, num_updates: int) -> str:
    """Where a save whose first name is `path` has its folder: there, unless that is a link, checkpoint_last or _best.

    What links alone name is hidden, so that retention does not count it, and new each time: a link changes over in
    one instant.
    """
    if CheckpointName.parse(os.path.basename(path)).kind not in ("last", "best"):
        keep_what_links_name(path)
        return path
    return free_name(os.path.join(os.path.dirname(path), linked_name(epoch, num_updates)))


def name_folder(content: str, paths: list[str]) -> None:
    """Give the folder `content` all names of the save, in the order given: last and best are links to it."""
    for path in paths:
        if path != content and CheckpointName.parse(os.path.basename(path)).kind in ("last", "best"):
            replace_link(path, os.path.basename(content))
        elif path != content:
            keep_what_links_name(path)
            clone_folder(content, path)
    with named_in_errors(paths[-1]):
        sync_folder(os.path.dirname(content))


def replace_link(path: str, target: str) -> None:
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, temporary_name(name))
    try:
        with named_in_errors(path):
            unlink(temporary)
            os.symlink(target, temporary)
            if os.path.isdir(path) and not os.path.islink(path):  # saved under this name itself, not by a run
                put_in_place(temporary, path)
            else:
                os.replace(temporary, path)
    finally:
        unlink(temporary)


def clone_folder(source: str, path: str) -> None:
    """A folder with the same files, linked and not copied, under another name."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, temporary_name(name))
    try:
        with named_in_errors(path):
            os.makedirs(temporary)
            for entry in os.listdir(source):
                link_or_copy(os.path.join(source, entry), os.path.join(temporary, entry))
            put_in_place(temporary, path)
    finally:
        remove_flat(temporary)


def links_to(path: str) -> list[str]:
    """checkpoint_last and checkpoint_best, as far as they are links to the folder `path` beside them."""
    folder, name = os.path.split(path)
    links = [os.path.join(folder, str(CheckpointName(kind, folder=True))) for kind in ("best", "last")]
    return [link for link in links if os.path.islink(link) and os.readlink(link) == name]


def keep_what_links_name(path: str) -> None:
    """Before the folder `path` is deleted or replaced: what a link names stays, under a hidden name."""
    links, name = links_to(path), CheckpointName.parse(os.path.basename(path))
    if not links:
        return
    facts = read_facts(path)
    hidden = free_name(os.path.join(os.path.dirname(path), linked_name(name.epoch or 0, max(facts.num_updates, 0))))
    clone_folder(path, hidden)
    for link in links:
        replace_link(link, os.path.basename(hidden))


def remove_folders_without_link(save_dir: str) -> list[str]:
    """Remove the hidden folders that no link names any more."""
    hidden = [name for name in os.listdir(save_dir) if is_linked_name(name)] if os.path.isdir(save_dir) else []
    removed = [path for name in hidden if not links_to(path := os.path.join(save_dir, name))]
    for path in removed:
        try:
            remove(path)
        except OSError as error:
            logger.warning("%s: no longer needed, but cannot be deleted: %s", path, error)
    return removed
