"""What bytes from anywhere may ask for, checked before anything is made of them.

Owns: the opcodes that a pickle in a checkpoint may have, how deep, how large and how entangled what it makes may be.
A pickle of a few bytes can otherwise claim gigabytes (an index into the memo), or make a nest whose walk never ends
(lists that hold each other twice, level upon level). Must not know: tensors, files.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import Any

from checkpoint_file.errors import NotACheckpointError

MAX_PICKLE_BYTES = 256 << 20  # 100,000 tensors and their optimizer state take about 40 MiB
MAX_DIRECTORY_BYTES = 32 << 20  # of a zip: about 400,000 records
MAX_CONTAINERS = 8_000_000  # each takes at least 56 bytes of memory for one byte of a pickle
MAX_DEPTH = 100
MAX_SMALL_BYTES = 64  # of a record that holds a word
SPREAD_BYTES = 1 << 30  # by how much a tensor may be larger than the memory that it lies in (dimensions of stride 0)
CONTAINERS = (dict, list, tuple, set, frozenset)

PLAIN = {  # opcodes of a fixed length (protocols 2 to 5) but STOP, and the length with the opcode
    b"(012N)]}tl\x85\x86\x87daesuRbQ\x81\x88\x89\x8f\x90\x91\x93\x94": 1,
    b"Khq\x80": 2, b"M": 3, b"Jj": 5, b"G\x95": 9,
}  # fmt: skip
COUNTED = {b"U\x8cC\x8a": "<B", b"XTB\x8b": "<I", b"\x8d\x8e\x96": "<Q"}  # a length in this format, then the bytes
STEPS = tuple({op: step for ops, step in PLAIN.items() for op in ops}.get(op, 0) for op in range(256))
LENGTHS = {op: struct.Struct(form) for ops, form in COUNTED.items() for op in ops}
MEMO_PUT, GLOBAL, STOP = ord("r"), ord("c"), ord(".")


class RefusedBytes(ValueError):
    """A sentence on what is refused."""


def check_pickle(data: Any, at: int = 0) -> int:
    """Where the pickle ends that begins at `at` in `data`. Raises: RefusedBytes unless its bytes are opcodes that torch.save writes and claim no more than they hold.

    Runs nothing and makes nothing. Takes a quarter of the time of the reading that follows.
    """
    steps, begin, end = STEPS, at, min(len(data), at + MAX_PICKLE_BYTES)
    while at < end:
        step = steps[data[at]]
        if step:
            at += step
        elif data[at] == STOP:
            check_count(data, begin, at)
            return at + 1
        else:
            at = end_of_opcode(data, data[at], at)
    raise RefusedBytes("it has no end" if end == len(data) else f"it has more than {MAX_PICKLE_BYTES:,} bytes")


def check_count(data: Any, begin: int, end: int) -> None:
    if end - begin > MAX_CONTAINERS:
        if sum(map(data[begin:end].count, (b"}", b"]", b"\x8f", b"R", b"\x85", b"t"))) > MAX_CONTAINERS:
            raise RefusedBytes(f"it makes more than {MAX_CONTAINERS:,} containers")


def end_of_opcode(data: bytes, op: int, at: int) -> int:
    """Where an opcode ends whose length is not fixed."""
    if op == GLOBAL:
        end = data.find(b"\n", data.find(b"\n", at) + 1) + 1
        if end <= at or end - at > 1000:
            raise RefusedBytes(f"it names something without an end at byte {at:,}")
        return end
    if op == MEMO_PUT:
        if at + 5 > len(data) or int.from_bytes(data[at + 1 : at + 5], "little") > len(data):
            raise RefusedBytes(f"it remembers more than it holds (byte {at:,})")
        return at + 5
    if op not in LENGTHS:
        raise RefusedBytes(f"it has the opcode {bytes([op])!r} at byte {at:,}, which torch.save does not write")
    length = LENGTHS[op]
    begin = at + 1 + length.size
    nbytes = length.unpack_from(data, at + 1)[0] if begin <= len(data) else len(data)
    if nbytes > len(data) - begin:
        raise RefusedBytes(f"it claims {nbytes:,} bytes at byte {at:,}, more than it holds")
    return begin + nbytes


def check_nest(nest: Any, nbytes: int) -> None:
    """Raise RefusedBytes if what a pickle of `nbytes` made holds itself, is too deep, or is far larger to walk."""
    most = 16 * nbytes + 100_000
    known: dict[int, tuple[int, int]] = {}  # id of a container -> (values in it, each as often as it is met; height)

    def weigh(value: Any, depth: int) -> tuple[int, int]:
        if id(value) in known:
            count, height = known[id(value)]
            if count == 0:
                raise RefusedBytes("it holds a container that holds itself")
        elif depth >= MAX_DEPTH:
            raise RefusedBytes(f"its containers lie more than {MAX_DEPTH} deep in each other")
        else:
            known[id(value)] = (0, 0)
            inner = value.values() if isinstance(value, dict) else value
            weights = [weigh(one, depth + 1) for one in inner if isinstance(one, CONTAINERS)]
            count = 1 + len(value) + sum(weight[0] for weight in weights)
            height = 1 + max((weight[1] for weight in weights), default=0)
            known[id(value)] = count, height
        if depth + height > MAX_DEPTH:
            raise RefusedBytes(f"its containers lie more than {MAX_DEPTH} deep in each other")
        if count > most:
            raise RefusedBytes("its containers hold each other so often that walking them would never end")
        return count, height

    if isinstance(nest, CONTAINERS):
        weigh(nest, 0)


def open_regular(path: str) -> int:
    """A descriptor of a file that is read. A pipe or device of that name, which might never answer, is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotACheckpointError(path, "is no regular file")
    return fd


def shown(value: Any, length: int = 60) -> str:
    """A value from a file in a sentence: short, without control characters, whatever it is."""
    try:
        text = repr(value)
    except Exception as error:  # an int too long for decimal digits, a nest too deep
        text = f"<{type(value).__name__}: {type(error).__name__}>"
    return text if len(text) <= length else text[: length - 1] + "…"


def reason_of(error: Exception) -> str:
    """Why a pickle was not read, in one line."""
    text = str(error) if isinstance(error, RefusedBytes) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
