"""A local copy of one checkpoint that a URL names."""

from __future__ import annotations

import hashlib
import os
from urllib.parse import urlsplit

from checkpoint_utils.object_store.manifest import object_named
from checkpoint_utils.object_store.store import open_store


def fetch(url: str, folder: str) -> str:
    """A local copy of the checkpoint that a URL names, made once. Its path, under `folder`.

    The URL is that of an object, or of a name in the manifest beside it (s3://bucket/prefix/checkpoint_last.pt).
    Raises: ObjectStoreError, CheckpointNotFoundError.
    """
    name = os.path.basename(urlsplit(url).path)
    place = os.path.join(folder, ".fetched", hashlib.blake2b(url.encode(), digest_size=8).hexdigest())
    path = os.path.join(place, name)
    if not os.path.exists(path):
        store = open_store()
        os.makedirs(place, exist_ok=True)
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            store.download(object_named(store, url), temporary)
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)
    return path
