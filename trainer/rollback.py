"""Going back to the newest healthy checkpoint and on behind the data that led to a bad number.

Owns: the order of the steps. Everything between that checkpoint and the bad update is given up, its data as well: what
made a parameter bad may have been any of them. Ends of epochs that lie in between are passed over.
Must not know: when to save or to stop. The Trainer that it is given is used by its public methods only.
"""

from __future__ import annotations

import logging
from typing import Any

import checkpoint_utils
import distributed_utils
from trainer.errors import NonFiniteError

logger = logging.getLogger(__name__)


def roll_back(cfg: Any, trainer: Any, itr: Any, error: NonFiniteError) -> str:
    """Load the run's newest checkpoint that was due by position. Collective. Returns its path.

    Args:    cfg: the section `checkpoint`. itr: the training data, whose position stays where it is.
    Raises:  on all ranks, NonFiniteError where there is no checkpoint or the run has gone back too often.
    """
    policy = trainer.nonfinite
    policy.count_rollback(error)
    position, count, given_up = itr.state_dict(), policy.count, trainer.get_num_updates()
    elapsed, healthy_at = trainer.cumulative_training_time(), policy.healthy_at
    loaded = None
    if healthy_at is not None:
        loaded = checkpoint_utils.load_own_checkpoint(cfg, trainer, healthy_at)
    if loaded is None:
        what, rest = error.what, (error.num_updates, error.rank, error.micro_batch)
        hint = "There is no checkpoint of this run yet to go back to (checkpoint.save_interval_updates saves earlier)."
        raise distributed_utils.agreed(NonFiniteError(what, *rest, hint)) from error
    path, extra_state = loaded
    policy.count = count
    trainer.set_cumulative_training_time(elapsed)
    if (extra_state.get("train_iterator") or position)["epoch"] != position["epoch"]:
        trainer.meter.reset()  # it counts the updates of one epoch
    itr.load_state_dict(position)
    logger.log(
        logging.ERROR if distributed_utils.is_master() else logging.DEBUG,  # all ranks know it, one tells it
        "%s ROLLED BACK TO UPDATE %d (%s), AND ON BEHIND THE DATA UP TO HERE: %d updates are given up; rollback %d of at "
        "most %d (common.max_nonfinite)",
        error,
        trainer.get_num_updates(),
        path,
        given_up - trainer.get_num_updates(),
        count,
        policy.limit,
    )
    return path
