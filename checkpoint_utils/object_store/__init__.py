"""Checkpoints under a URL, s3://bucket/prefix: a folder of this machine, and objects that follow it.

Owns: the manifest that says which objects are the checkpoints, uploads and downloads, what becomes of both when a
connection breaks. The folder itself is saved to, chosen from and pruned as any other. `s3` alone knows boto3, and it is
not imported before a URL is used. Must not know: the Trainer, when a save is due.
"""

from checkpoint_utils.object_store.fetching import fetch
from checkpoint_utils.object_store.mirror import Mirror
from checkpoint_utils.object_store.store import ObjectStoreError, open_store

__all__ = ["Mirror", "ObjectStoreError", "fetch", "open_store"]
