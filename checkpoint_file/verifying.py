"""Reading every byte of a checkpoint to see whether it is as it was written."""

from __future__ import annotations

import os
from typing import Any

from checkpoint_file import archive
from checkpoint_file.archive import Place, crc32
from checkpoint_file.checksums import changed_record
from checkpoint_file.errors import CheckpointError, NotACheckpointError, cannot_read
from checkpoint_file.kinds import open_source
from checkpoint_file.other_layouts import UncheckedSource
from checkpoint_file.skeleton import owners
from checkpoint_file.sources import FileSource
from checkpoint_file.stand_ins import RefusedName


def verify_file(path: str | os.PathLike) -> list[str]:
    """Read every byte of the checkpoint and return what is wrong with it, a sentence each ([]: nothing).

    Whether fairtrain can continue from it is another question: an intact file of another program has no problem.
    """
    path = os.fspath(path)
    try:
        source = open_source(path, read_method="pread")
    except CheckpointError as error:
        return [str(error)]
    problems, damaged = [], []
    try:
        if isinstance(source, UncheckedSource):  # its structure was read and is sound
            return [f"{path}: its layout has no checksums, so that its bytes cannot be verified"]
        damaged = [problem for place in source.places.values() for problem in record_problems(source, place)]
        skeleton = source.skeleton(own_format=False)
        problems += [with_owners(problem, source, skeleton) for problem in damaged]
    except NotACheckpointError as error:
        problems += damaged
        problems += [] if isinstance(error.__context__, RefusedName) else [str(error)]
    except CheckpointError as error:
        problems += [*damaged, str(error)]
    finally:
        source.close()
    return problems


def record_problems(source: FileSource, place: Place) -> list[str]:
    checksum = 0
    try:
        for begin in range(0, place.nbytes, archive.CHUNK_BYTES):
            checksum = crc32(
                source.read(place.name, begin, min(begin + archive.CHUNK_BYTES, place.nbytes)).numpy(), checksum
            )
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [str(cannot_read(source.path, error))]
    if checksum != place.crc:
        return [str(changed_record(source.path, place.name, ""))]
    return []


def with_owners(problem: str, source: FileSource, skeleton: Any) -> str:
    """The problem of a record with the names of its tensors."""
    for record in source.places:
        if problem == str(changed_record(source.path, record, "")):
            return str(changed_record(source.path, record, owners(skeleton, record)))
    return problem
