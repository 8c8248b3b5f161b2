"""Where in the data a run of another program stood, in the samples of this run.

The order of the samples is this run's: what goes over is how many of the epoch were read, not which. A function of what
the file says and of the number of samples here. Knows nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ELSEWHERE = "of_another_program"  # the key under which a data position of another program stands


def position_here(told: Mapping[str, Any], num_samples: int, samples_per_batch: int) -> dict[str, Any]:
    """The state of a data iterator over `num_samples` samples.

    told: `epoch` (from 1) and one of `samples_in_epoch`, `share_of_epoch` (0 to 1), `batches` (of samples_per_batch, the
        batches of all ranks here); or `num_updates` and `samples_per_update` where the file has no epoch, with
        `drops_rest` if an epoch's last, shorter update was left out.
    """
    epoch, samples = int(told.get("epoch") or 1), int(told.get("samples_in_epoch") or 0)
    if told.get("samples_per_update"):
        per_update, updates = int(told["samples_per_update"]), int(told.get("num_updates") or 0)
        per_epoch = num_samples // per_update if told.get("drops_rest") else -(-num_samples // per_update)
        epoch, rest = 1 + updates // max(per_epoch, 1), updates % max(per_epoch, 1)
        samples = rest * per_update
    elif told.get("share_of_epoch"):
        samples = round(float(told["share_of_epoch"]) * num_samples)
    elif told.get("batches"):
        samples = int(told["batches"]) * samples_per_batch
    if samples >= num_samples:  # the epoch had other samples than it has here: it is done
        epoch, samples = epoch + 1, 0
    return {"epoch": epoch, "samples_in_epoch": samples, "num_samples": num_samples}
