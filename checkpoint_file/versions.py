"""The versions of our format, and how the names and containers of an older file become those of the newest.

A run of this version reads every version from 1 on; tests/fixtures keeps a file of each. What changes a key or the
meaning of a value gets a new number here, a step in `MIGRATIONS`, and a file there. Must not know: how files are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoint_file.errors import NotACheckpointError
from checkpoint_file.limits import shown

# MIGRATIONS[n - 1] takes the state of a file of version n, with descriptions of its tensors, to version n + 1.
Migration = Callable[[dict[str, Any]], dict[str, Any]]
MIGRATIONS: tuple[Migration, ...] = ()
FORMAT_VERSION = 1


def upgraded(state: dict[str, Any], path: str, migrations: tuple[Migration, ...] = MIGRATIONS) -> dict[str, Any]:
    """The state of a file of ours as the newest version has it. Raises: NotACheckpointError for a version from later."""
    version, newest = state["format_version"], len(migrations) + 1
    if type(version) is not int or not 1 <= version <= newest:
        raise NotACheckpointError(
            path, f"has format version {shown(version)}; this fairtrain reads versions 1 to {newest}: install a newer one"
        )
    for version in range(version, newest):
        state = {**migrations[version - 1](state), "format_version": version + 1}
    return state
