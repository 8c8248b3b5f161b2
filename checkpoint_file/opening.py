"""A checkpoint is a file or a folder: which of the two lies under a path is asked here, and nowhere else."""

from __future__ import annotations

import os
from typing import Any

import distributed_utils
from checkpoint_file import reading
from checkpoint_file.folder_contents import verify_folder
from checkpoint_file.folder_reading import FolderReader, open_checkpoint_folder, open_local_folder
from checkpoint_file.reading import CheckpointReader
from checkpoint_file.verifying import verify_file


def open_checkpoint(
    path: str | os.PathLike, group: Any = None, on_all_ranks: bool = True, own_format: bool = True, **how_to_read: Any
) -> CheckpointReader | FolderReader:
    """Open a checkpoint, file or folder, together. Collective, and so is everything that is done with the reader.

    Args:    on_all_ranks: every rank opens and reads it; otherwise rank 0 of the group reads, the others receive.
             own_format: refuse, saying what was found, whatever fairtrain has not written.
             how_to_read: of a file, see `reading.open_checkpoint`.
    Raises:  on all ranks what was found on one: CheckpointNotFoundError, NotACheckpointError, CheckpointDamagedError
             (as far as structure and names go; the bytes of tensors are checked as they are read), CheckpointError.
    """
    is_folder = os.path.isdir(path)
    if distributed_utils.get_world_size(group) > 1:  # a rank that sees something else than rank 0 says so
        is_folder = distributed_utils.all_gather_list(is_folder, group)[0]
    if is_folder:
        return open_checkpoint_folder(path, group, on_all_ranks, own_format)
    return reading.open_checkpoint(path, group, on_all_ranks, own_format, **how_to_read)


def open_local_checkpoint(
    path: str | os.PathLike, own_format: bool = True, **how_to_read: Any
) -> CheckpointReader | FolderReader:
    """As `open_checkpoint`, for this process alone: nothing in it is collective."""
    if os.path.isdir(path):
        return open_local_folder(path, own_format)
    return reading.open_local_checkpoint(path, own_format, **how_to_read)


def verify_checkpoint(path: str | os.PathLike) -> list[str]:
    """Read every byte of a file or folder and return what is wrong with it, a sentence each ([]: nothing)."""
    return verify_folder(path) if os.path.isdir(path) else verify_file(path)
