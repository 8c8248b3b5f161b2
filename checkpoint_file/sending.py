"""Rank 0 reads and sends: what every rank needs by broadcast, what one rank needs to that rank alone.

All travels in buckets of at most BUCKET_BYTES, two at a time: while one is on its way, rank 0 reads the next and the
receivers put the last where it belongs. The order is known to all, so that a bucket needs no description; its first
byte says whether rank 0 has failed. Nothing here knows where the bytes come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import distributed_utils
from checkpoint_file import archive
from checkpoint_file.filling import Plan, cut

BUCKET_BYTES = 8 << 20  # bytes that rank 0 sends at a time
ALIGNMENT = 16  # elements of every dtype can be viewed at its multiples
EVERYBODY = -1


class Segment(NamedTuple):
    """Bytes [begin, end) of a record, or elements [begin, end) of a pair; they stand at `position` in the bucket."""

    source: str | int
    begin: int
    end: int
    position: int
    nbytes: int


class Bucket(NamedTuple):
    """What travels at once. receiver: a rank of the group, or EVERYBODY."""

    receiver: int
    segments: list[Segment]
    nbytes: int


def deal(receiver: int, items: Iterable[tuple[str | int, int, int, int]]) -> Iterator[Bucket]:
    """Put (source, begin, end, nbytes) into buckets; the first ALIGNMENT bytes of each stay free."""
    segments: list[Segment] = []
    used = ALIGNMENT
    for source, begin, end, nbytes in items:
        position = -(-used // ALIGNMENT) * ALIGNMENT
        if isinstance(source, str):
            position += begin % ALIGNMENT  # what is aligned in the record is aligned here
        if segments and position + nbytes > BUCKET_BYTES:
            yield Bucket(receiver, segments, used)
            segments, position = [], ALIGNMENT + position % ALIGNMENT
        segments.append(Segment(source, begin, end, position, nbytes))
        used = position + nbytes
    if segments:
        yield Bucket(receiver, segments, used)


def buckets_for(plan: Plan, receiver: int) -> Iterator[Bucket]:
    needs = plan.whole if receiver == EVERYBODY else plan.sharded[receiver]
    scattered = () if receiver == EVERYBODY else plan.scattered[receiver]
    step = min(archive.CHUNK_BYTES, BUCKET_BYTES - 2 * ALIGNMENT)
    step -= step % ALIGNMENT

    def items() -> Iterator[tuple[str | int, int, int, int]]:
        for name in plan.names:
            for begin, end in cut(needs.get(name, []), step):
                yield name, begin, end, end - begin
        for one in scattered:
            size = plan.pairs[one.pair][0].dtype.itemsize
            for begin in range(one.begin, one.end, step // size):
                end = min(begin + step // size, one.end)
                yield one.pair, begin, end, (end - begin) * size

    return deal(receiver, items())


class Stream:
    """The two buffers of one rank, and the messages that fill or empty them."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._root = dist.get_global_rank(group, 0) if group is not None else 0
        device = distributed_utils.communication_device(group)
        self._buffers = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        self._is_far = device.type != "cpu"

    def send(self, plan: Plan, load: Callable[[Bucket, Tensor], None], own: Callable[[Bucket, Tensor], None]) -> None:
        """Rank 0: send all buckets. load: fill a bucket on the CPU. own: this rank's share of a bucket for everybody.

        An error in either is told to the others before it is raised.
        """
        ranks = range(1, len(plan.sharded))
        told = dict.fromkeys(ranks, 0)  # how many buckets said that this rank has failed
        on_the_way: list[Any] = [None, None]
        staging = torch.zeros(BUCKET_BYTES if self._is_far else 0, dtype=torch.uint8)
        error: Exception | None = None
        number = 0
        for bucket in chain.from_iterable(buckets_for(plan, receiver) for receiver in (EVERYBODY, *ranks)):
            receivers = ranks if bucket.receiver == EVERYBODY else (bucket.receiver,)
            if error is not None and all(told[rank] == 2 for rank in receivers):
                continue  # a receiver waits for two buckets at most
            buffer = self._buffers[number % 2]
            if on_the_way[number % 2] is not None:
                on_the_way[number % 2].wait()
            data = staging if self._is_far else buffer
            try:
                if error is None:
                    load(bucket, data)
            except Exception as problem:  # the others must hear of it first
                error = problem
            if error is not None:
                data[0] = 1
                told.update((rank, told[rank] + 1) for rank in receivers)
            if self._is_far:
                buffer[: bucket.nbytes].copy_(data[: bucket.nbytes])
            on_the_way[number % 2] = self._post(bucket, buffer)
            try:
                if error is None and bucket.receiver == EVERYBODY:
                    own(bucket, data)
            except Exception as problem:  # in the next bucket the others hear of it
                error = problem
            number += 1
        for work in on_the_way:
            if work is not None:
                work.wait()
        if error is not None:
            raise error

    def receive(self, plan: Plan, take: Callable[[Bucket, Tensor], None]) -> None:
        """Another rank: receive all buckets that are for it, and let `take` empty them.

        Rank 0 goes on sending when `take` fails, so this rank goes on receiving; the error is raised at the end.
        """
        buckets = chain(buckets_for(plan, EVERYBODY), buckets_for(plan, plan.rank))
        error: Exception | None = None
        for bucket, buffer in self._arriving(buckets):
            try:
                if error is None:
                    take(bucket, buffer)
            except Exception as problem:
                error = problem
        if error is not None:
            raise error

    def _arriving(self, buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket as it has come, while the next is under way; ends early where rank 0 has failed."""
        last: tuple[Bucket, Tensor, Any] | None = None
        for number, bucket in enumerate(chain(buckets, [None])):
            buffer = self._buffers[number % 2]
            coming = None if bucket is None else (bucket, buffer, self._post(bucket, buffer))
            if last is not None:
                last[2].wait()
                if last[1][0]:
                    if coming is not None:
                        coming[2].wait()
                    return
                yield last[:2]
            last = coming

    def _post(self, bucket: Bucket, buffer: Tensor) -> Any:
        message = buffer[: bucket.nbytes]
        if bucket.receiver == EVERYBODY:
            return dist.broadcast(message, src=self._root, group=self._group, async_op=True)
        if dist.get_rank() == self._root:
            receiver = bucket.receiver if self._group is None else dist.get_global_rank(self._group, bucket.receiver)
            return dist.isend(message, dst=receiver, group=self._group)
        return dist.irecv(message, src=self._root, group=self._group)
