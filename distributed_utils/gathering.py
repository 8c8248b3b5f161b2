"""What every rank knows, brought together: to all ranks, or to rank 0, which answers.

Small values in few messages. Over gloo they go by a star: a gathering by rank 0, then its broadcast. Measured with four
ranks on two cores, 1 ms, where an all_gather of as many bytes, which goes round all ranks, takes 4 ms. They wait as long
as it takes, whatever the timeout of the group: ranks come to them from work of unequal length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_utils.errors import CannotSendError, PeerError
from distributed_utils.plain_values import dumps, loads, refuse, refuse_tensor
from distributed_utils.ranks import (
    AS_LONG_AS_IT_TAKES,
    barrier,
    communication_device,
    get_global_rank,
    get_rank,
    get_world_size,
)

FRAME_BYTES = 8192  # of what one rank gives: more than this takes a second round
REPLY_BYTES = 16384  # of what rank 0 answers: more than this takes further messages
PART_BYTES = 4 * 2**20  # of a longer answer at a time
SIZE_BYTES = 8
IS_SENT, CANNOT_SEND = b"\1", b"\0"  # what the first byte of a rank's bytes says


def all_gather_list(data: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `data` (plain values, no tensors), in the order of ranks.

    Raises on all ranks if one rank's value cannot be sent: CannotSendError there, PeerError elsewhere.
    """
    if get_world_size(group) == 1:
        return [data]
    mine, failure = _packed(data)
    if _goes_by_star(group):
        reply = _star(mine, lambda given: dumps(given, refuse_tensor), group)
        given = loads(reply, refuse)
    else:
        given = _all_gather_bytes(mine, group)
    return _unpacked(given, failure, group)


def answer_of_rank_0(data: Any, answer: Callable[[list[Any]], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0 of `group` is given every rank's `data`; every rank returns what its `answer` makes of the list.

    Plain values, no tensors. answer: must not raise, since the other ranks wait for it.
    Raises on all ranks if one rank's value cannot be sent: CannotSendError there, PeerError elsewhere.
    """
    if get_world_size(group) == 1:
        return answer([data])
    if not _goes_by_star(group):
        given = all_gather_list(data, group)
        return all_gather_list(answer(given) if get_rank(group) == 0 else None, group)[0]
    mine, failure = _packed(data)

    def reply(given: list[bytes]) -> bytes:
        refused = [rank for rank, one in enumerate(given) if one[:1] == CANNOT_SEND]
        if refused:
            return dumps((given, None), refuse_tensor)
        return dumps((None, answer([loads(one[1:], refuse) for one in given])), refuse_tensor)

    given, answered = loads(_star(mine, reply, group), refuse)
    if given is not None:
        _unpacked(given, failure, group)
    return answered


def _packed(data: Any) -> tuple[bytes, Exception | None]:
    try:
        return IS_SENT + dumps(data, refuse_tensor), None
    except CannotSendError as error:
        return CANNOT_SEND + str(error).encode(), error


def _unpacked(given: list[bytes], failure: Exception | None, group: Any) -> list[Any]:
    if failure:
        raise failure
    for rank, one in enumerate(given):
        if one[:1] == CANNOT_SEND:
            raise PeerError(get_global_rank(group, rank), "CannotSendError", one[1:].decode(errors="replace"))
    return [loads(one[1:], refuse) for one in given]


def _goes_by_star(group: Any) -> bool:
    return "cpu:gloo" in str(dist.get_backend_config(group))


# ---------------------------------------------------------------------------------------------------------- by a star


def _star(mine: bytes, answer: Callable[[list[bytes]], bytes], group: Any) -> bytes:
    """Rank 0 gets the bytes of each rank, every rank what it answers: one gathering and one broadcast if all is small.

    The group itself is asked, since torch.distributed's functions spend as long in Python as such a message takes.
    """
    members = dist.group.WORLD if group is None else group
    room = FRAME_BYTES - SIZE_BYTES
    frames = _gather(_sized(len(mine)) + mine[:room], FRAME_BYTES, members)
    if members.rank() == 0:
        sizes = [_size_in(frame) for frame in frames]
        given = [frame[SIZE_BYTES : SIZE_BYTES + size] for frame, size in zip(frames, sizes)]
        if (rest := max(sizes) - room) > 0:
            _broadcast(_sized(-rest), REPLY_BYTES, members)
            rests = _gather(mine[room:], rest, members)
            given = [one + more[: size - len(one)] for one, more, size in zip(given, rests, sizes)]
        reply = answer(given)
        room = REPLY_BYTES - SIZE_BYTES
        _broadcast(_sized(len(reply)) + reply[:room], REPLY_BYTES, members)
        for begin in range(room, len(reply), PART_BYTES):
            part = reply[begin : begin + PART_BYTES]
            _broadcast(part, len(part), members)
        return reply
    first = _broadcast(b"", REPLY_BYTES, members)
    if (size := _size_in(first)) < 0:
        _gather(mine[room:], -size, members)
        first = _broadcast(b"", REPLY_BYTES, members)
        size = _size_in(first)
    parts = [first[SIZE_BYTES : SIZE_BYTES + size]]
    for begin in range(REPLY_BYTES - SIZE_BYTES, size, PART_BYTES):
        parts.append(_broadcast(b"", min(PART_BYTES, size - begin), members))
    return b"".join(parts)


def _sized(size: int) -> bytes:
    return size.to_bytes(SIZE_BYTES, "little", signed=True)


def _size_in(message: bytes) -> int:
    return int.from_bytes(message[:SIZE_BYTES], "little", signed=True)


def _gather(mine: bytes, size: int, members: dist.ProcessGroup) -> list[bytes]:
    """On rank 0 the first `size` bytes of each rank, padded by zeros; elsewhere nothing."""
    options = dist.GatherOptions()
    options.rootRank, options.timeout = 0, AS_LONG_AS_IT_TAKES
    into = [torch.empty(size, dtype=torch.uint8) for _ in range(members.size())] if members.rank() == 0 else []
    members.gather([into] if into else [], [_tensor(mine, size)], options).wait()
    return [one.numpy().tobytes() for one in into]


def _broadcast(mine: bytes, size: int, members: dist.ProcessGroup) -> bytes:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, AS_LONG_AS_IT_TAKES
    message = _tensor(mine, size)
    members.broadcast([message], options).wait()
    return message.numpy().tobytes()


def _tensor(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


# ---------------------------------------------------------------------------------------------- by any other backend


def _all_gather_bytes(mine: bytes, group: Any) -> list[bytes]:
    barrier(group)  # ranks may come from work of unequal length
    comm = communication_device(group)
    sizes = [int(size) for size in _all_gather(torch.tensor([len(mine)], device=comm), group)]
    gathered = _all_gather(_tensor(mine, max(sizes)).to(comm), group)
    return [one.cpu().numpy().tobytes()[:size] for one, size in zip(gathered, sizes)]


def _all_gather(mine: Tensor, group: Any) -> list[Tensor]:
    gathered = [torch.empty_like(mine) for _ in range(get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return gathered


def first_difference(facts: Callable[[], Mapping[str, Any]], group: Any = None) -> tuple[int, str, Any, Any] | None:
    """Collective. (rank, key, value of rank 0, value of that rank) of the first fact in which a rank differs from rank 0.

    Args: facts: gives plain values by name, asked only where there is somebody to compare with. None stands for one that
        a rank does not have.
    """
    if get_world_size(group) == 1:
        return None
    first, *others = all_gather_list(dict(facts()), group)
    for rank, other in enumerate(others, 1):
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                return rank, key, first.get(key), other.get(key)
    return None
