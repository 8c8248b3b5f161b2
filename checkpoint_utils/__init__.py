"""The checkpoints of a run: choose, publish, prune, save and load.

Owns: the names in the folder, the instant at which a save counts, which file a run continues from, what is deleted.
The bytes are checkpoint_file's. docs/checkpoint.md has the protocol, its invariants and what can still go wrong.
Must not import: trainer, Hydra. The Trainer that it is given is used by its public methods only.
"""

from checkpoint_utils.best_score import BestScore
from checkpoint_utils.choosing import Choice, choose, resets_to_apply
from checkpoint_utils.config import RESET_FLAGS, CheckpointConfig
from checkpoint_utils.errors import CheckpointWishError, NoUsableCheckpointError
from checkpoint_utils.facts import FileFacts, checkpoint_paths, load_checkpoint_to_cpu, verify_checkpoint
from checkpoint_utils.folders import FolderPublication, publish_checkpoint_folder
from checkpoint_utils.loading import load_checkpoint, load_own_checkpoint
from checkpoint_utils.names import CheckpointName, checkpoint_names, stale_checkpoints
from checkpoint_utils.publishing import Publication, publish_checkpoint
from checkpoint_utils.retention import prune_checkpoints, remove_stale_temporaries, stale_paths
from checkpoint_utils.saving import Save, SavedCheckpoint, begin_save, save_checkpoint
from checkpoint_utils.space import bytes_of_state, say_room

__all__ = [
    "RESET_FLAGS",
    "BestScore",
    "CheckpointConfig",
    "CheckpointName",
    "CheckpointWishError",
    "Choice",
    "FileFacts",
    "FolderPublication",
    "NoUsableCheckpointError",
    "Publication",
    "Save",
    "SavedCheckpoint",
    "begin_save",
    "bytes_of_state",
    "checkpoint_names",
    "checkpoint_paths",
    "choose",
    "load_checkpoint",
    "load_checkpoint_to_cpu",
    "load_own_checkpoint",
    "prune_checkpoints",
    "publish_checkpoint",
    "publish_checkpoint_folder",
    "remove_stale_temporaries",
    "resets_to_apply",
    "save_checkpoint",
    "say_room",
    "stale_checkpoints",
    "stale_paths",
    "verify_checkpoint",
]
