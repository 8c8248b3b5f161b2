"""A checkpoint is a file or a folder: which of the two lies under a path is asked here, and nowhere else.

Opening gives names and containers; the reader fetches bytes. Must not know: how they lie in a file or a folder.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

import distributed_utils
from checkpoint_file.archive import Place
from checkpoint_file.dcp_metadata import METADATA
from checkpoint_file.errors import CheckpointError, CheckpointNotFoundError, NotACheckpointError, agree_on_error
from checkpoint_file.folder_contents import FolderSource, verify_folder
from checkpoint_file.folder_writing import OWN_RECORD
from checkpoint_file.joined import verify_parts
from checkpoint_file.kinds import open_source
from checkpoint_file.nests import map_leaves
from checkpoint_file.reading import CheckpointReader
from checkpoint_file.skeleton import TensorRef, is_own_format, require_containers, require_own_format
from checkpoint_file.verifying import verify_file
from checkpoint_file.versions import upgraded

logger = logging.getLogger(__name__)

DCP_HINT = (
    ". It is a folder of torch.distributed.checkpoint without the fairtrain.pt of ours; a run goes on from it with "
    "checkpoint.restore_file=FOLDER, and takes its parameters alone with checkpoint.finetune_from_model=FOLDER"
)
NOT_EVERYWHERE = (
    ", though rank 0 sees it. Leave out checkpoint.load_checkpoint_on_all_dp_ranks=true: then rank 0 reads for all ranks"
)


def open_local_checkpoint(
    path: str | os.PathLike, own_format: bool = True, read_method: str = "auto"
) -> CheckpointReader:
    """As `open_checkpoint`, for this process alone: nothing in it is collective."""
    path = os.fspath(path)
    is_folder = is_dcp_folder(path)
    refuse_part_of_folder(path)
    source = (FolderSource if is_folder else open_source)(path, read_method)
    try:
        skeleton = source.skeleton(own_format)
        if own_format:
            require_own_format(skeleton, path)
        if is_own_format(skeleton):
            skeleton = upgraded(skeleton, path)
            require_containers(skeleton, path)
    except NotACheckpointError as error:
        source.close()
        if not is_folder:
            raise
        raise NotACheckpointError(path, error.problem + DCP_HINT) from error
    except BaseException:
        source.close()
        raise
    return CheckpointReader(path, skeleton, source, source.places)


def open_checkpoint(
    path: str | os.PathLike,
    group: Any = None,
    on_all_ranks: bool = True,
    own_format: bool = True,
    read_method: str = "auto",
) -> CheckpointReader:
    """Open a checkpoint, file or folder, together. Collective, and so is everything that is done with the reader.

    Args:    on_all_ranks: every rank opens and reads it; otherwise rank 0 of the group reads, the others receive.
             Where the backend cannot broadcast, every rank reads in any case, and the log says so.
             own_format: refuse, saying what was found, whatever fairtrain has not written. A folder of another
             program gives the nest that was saved, but for values that are neither tensors nor plain data.
             read_method: pread, mmap, or auto (see sources.RecordSource).
    Raises:  on all ranks what was found on one: CheckpointNotFoundError, NotACheckpointError, CheckpointDamagedError
             (as far as structure and names go; the bytes of tensors are checked as they are read), CheckpointError.
    """
    path = os.fspath(path)
    if distributed_utils.get_world_size(group) == 1:
        return open_local_checkpoint(path, own_format, read_method)
    is_root = distributed_utils.get_rank(group) == 0
    reader, error = None, None
    try:
        if on_all_ranks or is_root:
            reader = open_local_checkpoint(path, own_format, read_method)
    except Exception as problem:  # agreed by all ranks below
        error = problem
    try:
        if on_all_ranks:
            told = distributed_utils.all_gather_list(reader and reader._source.signature(), group)
            if None in told:
                if told[0] is not None and isinstance(error, CheckpointNotFoundError):
                    error = CheckpointNotFoundError(path, error.problem + NOT_EVERYWHERE)
                agree_on_error(error, group)
            for rank, signature in enumerate(told):
                if signature != told[0]:
                    raise CheckpointError(path, "this rank sees another file under this path than rank 0", None, rank)
        else:
            root = distributed_utils.get_global_rank(group, 0)
            described = distributed_utils.broadcast_object(reader and describe_reader(reader), root, group)
            if described is None:
                agree_on_error(error, group)
            elif reader is None:
                reader = described_reader(path, *described)
    except distributed_utils.CannotBroadcastError as problem:  # found before anything was sent, by all ranks alike
        if reader is not None:
            reader.close()
        logger.warning("%s: every rank reads it, since %s", path, problem)
        return open_checkpoint(path, group, True, own_format, read_method)
    except BaseException:
        if reader is not None:
            reader.close()
        raise
    return reader.join(group, rank_0_reads=not on_all_ranks)


def describe_reader(reader: CheckpointReader) -> tuple[Any, list[tuple], list[tuple]]:
    """What another rank needs to follow this reader, in plain values: in the skeleton a torch.Size numbers a ref."""
    refs: list[tuple] = []

    def number(ref: TensorRef) -> torch.Size:
        refs.append(described_ref(ref))
        return torch.Size((len(refs) - 1,))

    plain = map_leaves(reader.skeleton, (TensorRef,), number)
    return plain, refs, [(place.name, place.offset, place.nbytes, place.crc) for place in reader._places.values()]


def described_ref(ref: TensorRef) -> tuple:
    *fields, chunks = ref.__reduce__()[1]
    return *fields, [(offsets, described_ref(chunk)) for offsets, chunk in chunks]


def ref_of(fields: tuple) -> TensorRef:
    *fields, chunks = fields
    return TensorRef(*fields, [(offsets, ref_of(chunk)) for offsets, chunk in chunks])


def described_reader(path: str, plain: Any, refs: list[tuple], places: list[tuple]) -> CheckpointReader:
    skeleton = map_leaves(plain, (torch.Size,), lambda number: ref_of(refs[number[0]]))
    return CheckpointReader(path, skeleton, None, {place[0]: Place(*place) for place in places})


def verify_checkpoint(path: str | os.PathLike) -> list[str]:
    """Read every byte of a file or folder and return what is wrong with it, a sentence each ([]: nothing)."""
    if is_dcp_folder(path):
        return verify_folder(path)
    return verify_parts(os.fspath(path), verify_file) if os.path.isdir(path) else verify_file(path)


def refuse_part_of_folder(path: str) -> None:
    """Raise NotACheckpointError where `path` is one of the files of a torch.distributed.checkpoint folder."""
    folder, name = os.path.split(os.path.abspath(path))
    is_part = name in (METADATA, OWN_RECORD) or name.endswith(".distcp")
    if is_part and os.path.isfile(path) and is_dcp_folder(folder):
        raise NotACheckpointError(path, f"is a part of the checkpoint folder {folder}: name the folder")


def is_dcp_folder(path: str | os.PathLike) -> bool:
    """Whether a folder of torch.distributed.checkpoint lies there, whole or not; others are files that belong together."""
    if not os.path.isdir(path):
        return False
    return any(name == METADATA or name.endswith(".distcp") for name in os.listdir(path))
