"""Which buffers training has changed, so that ranks exchange them only then.

The file holds buffers once, so all ranks follow rank 0; how often a step changes one is up to the model.
Must not know: the Trainer, process groups.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class WatchedBuffers:
    """The buffers of `modules`, by the version that torch counts up with each change in place.

    Walking a model takes a while, so the places of its buffers are noted once; `remember` walks it again.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._owners = list(modules)
        self.remember()

    def remember(self) -> None:
        """Note all buffers as they are now."""
        modules = [module for owner in self._owners for module in owner.modules()]
        self._slots = [(module._buffers, name) for module in modules for name in module._buffers]
        self._versions = self._now()

    def _now(self) -> list[tuple[int, int]]:
        found = (buffers.get(name) for buffers, name in self._slots)
        return [(id(buffer), buffer._version) for buffer in found if buffer is not None]

    def have_changed(self) -> bool:
        """Whether any buffer was changed or replaced since `remember`."""
        return bool(self._slots) and self._now() != self._versions
