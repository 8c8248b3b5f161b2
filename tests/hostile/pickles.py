"""Pickles that somebody wrote who means harm, opcode by opcode. Each would be harmless to refuse and costly to believe."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable


def text(word: str) -> bytes:
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<I", len(data)) + data


def numbers(values) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(key: bytes = text("0"), count: bytes = integer(4), kind: bytes = name("torch", "FloatStorage")) -> bytes:
    return b"(" + text("storage") + kind + key + text("cpu") + count + b"tQ"


def tensor(shape=(4,), stride=(1,), offset: int = 0, where: bytes | None = None, more: bytes = b"") -> bytes:
    """`_rebuild_tensor_v2` of a storage, as torch.save writes it."""
    arguments = (where or storage()) + integer(offset) + numbers(shape) + numbers(stride) + b"\x89}"
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + more + b"tR"


def state(model: bytes) -> bytes:
    """A checkpoint of ours whose model has the one entry `weight`."""
    inner = b"}" + text("weight") + model + b"s"
    return (
        b"\x80\x02}(" + text("format_version") + b"K\x01" + text("run_id") + text("r") + text("model") + inner + b"u."
    )


def calls(module: str, attribute: str, argument: str) -> bytes:
    return name(module, attribute) + b"(" + text(argument) + b"tR"


def touching(flag: str) -> dict[str, bytes]:
    """Pickles that would make the file `flag` if anything of them were run."""

    class Reduced:
        def __init__(self, protocol: int) -> None:
            self.protocol = protocol

        def __reduce__(self):
            return os.mkdir, (flag,)

    found = {f"reduce, protocol {p}": pickle.dumps({"model": Reduced(p), "format_version": 1}, p) for p in range(2, 6)}
    found |= {
        "os.system": state(calls("os", "system", f"mkdir {flag}")),
        "posix.mkdir": state(calls("posix", "mkdir", flag)),
        "builtins.exec": state(calls("builtins", "exec", f"import os; os.mkdir({flag!r})")),
        "builtins.eval": state(calls("__builtin__", "eval", f"__import__('os').mkdir({flag!r})")),
        "runpy": state(calls("runpy", "_run_code", "1")),
        "a dotted name": b"\x80\x04" + b"\x8c\x05torch\x8c\x12os.path.os.mkdir  \x93(" + text(flag) + b"tR.",
        "a submodule of torch": state(calls("torch", "_dynamo", flag)),
        "torch.hub": state(calls("torch.hub", "load_state_dict_from_url", f"file://{flag}")),
        "numpy.load": state(calls("numpy.testing._private.utils", "runstring", flag)),
        "a class that is instantiated": state(
            name("subprocess", "Popen") + b"(" + text(f"mkdir {flag}") + b"l\x85\x81"
        ),
        "inst": b"\x80\x02(" + text(flag) + b"iposix\nmkdir\n.",
        "obj": b"\x80\x02(" + name("posix", "mkdir") + text(flag) + b"o.",
        "an extension": b"\x80\x02\x82\x01" + b"(" + text(flag) + b"tR.",
        "build on a function": state(name("torch", "Size") + b"(N}" + text("__code__") + text(flag) + b"st" + b"b"),
    }
    return found


def nested(levels: int) -> bytes:
    return b"]" * levels + b"a" * (levels - 1)


def laughs(levels: int) -> bytes:
    """A list of two lists of two lists …, each held twice: a walk takes 2 ** levels steps."""
    made = b"]q\x00" + text("ha") + b"a0"
    for level in range(levels):
        made += b"]q" + bytes([level + 1]) + b"h" + bytes([level]) + b"ah" + bytes([level]) + b"a0"
    return made + b"h" + bytes([levels])


def tricks() -> dict[str, bytes]:
    """Pickles that ask for memory or time, or describe tensors that cannot be."""
    huge = 2**40
    bad: dict[str, bytes] = {
        "a memo of 2**31": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "a memo of 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
        "a get of nothing": b"\x80\x02j\xff\xff\xff\x7f.",
        "a bytearray of 2**40": b"\x80\x05\x96" + struct.pack("<Q", huge) + b"abc.",
        "bytes of 2**40": b"\x80\x05\x8e" + struct.pack("<Q", huge) + b"abc.",
        "a text of 2**40": b"\x80\x05\x8d" + struct.pack("<Q", huge) + b"abc.",
        "a text of 2**32": b"\x80\x02X\xff\xff\xff\xffabc.",
        "a string of -1 bytes": b"\x80\x02T\xff\xff\xff\xffabc.",
        "an int of 2**31 bytes": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
        "a decimal of a million digits": b"\x80\x02L" + b"9" * 10**6 + b"L\n.",
        "a frame of 2**62": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
        "an unknown opcode": b"\x80\x02\xfe.",
        "no end": state(tensor())[:-1],
        "nothing": b"",
        "only a stop": b".",
        "a mark that is not there": b"\x80\x02t.",
        "deep lists": state(nested(100_000)),
        "lists deep enough for a walk": state(nested(900)),
        "laughs": state(laughs(60)),
        "a list in itself": state(b"]q\x00h\x00a"),
        "a dict in itself": state(b"}q\x00" + text("a") + b"h\x00s"),
        "ten million lists": b"\x80\x02" + b"]" * 10_000_000 + b".",
        "a long int for the version": b"\x80\x02}("
        + text("format_version")
        + integer(10**6000)
        + text("model")
        + b"}u.",
        "control characters": b"\x80\x02}" + text("\x1b]0;owned\x07\x1b[2J") + b"Ns.",
        "a name without end": b"\x80\x02c" + b"a" * 10**6,
        "a very long name": b"\x80\x02" + name("a" * 10**5, "b") + b".",
        "a wrong version": b"\x80\x63N.",
        "not a dict": b"\x80\x02]" + text("x") + b"a.",
        "lists for entries": b"\x80\x02}("
        + text("format_version")
        + b"K\x01"
        + text("model")
        + b"}"
        + text("optimizer_history")
        + b"K\x07u.",
        "a text for extra_state": b"\x80\x02}("
        + text("format_version")
        + b"K\x01"
        + text("model")
        + b"}"
        + text("extra_state")
        + text("x")
        + b"u.",
    }
    for what, made in {
        "more than its storage": tensor((5,)),
        "an offset beyond it": tensor((4,), (1,), 1),
        "a negative size": tensor((-4,), (1,)),
        "a negative stride": tensor((4,), (-1,)),
        "a negative offset": tensor((4,), (1,), -4),
        "a huge offset": tensor((0,), (1,), 2**62),
        "a huge size": tensor((2**62,), (1,)),
        "sizes whose product wraps": tensor((2**40, 2**40), (0, 0)),
        "a terabyte of one element": tensor((2**38,), (0,)),
        "a huge stride": tensor((2,), (2**61,)),
        "an int beyond int64": tensor((2**70,), (1,)),
        "other numbers of sizes and strides": tensor((2, 2), (1,)),
        "a size that is a text": name("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + storage()
        + b"K\x00"
        + text("ab")
        + numbers((1, 1))
        + b"\x89}tR",
        "a size that is a float": name("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + storage()
        + b"K\x00G"
        + struct.pack(">d", 4.0)
        + b"\x85"
        + numbers((1,))
        + b"\x89}tR",
        "a storage that is a text": tensor(where=text("data/0")),
        "a storage of a text": tensor(where=storage(kind=text("float32"))),
        "a dtype that is a text": name("torch._utils", "_rebuild_tensor_v3")
        + b"("
        + storage(kind=name("torch", "UntypedStorage"))
        + b"K\x00"
        + numbers((4,))
        + numbers((1,))
        + b"\x89}"
        + text("float32")
        + b"tR",
        "a storage of no record": tensor(where=storage(key=text("../../etc/passwd"))),
        "a storage of a number": tensor(where=storage(key=b"K\x00")),
        "a negative count": tensor(where=storage(count=integer(-4))),
        "a count that is a text": tensor(where=storage(count=text("4"))),
        "an enormous count": tensor((2**50,), (1,), where=storage(count=integer(2**50))),
        "a tensor that is changed": tensor() + b"(N}" + text("_offset") + integer(2**40) + b"stb",
        "a storage that is changed": tensor(where=storage() + b"}" + text("record") + text("version") + b"sb"),
        "a parameter of nothing": name("torch._utils", "_rebuild_parameter") + b"(N\x88NtR",
        "a persistent id that is a text": text("storage") + b"Q",
    }.items():
        bad[f"a tensor: {what}"] = state(made)
    return bad


def entries_of(make: Callable[[], dict[str, bytes]]) -> list[tuple[str, bytes]]:
    return sorted(make().items())
