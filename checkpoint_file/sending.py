"""Rank 0 reads and sends: what every rank needs by broadcast, what one rank needs to that rank alone.

Small things share buckets, large ones travel straight from and to the memory where they belong, in messages of at most
BUCKET_BYTES. Two messages are under way: while one is sent, rank 0 reads the next, and a receiver empties the last. The
order is known to all, so that no message needs a description. The first byte of a bucket says whether rank 0 has failed;
after STRAIGHT_IN_A_ROW messages without one a bucket comes. Nothing here knows where the bytes come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import distributed_utils
from checkpoint_file.filling import Plan, cut, memory_for

BUCKET_BYTES = 16 << 20  # bytes that rank 0 sends at a time
STRAIGHT_BYTES = 1 << 20  # from here on bytes travel without a bucket
STRAIGHT_IN_A_ROW = 8
ALIGNMENT = 16  # elements of every dtype can be viewed at its multiples
EVERYBODY = -1


class Segment(NamedTuple):
    """Bytes [begin, end) of a record, or elements [begin, end) of a pair; they stand at `position` of the message."""

    source: str | int
    begin: int
    end: int
    position: int
    nbytes: int


class Message(NamedTuple):
    """What travels at once, to a rank of the group or to EVERYBODY. A straight one is one range of a record."""

    receiver: int
    segments: list[Segment]
    nbytes: int
    straight: bool = False


def deal(
    receiver: int, items: Iterable[tuple[str | int, int, int]], itemsize: Callable[[int], int]
) -> Iterator[Message]:
    """Put (source, begin, end) into messages; in buckets the first ALIGNMENT bytes stay free for the flag."""
    segments: list[Segment] = []
    used = ALIGNMENT
    straight_in_a_row = STRAIGHT_IN_A_ROW - 1  # the first bucket comes early
    for source, begin, end in items:
        nbytes = (end - begin) * (1 if isinstance(source, str) else itemsize(source))
        if isinstance(source, str) and nbytes >= STRAIGHT_BYTES:
            yield Message(receiver, [Segment(source, begin, end, 0, nbytes)], nbytes, straight=True)
            straight_in_a_row += 1
            if straight_in_a_row == STRAIGHT_IN_A_ROW:
                yield Message(receiver, segments, used)
                segments, used, straight_in_a_row = [], ALIGNMENT, 0
            continue
        phase = begin % ALIGNMENT if isinstance(source, str) else 0  # what is aligned in the record is aligned here
        if segments and -(-used // ALIGNMENT) * ALIGNMENT + phase + nbytes > BUCKET_BYTES:
            yield Message(receiver, segments, used)
            segments, used, straight_in_a_row = [], ALIGNMENT, 0
        position = -(-used // ALIGNMENT) * ALIGNMENT + phase
        segments.append(Segment(source, begin, end, position, nbytes))
        used = position + nbytes
    if segments:
        yield Message(receiver, segments, used)


def messages_for(plan: Plan, receiver: int) -> Iterator[Message]:
    needs = plan.whole if receiver == EVERYBODY else plan.sharded[receiver]
    scattered = () if receiver == EVERYBODY else plan.scattered[receiver]
    step = BUCKET_BYTES - 2 * ALIGNMENT if BUCKET_BYTES < STRAIGHT_BYTES else BUCKET_BYTES

    def itemsize(pair: int) -> int:
        return plan.pairs[pair][0].dtype.itemsize

    def items() -> Iterator[tuple[str | int, int, int]]:
        for name in plan.names:
            for begin, end in cut(needs.get(name, []), step):
                yield name, begin, end
        for one in scattered:
            count = min(step, STRAIGHT_BYTES) // itemsize(one.pair)
            for begin in range(one.begin, one.end, count):
                yield one.pair, begin, min(begin + count, one.end)

    return deal(receiver, items(), itemsize)


class Stream:
    """The messages of one load, as this rank sends or receives them."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._root = distributed_utils.get_global_rank(group, 0)
        device = distributed_utils.communication_device(group)
        self._buffers = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        self._is_far = device.type != "cpu"

    def send(self, plan: Plan, load: Callable[[Message, Tensor], None]) -> None:
        """Rank 0: send everything, and keep what everybody needs. load: read a message's bytes into uint8 on the CPU.

        An error is told to the others before it is raised.
        """
        ranks = range(1, len(plan.sharded))
        told = dict.fromkeys(ranks, 0)  # 1: a bucket said that this rank has failed; 2: and a message followed it
        on_the_way: list[Any] = [None, None]
        staging = torch.empty(BUCKET_BYTES if self._is_far else 0, dtype=torch.uint8)
        error: Exception | None = None
        turn = 0
        for message in chain.from_iterable(messages_for(plan, receiver) for receiver in (EVERYBODY, *ranks)):
            receivers = ranks if message.receiver == EVERYBODY else (message.receiver,)
            if error is not None and all(told[rank] == 2 for rank in receivers):
                continue  # these have stopped: they wait for one message at most beyond the one that told them
            if on_the_way[turn] is not None:
                on_the_way[turn].wait()
            place = place_of(plan, message) if message.receiver == EVERYBODY else None
            data = place if place is not None else (staging if self._is_far else self._buffers[turn])[: message.nbytes]
            try:
                if error is None:
                    load(message, data)
            except Exception as problem:  # the others must hear of it first
                error = problem
            if error is not None:
                told.update((rank, told[rank] + (told[rank] == 1 or not message.straight)) for rank in receivers)
            if not message.straight:
                data[0] = error is not None
            on_the_way[turn] = self._post(message, self._to_send(data, self._buffers[turn]))
            try:
                if error is None and place is None and message.receiver == EVERYBODY:
                    take(plan, message, data)
            except Exception as problem:  # the next bucket tells the others
                error = problem
            turn = 1 - turn
        for work in on_the_way:
            if work is not None:
                work.wait()
        if error is not None:
            raise error

    def _to_send(self, data: Tensor, buffer: Tensor) -> Tensor:
        return buffer[: len(data)].copy_(data) if self._is_far else data

    def receive(self, plan: Plan) -> None:
        """Another rank: receive all that is for it and put it where it belongs.

        Rank 0 goes on sending when this rank fails, so this rank goes on receiving; the error is raised at the end.
        """
        error: Exception | None = None
        for message, data, is_placed in self._arriving(plan):
            try:
                if error is None and not is_placed:
                    take(plan, message, data)
            except Exception as problem:
                error = problem
        if error is not None:
            raise error

    def _arriving(self, plan: Plan) -> Iterator[tuple[Message, Tensor, bool]]:
        """Each message as it has come, while the next is under way; ends early where rank 0 has failed."""
        messages = chain(messages_for(plan, EVERYBODY), messages_for(plan, plan.rank), [None])
        last: tuple[Message, Tensor, bool] | None = None
        last_work: Any = None
        for number, message in enumerate(messages):
            coming, work = None, None
            if message is not None:
                place = None if self._is_far else place_of(plan, message)
                data = place if place is not None else self._buffers[number % 2][: message.nbytes]
                coming, work = (message, data, place is not None), self._post(message, data)
            if last is not None:
                last_work.wait()
                if not last[0].straight and last[1][0]:
                    if work is not None:
                        work.wait()
                    return
                yield last
            last, last_work = coming, work

    def _post(self, message: Message, data: Tensor) -> Any:
        if message.receiver == EVERYBODY:
            return dist.broadcast(data, src=self._root, group=self._group, async_op=True)
        if dist.get_rank() == self._root:
            receiver = distributed_utils.get_global_rank(self._group, message.receiver)
            return dist.isend(data, dst=receiver, group=self._group)
        return dist.irecv(data, src=self._root, group=self._group)


def place_of(plan: Plan, message: Message) -> Tensor | None:
    """Where on this rank a straight message can go as it is, uint8 on the CPU."""
    if not message.straight:
        return None
    uses = plan.whole_uses if message.receiver == EVERYBODY else plan.own_uses
    segment = message.segments[0]
    return memory_for(uses[segment.source], segment.begin, segment.end)


def take(plan: Plan, message: Message, data: Tensor) -> None:
    """Put what has come where it belongs on this rank."""
    uses = plan.whole_uses if message.receiver == EVERYBODY else plan.own_uses
    for source, begin, _, position, nbytes in message.segments:
        piece = data[position : position + nbytes]
        if isinstance(source, int):
            plan.fill_scattered(source, begin, piece.view(plan.pairs[source][0].dtype))
            continue
        for use in uses[source]:
            use.fill(piece, begin)
