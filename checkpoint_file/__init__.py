"""The bytes of one checkpoint, file or folder: write, checksum, verify, stream into tensors.

Owns: the layout of the file, its checksums, and the way of its bytes from tensors to disk and back.
Must not know: names and folders of a run, the Trainer, the config. docs/checkpoint.md numbers what must hold.
"""

from checkpoint_file.background import BackgroundWrite, HostBuffer
from checkpoint_file.elements import ElementReader
from checkpoint_file.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    NotACheckpointError,
    UnsavableValueError,
    agree_on_error,
    error_kinds,
    told_by_rank_0,
)
from checkpoint_file.folder_writing import open_folder_writer, write_checkpoint_folder
from checkpoint_file.nests import ShardedTensor
from checkpoint_file.opening import open_checkpoint, open_local_checkpoint, verify_checkpoint
from checkpoint_file.reading import CheckpointReader
from checkpoint_file.skeleton import TensorRef, is_own_format, require_own_format
from checkpoint_file.sources import READ_METHODS
from checkpoint_file.verifying import verify_file
from checkpoint_file.versions import FORMAT_VERSION
from checkpoint_file.writing import CheckpointWriter, Supply, open_writer, write_checkpoint_file

__all__ = [
    "FORMAT_VERSION",
    "READ_METHODS",
    "BackgroundWrite",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointReader",
    "CheckpointWriteError",
    "CheckpointWriter",
    "ElementReader",
    "HostBuffer",
    "NotACheckpointError",
    "ShardedTensor",
    "Supply",
    "TensorRef",
    "UnsavableValueError",
    "agree_on_error",
    "error_kinds",
    "is_own_format",
    "open_checkpoint",
    "open_folder_writer",
    "open_local_checkpoint",
    "open_writer",
    "require_own_format",
    "told_by_rank_0",
    "verify_checkpoint",
    "verify_file",
    "write_checkpoint_file",
    "write_checkpoint_folder",
]
