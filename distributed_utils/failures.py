"""How one rank's failure becomes known to all: agreement in a collective, or a word left in the store."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import torch.distributed as dist

from distributed_utils.errors import PeerError
from distributed_utils.gathering import all_gather_list
from distributed_utils.ranks import get_rank, get_world_size

LATEST_START = "latest_start"  # the key in the store of a launch for the prefix of the last start of its ranks


def agree(error: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
    """Collective: return on every rank if no rank has an error, else raise on every rank.

    A failing rank raises its own error, the others PeerError of the first failing rank. One small message.
    """
    if get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    mine = None if error is None else dataclasses.astuple(Failure.of(error))
    told = all_gather_list(mine, group)
    if error is not None:
        raise agreed(error)
    for one in told:
        if one is not None:
            failure = Failure(*one)
            raise agreed(PeerError(failure.rank, failure.class_name, failure.message, failure.exit_status))


def agreed(error: BaseException) -> BaseException:
    """Mark an error that every rank raises at this place, so that all can still act together (`is_agreed`)."""
    error.raised_by_all = True
    return error


def is_agreed(error: BaseException) -> bool:
    return getattr(error, "raised_by_all", False) or get_world_size() == 1


@dataclass(frozen=True)
class Failure:
    """How a rank failed: what the others need to know."""

    rank: int
    class_name: str
    message: str
    exit_status: int = 1

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> Failure:
        """The failure that `error` is; a PeerError stands for the failure of its peer.

        An error that all ranks raise is the failure of the rank that found it, if its attribute `rank` names one.
        """
        if isinstance(error, PeerError):
            return cls(error.rank, error.class_name, error.message, error.exit_status)
        found_by = getattr(error, "rank", None) if getattr(error, "raised_by_all", False) else None
        if found_by is not None:
            rank = found_by
        rank = get_rank() if rank is None else rank
        return cls(rank, type(error).__name__, str(error)[:4000], exit_status_of(error))


def exit_status_of(error: BaseException) -> int:
    """The status that `error` stands for: its attribute `exit_status`, 2 for a ConfigError, else 1."""
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status
    return 2 if any(kind.__name__ == "ConfigError" for kind in type(error).__mro__) else 1


def publish_failure(error: BaseException | Failure, store: dist.Store | None = None) -> Failure:
    """Make this rank's failure known to all ranks, unless another rank was first. Returns the first failure.

    store: of the launch (`gather_ranks`), for the time before there is a process group.
    """
    failure = error if isinstance(error, Failure) else Failure.of(error)
    store = failure_store(store)
    if store is None:
        return failure
    try:
        return publish(store, failure)
    except (dist.DistError, RuntimeError):  # the store died with its host: nobody is left to be told
        return failure


def peer_failure(store: dist.Store | None = None) -> Failure | None:
    """The first failure that a rank has published; None if there is none, or no process group and no `store`.

    store: of the launch, where there is no process group.
    """
    store = failure_store(store)
    try:
        return published(store) if store is not None else None
    except (dist.DistError, RuntimeError):
        return None


def publish(store: dist.Store, failure: Failure) -> Failure:
    first = store.compare_set("failure", "", json.dumps(dataclasses.astuple(failure)))
    return Failure(*json.loads(first))


def published(store: dist.Store) -> Failure | None:
    return Failure(*json.loads(store.get("failure"))) if store.check(["failure"]) else None


def failure_of_launch(store: dist.Store) -> Failure | None:
    """As `peer_failure`, for a launcher, who has the bare `store`: of the ranks that were started last."""
    try:
        if not store.check([LATEST_START]):
            return None
        return peer_failure(dist.PrefixStore(store.get(LATEST_START).decode(), store))
    except (dist.DistError, RuntimeError):
        return None


def failure_store(store: dist.Store | None = None) -> dist.Store | None:
    """Where failures are published: in the store of the launch, the process group's if none is given."""
    if store is None and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    return None if store is None else peers_store(store)


def peers_store(store: dist.Store) -> dist.Store:
    """What ranks tell of themselves in the store of the launch, apart from the keys of process groups.

    It lies under the prefix that stands next to the bare store: that of this start (`gather_ranks`).
    """
    while isinstance(store, dist.PrefixStore) and isinstance(store.underlying_store, dist.PrefixStore):
        store = store.underlying_store
    return dist.PrefixStore("peers", store)
