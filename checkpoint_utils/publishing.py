"""A file that appears under its name complete and durable, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import checkpoint_file
import distributed_utils
from checkpoint_file import CheckpointError
from checkpoint_utils.agreement import on_rank_0
from checkpoint_utils.config import expand
from checkpoint_utils.errors import hint_for, named_in_errors
from checkpoint_utils.file_system import freed_later, held, link_or_copy, make_folder, sync_folder, unlink
from checkpoint_utils.names import temporary_name
from checkpoint_utils.space import bytes_of_state, check_room


def publish_checkpoint(state: dict[str, Any], filename: str | os.PathLike, group: Any = None) -> int:
    """Write `state` under `filename`: complete, checksummed and on the disk, or not at all. All ranks call it.

    Every rank gives its own state and writes its share of the bytes (checkpoint_file.write_checkpoint_file says what
    must be equal). Returns the bytes of the file.
    Raises: on all ranks UnsavableValueError, CheckpointWriteError; `filename` is then what it was before.
    """
    with Publication(state, filename, group) as publication:
        publication.write()
        return publication.finish()


class Publication:
    """One checkpoint between its first byte and its name: the steps of docs/checkpoint.md, by all ranks.

    Making one is collective and lays the file down under a temporary name, that rank 0 chooses and holds. `write` is
    this rank's own, `finish` collective: it gives the file its name. `close` leaves no trace of what was not finished.
    """

    def __init__(self, state: dict[str, Any], filename: str | os.PathLike, group: Any = None) -> None:
        self.path, self._group = expand(filename), group
        self._folder, name = os.path.split(self.path)
        self._open, self._temporary = contextlib.ExitStack(), ""
        self.background: checkpoint_file.BackgroundWrite | None = None
        try:
            nbytes = bytes_of_state(state)
            self._temporary = os.path.join(self._folder, on_rank_0(lambda: self._hold(name, nbytes), group))
            with self._errors_under_its_name():
                self._writer = self._open_writer(state, self._temporary, group)
                self._open.push(self._writer)
        except BaseException:
            self.close()
            raise

    _open_writer = staticmethod(checkpoint_file.open_writer)

    def _hold(self, name: str, nbytes: int) -> str:
        temporary = temporary_name(name)
        self._temporary = os.path.join(self._folder, temporary)
        with named_in_errors(self.path):
            make_folder(self._folder or ".")
            check_room(self.path, nbytes)
            self._make_temporary()
        return temporary

    def _make_temporary(self) -> None:
        self._open.enter_context(held(self._temporary))

    def write(self, supply: checkpoint_file.Supply | None = None) -> None:
        """Write this rank's share; talks to nobody. What goes wrong is raised by `finish`, on all ranks.

        supply: gives the bytes where the state has stand-ins for its tensors (CheckpointWriter.write).
        """
        self._writer.write(supply)

    def write_in_background(self, buffer: checkpoint_file.HostBuffer) -> None:
        """Copy this rank's share into the buffer, and have a thread write it."""
        self.background = checkpoint_file.BackgroundWrite(self._writer, buffer)

    def finish(self) -> int:
        """Collective: make the file whole and durable, and give it its name. Returns its bytes."""
        if self.background is not None:
            self.background.wait()
        with self._errors_under_its_name():
            nbytes = self._writer.finish()
        self._open.close()  # before the rename: some mounts want it so
        on_rank_0(self._rename, self._group, share=False)
        return nbytes

    def _rename(self) -> None:
        with named_in_errors(self.path):
            with freed_later(self.path):
                os.replace(self._temporary, self.path)
            sync_folder(self._folder)

    def _remove_temporary(self) -> None:
        unlink(self._temporary)

    @contextlib.contextmanager
    def _errors_under_its_name(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            problem = error.problem + hint_for(error.problem)
            raise type(error)(self.path, problem, error.record, error.rank) from error

    def close(self) -> None:
        if self.background is not None:
            self.background.cancel()
        self._open.close()
        if distributed_utils.get_rank(self._group) == 0 and self._temporary:
            with contextlib.suppress(OSError):  # on a broken disk: the error that led here is the one to tell
                self._remove_temporary()  # where the rename was reached there is none

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def link_names(paths: list[str]) -> None:
    """Give the file at `paths[0]` its other names, each replaced in one instant, in the order given."""
    first, *others = paths
    folder = os.path.dirname(first)
    for other in others:
        temporary = os.path.join(folder, temporary_name(os.path.basename(other)))
        try:
            with named_in_errors(other):
                unlink(temporary)
                link_or_copy(first, temporary)
                with freed_later(other):
                    os.replace(temporary, other)
                if other == others[-1]:
                    sync_folder(folder)
        finally:
            with contextlib.suppress(OSError):
                unlink(temporary)
