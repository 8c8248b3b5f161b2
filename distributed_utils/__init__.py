"""Process groups, rank facts, objects and tensors between ranks, agreement on errors, and the death of peers.

Owns: what the variables of a launch mean, how nests of plain values and tensors travel (tensors as bytes in bounded
buckets, never pickled; nothing that arrives is executed), and how one rank's failure becomes known to all.
Every function also works where no process group is initialised, as the only rank of a world of one.
Must not know: files, checkpoints, the Trainer.
"""

from distributed_utils.config import DistributedTrainingConfig
from distributed_utils.errors import (
    LAUNCH_VARIABLES,
    CannotBroadcastError,
    CannotSendError,
    LaunchEnvironmentError,
    LostStoreError,
    PeerError,
    StoppedAtStartError,
)
from distributed_utils.failures import (
    Failure,
    agree,
    agreed,
    exit_status_of,
    failure_of_launch,
    is_agreed,
    peer_failure,
    publish_failure,
)
from distributed_utils.gathering import all_gather_list, answer_of_rank_0, first_difference
from distributed_utils.groups import call_main, gather_ranks, init_process_group
from distributed_utils.heartbeat import Heartbeat, StalledError
from distributed_utils.launcher import LaunchFacts, launch_facts, stale_variables
from distributed_utils.objects import (
    BUCKET_BYTES,
    PACKED_BYTES,
    all_reduce_dict,
    broadcast_object,
    broadcast_tensors,
)
from distributed_utils.peer_watch import PeerWatch, die_with_parent
from distributed_utils.ranks import (
    barrier,
    communication_device,
    get_global_rank,
    get_local_world_size,
    get_rank,
    get_world_size,
    is_master,
)
from distributed_utils.stall_watch import LocalWatch, OwnStalls

__all__ = [
    "BUCKET_BYTES",
    "CannotBroadcastError",
    "CannotSendError",
    "DistributedTrainingConfig",
    "Failure",
    "Heartbeat",
    "LAUNCH_VARIABLES",
    "LaunchEnvironmentError",
    "LaunchFacts",
    "LocalWatch",
    "LostStoreError",
    "OwnStalls",
    "PACKED_BYTES",
    "PeerError",
    "PeerWatch",
    "StalledError",
    "StoppedAtStartError",
    "agree",
    "agreed",
    "all_gather_list",
    "all_reduce_dict",
    "answer_of_rank_0",
    "barrier",
    "broadcast_object",
    "broadcast_tensors",
    "call_main",
    "communication_device",
    "die_with_parent",
    "exit_status_of",
    "failure_of_launch",
    "first_difference",
    "gather_ranks",
    "get_global_rank",
    "get_local_world_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_agreed",
    "is_master",
    "launch_facts",
    "peer_failure",
    "publish_failure",
    "stale_variables",
]
