"""A rank's share of a file or folder, copied into memory of its own and written by a thread while training goes on.

Owns: the buffer, the thread. The thread talks to no other rank and draws no random number.
Must not know: what a save is, when it counts.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from checkpoint_file.nests import empty_storage
from checkpoint_file.writing import ShareWriter


class HostBuffer:
    """Memory that is kept from save to save: as much as the largest share so far, pinned if it came from elsewhere."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def room(self, nbytes: int, pinned: bool) -> Tensor:
        """uint8 [nbytes] on the CPU; what it held before is gone."""
        if self._memory is None or self._memory.numel() < nbytes or (pinned and not self._memory.is_pinned()):
            self._memory = None  # first let go of the smaller one
            if pinned:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._memory = torch.empty(0, dtype=torch.uint8).set_(empty_storage(nbytes))
        return self._memory[:nbytes]


class BackgroundWrite:
    """The share of one rank on its way to the disk. When it is made the state has been copied and may change again."""

    def __init__(self, writer: ShareWriter, buffer: HostBuffer) -> None:
        self._writer = writer
        writer.copy_share(buffer.room)
        self._thread = threading.Thread(target=writer.write, name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return self.is_done and self._writer.error is not None

    def wait(self) -> None:
        self._thread.join()

    def cancel(self) -> None:
        """Have it end soon: its save has failed elsewhere."""
        self._writer.cancel()
        self._thread.join()
