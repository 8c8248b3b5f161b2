"""What can go wrong between ranks.

RuntimeError
  PeerError                 another rank failed: which, how
  CannotBroadcastError      the backend of the process group has no broadcast            status 2
  LostStoreError            who held the store of the launch ended while the ranks gathered
  StoppedAtStartError       told to stop before the first update                         status 75
ValueError
  LaunchEnvironmentError    the variables of the launch contradict each other            status 2
TypeError
  CannotSendError           a value that ranks do not exchange, with its key path
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PeerError(RuntimeError):
    """Another rank failed. `rank`, `class_name` and `message` are its, `exit_status` is the one it stands for."""

    is_user_error = True

    def __init__(self, rank: int, class_name: str, message: str, exit_status: int = 1) -> None:
        self.rank, self.class_name, self.message, self.exit_status = rank, class_name, message, exit_status
        super().__init__(f"rank {rank} failed: {class_name}: {message}")


class LaunchEnvironmentError(ValueError):
    """The variables that a launcher sets contradict each other or are incomplete; the message prints them."""

    is_user_error = True
    exit_status = 2

    def __init__(self, problem: str, env: Mapping[str, str]) -> None:
        shown = " ".join(f"{name}={env[name]}" for name in LAUNCH_VARIABLES if name in env)
        super().__init__(f"{problem} ({shown}). Start with torchrun, or plainly with these variables unset.")


class StoppedAtStartError(RuntimeError):
    """A stop was requested by `signal_name` before this start made an update: nothing has begun, nothing is lost."""

    is_user_error = True
    exit_status = 75

    def __init__(self, signal_name: str) -> None:
        super().__init__(f"stopped by {signal_name} before the first update; start me again")


class LostStoreError(RuntimeError):
    """Whoever held the store of the launch, rank 0 or the launcher, ended while the ranks were gathering."""

    is_user_error = True


class CannotSendError(TypeError):
    """A value of a type that ranks do not exchange; the message gives its key path."""


class CannotBroadcastError(RuntimeError):
    """The backend of the process group has no broadcast."""

    is_user_error = True
    exit_status = 2

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend = backend
        super().__init__(
            f"the backend {backend} cannot broadcast from {device}. Choose one that can: distributed_training.backend=auto"
            " (or, to read a checkpoint only, let every rank do it: checkpoint.load_checkpoint_on_all_dp_ranks=true)"
        )
