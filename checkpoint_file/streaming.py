"""Bytes from a rank that does not see the file to rank 0, which writes them: bounded messages, no deadlock.

Before each message rank 0 says whether to go on; the first byte of each message says whether its sender has failed.
So either side can stop after any message, and both know. Must not know: what the bytes are.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import distributed_utils

MESSAGE_BYTES = 16 << 20
FLAG_BYTES = 64  # before the data, which so stays aligned


def send(chunks: Iterator[memoryview], nbytes: int, group: Any) -> None:
    """Send the `nbytes` of the chunks to rank 0 of the group; returns early if it says stop."""
    device, root = distributed_utils.communication_device(group), distributed_utils.get_global_rank(group, 0)
    go_on = torch.zeros(1, dtype=torch.uint8, device=device)
    message = torch.empty(FLAG_BYTES + min(MESSAGE_BYTES, nbytes), dtype=torch.uint8, device="cpu")
    rest = memoryview(b"")
    for size in message_sizes(nbytes):
        dist.recv(go_on, src=root, group=group)
        if not go_on.item():
            return
        error = None
        try:
            rest = fill(message[FLAG_BYTES : FLAG_BYTES + size].numpy(), rest, chunks)
        except Exception as problem:  # rank 0 must hear of it before it is raised
            error = problem
        message[0] = error is not None
        dist.send(message[: FLAG_BYTES + size].to(device), dst=root, group=group)
        if error is not None:
            raise error


def fill(target: Any, rest: memoryview, chunks: Iterator[memoryview]) -> memoryview:
    """Fill the array from `rest` and then the chunks; returns what is left of the last one."""
    filled = 0
    while filled < len(target):
        rest = rest if len(rest) else next(chunks)
        piece, rest = rest[: len(target) - filled], rest[len(target) - filled :]
        target[filled : filled + len(piece)] = piece
        filled += len(piece)
    return rest


def receive(rank: int, nbytes: int, take: Callable[[memoryview], Any], group: Any, refused: bool = False) -> None:
    """Take `nbytes` from `rank` of the group. refused: tell it to stop before its first message.

    Returns early if the sender fails, which raises its error itself. Raises: what `take` raises.
    """
    device, source = distributed_utils.communication_device(group), distributed_utils.get_global_rank(group, rank)
    message = torch.empty(FLAG_BYTES + min(MESSAGE_BYTES, nbytes), dtype=torch.uint8, device=device)
    error = None
    for size in message_sizes(nbytes):
        dist.send(torch.tensor([not refused and error is None], dtype=torch.uint8, device=device), source, group=group)
        if refused or error is not None:
            break
        received: Tensor = message[: FLAG_BYTES + size]
        dist.recv(received, src=source, group=group)
        received = received.cpu()
        if received[0]:
            break
        try:
            take(memoryview(received[FLAG_BYTES:].numpy()))
        except Exception as problem:  # raised when the sender knows, or has sent all
            error = problem
    if error is not None:
        raise error


def message_sizes(nbytes: int) -> list[int]:
    return [min(MESSAGE_BYTES, nbytes - begin) for begin in range(0, nbytes, MESSAGE_BYTES)]
