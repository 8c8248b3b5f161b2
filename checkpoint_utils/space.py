"""How much room a checkpoint takes, how much there is, and how many of them a run keeps at once.

Decides and says; deletes nothing. A quota is not seen from here: it is found by the write that meets it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from checkpoint_file import ShardedTensor
from checkpoint_file.nests import leaves
from checkpoint_utils.config import expand
from checkpoint_utils.facts import checkpoint_paths
from checkpoint_utils.file_system import bytes_of

logger = logging.getLogger(__name__)

UNLIMITED = -1
# What surrounds the bytes of a tensor, its name and place included, as measured on tensors of a few elements.
AROUND_TENSOR = 300  # in a file
AROUND_NAME, AROUND_BOX = 200, 1850  # in a folder, where each box is what torch.save makes of it


def bytes_of_state(state: Any) -> int:
    """About the bytes of a checkpoint of this state: those of its tensors, shared ones once, sharded ones whole."""
    return sum(sizes_of_tensors(state))


def sizes_of_tensors(state: Any) -> list[int]:
    """The bytes of each tensor, shared ones once, sharded ones whole."""
    found = {}
    for leaf in leaves(state, (Tensor, ShardedTensor)):
        if isinstance(leaf, ShardedTensor):
            found[id(leaf)] = leaf.nbytes
        else:
            nbytes = leaf.numel() * leaf.element_size()
            key = (leaf.untyped_storage().data_ptr() or id(leaf), leaf.storage_offset(), nbytes)
            found[key] = min(nbytes, leaf.untyped_storage().nbytes())
    return list(found.values())


def bytes_around_tensor(boxes: int) -> int:
    """boxes: that a tensor has in a folder; 0 for a file."""
    return AROUND_NAME + boxes * AROUND_BOX if boxes else AROUND_TENSOR


def free_bytes(folder: str) -> int | None:
    """What an ordinary user may still write there; None where the mount does not say."""
    while folder and not os.path.isdir(folder):  # not made yet: its mount is that of the folder above
        folder = os.path.dirname(folder)
    try:
        facts = os.statvfs(folder or ".")
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


def check_room(path: str, nbytes: int) -> None:
    """Before a byte of a save is written. Raises: OSError (ENOSPC) if it cannot fit."""
    free = free_bytes(os.path.dirname(path))
    if free is not None and free < nbytes:
        detail = f"{human(nbytes)} are to be written, {human(free)} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {detail}")


@dataclass(frozen=True)
class Room:
    """nbytes: of one checkpoint. free: None where it is not known. held: bytes of the checkpoints that are there.

    kept: the most checkpoints on the disk at once, the one being written included; UNLIMITED: retention keeps all.
    """

    save_dir: str
    nbytes: int
    free: int | None
    held: int
    kept: int

    @property
    def fits(self) -> int:
        """Further checkpoints for which there is room."""
        return self.free // max(self.nbytes, 1)

    @property
    def is_short(self) -> bool:
        return self.fits < 1 or (self.kept != UNLIMITED and self.free + self.held < self.kept * self.nbytes)

    def __str__(self) -> str:
        text = f"a checkpoint of this run takes {human(self.nbytes)}"
        if self.free is None:
            return f"{text}; {self.save_dir} does not say how much room it has"
        text += f"; in {self.save_dir} {human(self.free)} are free, room for {self.fits:,} more"
        if self.kept == UNLIMITED:
            return f"{text}; all are kept (checkpoint.keep_interval_updates=N keeps the newest N)"
        return f"{text}; at most {self.kept} are there at once, {human(self.kept * self.nbytes)}"


def say_room(cfg: Any, state: Any, not_yet_there: int = 0, tensors_not_yet_there: int = 0, boxes: int = 0) -> None:
    """Log how large a checkpoint is and how many fit. One process.

    not_yet_there: bytes that the state will have more than it has now, such as moments before the first update.
    tensors_not_yet_there: the tensors that these are. boxes: as for `bytes_around_tensor`.
    """
    save_dir = expand(cfg.save_dir)
    sizes = sizes_of_tensors(state)
    num_tensors = len(sizes) + tensors_not_yet_there
    nbytes = sum(sizes) + not_yet_there + num_tensors * bytes_around_tensor(boxes)
    room = Room(save_dir, nbytes, free_bytes(save_dir), bytes_held(save_dir), most_at_once(cfg))
    if room.free is not None and room.is_short:
        logger.warning(
            "NOT ENOUGH ROOM FOR CHECKPOINTS: %s. Make room, keep fewer files (checkpoint.keep_interval_updates=N, "
            "checkpoint.keep_last_epochs=N), or set checkpoint.save_dir=FOLDER",
            room,
        )
    else:
        logger.info("%s", room)


def bytes_held(save_dir: str) -> int:
    """Bytes of the checkpoints in the folder, each content once, whatever names it has."""
    held = {}
    with contextlib.suppress(OSError):  # one that has just gone, a folder that cannot be listed: a line of the log less exact
        for path in checkpoint_paths(save_dir):
            held[os.stat(path).st_ino] = bytes_of(path)
    return sum(held.values())


def most_at_once(cfg: Any) -> int:
    """How many contents the folder may hold during a save, however the names fall together; UNLIMITED if all are kept."""
    count = 1 + (not cfg.no_last_checkpoints) + 1  # the one being written, the last, the best
    for used, keep in (
        (cfg.save_interval_updates > 0, cfg.keep_interval_updates),
        (cfg.save_interval > 0 and not cfg.no_epoch_checkpoints, cfg.keep_last_epochs),
        (True, cfg.keep_best_checkpoints),
    ):
        if used and keep < 0:
            return UNLIMITED
        count += keep if used else 0
    return count


def human(nbytes: int) -> str:
    """As in "12.5 MiB"."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit != "bytes" else f"{nbytes:,} bytes"
