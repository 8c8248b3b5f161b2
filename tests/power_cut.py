"""What may be on a disk after a power cut: every state that the recorded calls of a run allow.

A file system may lose whatever was not synced, and keep of it any part: of a file's bytes what was written since its last
fsync, of a folder's names what changed since the folder's. Nothing is assumed of the order in which it writes by itself.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.disk import Call, seen

Tree = dict[str, Any]  # names to bytes (a file), to text (a link), to a Tree (a folder)


# ---- recording


def recorder(trace: str | os.PathLike) -> Callable[[Call, Callable], Any]:
    """For `seen`: appends each call to a file, several processes to the same one; a sync when it begins and when it ends."""
    fd = os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def note(what: str, call: Call) -> None:
        data = pickle.dumps((what, os.getpid(), call))
        os.write(fd, struct.pack("<I", len(data)) + data)

    def around(call: Call, do: Callable) -> Any:
        if call.kind == "fsync":
            note("begin", call)
        result = do()
        note("end", call)
        return result

    return around


def recorded(trace: str | os.PathLike) -> Iterator[tuple[str, int, Call]]:
    data = Path(trace).read_bytes()
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        yield pickle.loads(data[at + 4 : at + 4 + length])  # written by ourselves, a moment ago
        at += 4 + length


def recorded_session(cfg: dict, trace: str) -> int:
    """A session of a run whose calls are recorded."""
    from trainer.config import complete_config
    from trainer.train import main

    with seen(cfg["run_dir"], recorder(trace)):
        return main(complete_config(cfg))


# ---- the disk


@dataclass
class Node:
    """A file, folder or link: `now` as processes see it, `durable` on the disk, `pending` the changes in between."""

    now: Any
    durable: Any = None
    pending: list[Callable[[Any], None]] = field(default_factory=list)

    def change(self, do: Callable[[Any], None]) -> None:
        do(self.now)
        self.pending.append(do)

    def sync(self, count: int) -> None:
        for do in self.pending[:count]:
            do(self.durable)
        del self.pending[:count]


def new_file() -> Node:
    return Node(bytearray(), bytearray())


def new_folder() -> Node:
    return Node({}, {})


class ReplayedDisk:
    """The files below `root`, after the calls that were given to `apply`."""

    def __init__(self, root: str | os.PathLike) -> None:
        self._root_path, self.root = os.path.realpath(root), new_folder()
        self._syncs: dict[tuple, tuple[Node, int]] = {}

    def _place(self, path: str) -> tuple[Node | None, str]:
        """The folder that a path is in, and its name there."""
        *folders, name = os.path.relpath(path, self._root_path).split("/")
        node: Node | None = self.root
        for folder in folders:
            node = node.now.get(folder) if node is not None else None
        return node, name

    def _node(self, path: str) -> Node | None:
        if path == self._root_path:
            return self.root
        folder, name = self._place(path)
        return folder.now.get(name) if folder is not None else None

    def apply(self, what: str, process: int, call: Call) -> None:
        if what == "begin":
            node = self._node(call.path)
            if node is not None:
                self._syncs[process, call.path] = node, len(node.pending)
        elif call.kind == "fsync":
            node, count = self._syncs.pop((process, call.path), (None, 0))
            if node is not None:
                node.sync(count)
        elif call.path != self._root_path:  # the root itself is there from the beginning
            getattr(self, f"_{call.kind}")(call)

    def _add(self, path: str, node: Node) -> None:
        folder, name = self._place(path)
        folder.change(lambda names: names.__setitem__(name, node))

    def _create(self, call: Call) -> None:
        self._add(call.path, new_file())

    def _mkdir(self, call: Call) -> None:
        self._add(call.path, new_folder())

    def _symlink(self, call: Call) -> None:
        self._add(call.path, Node(call.target))

    def _link(self, call: Call) -> None:
        self._add(call.target, self._node(call.path))

    def _unlink(self, call: Call) -> None:
        folder, name = self._place(call.path)
        folder.change(lambda names: names.pop(name, None))

    _rmdir = _unlink

    def _rename(self, call: Call) -> None:
        (old, old_name), (new, new_name), node = self._place(call.path), self._place(call.target), self._node(call.path)

        def move(names: dict) -> None:
            names.pop(old_name, None)
            names[new_name] = node

        if old is new:
            old.change(move)
        else:
            self._add(call.target, node)
            self._unlink(call)

    def _write(self, call: Call) -> None:
        node = self._node(call.path)
        if node is not None:  # else it has lost its name
            at = len(node.now) if call.offset < 0 else call.offset
            node.change(lambda content: write_into(content, at, call.data))

    def _truncate(self, call: Call) -> None:
        node = self._node(call.path)

        def cut(content: bytearray) -> None:
            content.extend(bytes(max(0, call.size - len(content))))
            del content[call.size :]

        if node is not None:
            node.change(cut)

    # ---- states

    def after_a_cut(self, keep: Callable[[str, int, int], bool]) -> Tree:
        """What is on the disk if of the pending changes those stay for which keep("names" or "data", i, of how many)."""
        chosen: dict[int, Any] = {}

        def content(node: Node) -> Any:
            if isinstance(node.now, str):
                return node.now
            if id(node) not in chosen:
                kind = "data" if isinstance(node.now, bytearray) else "names"
                kept = node.durable.copy()
                for i, do in enumerate(node.pending):
                    if keep(kind, i, len(node.pending)):
                        do(kept)
                chosen[id(node)] = bytes(kept) if kind == "data" else {name: content(n) for name, n in kept.items()}
            return chosen[id(node)]

        return content(self.root)

    def states(self, rng: random.Random) -> Iterator[Tree]:
        """States that a cut now may leave: nothing, all, names without bytes, bytes without names, parts of either."""
        yield self.after_a_cut(lambda kind, i, n: False)
        yield self.after_a_cut(lambda kind, i, n: True)
        yield self.after_a_cut(lambda kind, i, n: kind == "names")
        yield self.after_a_cut(lambda kind, i, n: kind == "data")
        yield self.after_a_cut(lambda kind, i, n: i < n - 1)
        yield self.after_a_cut(lambda kind, i, n: i == n - 1)
        for _ in range(3):
            yield self.after_a_cut(lambda kind, i, n: rng.random() < 0.5)


def write_into(content: bytearray, at: int, data: bytes) -> None:
    content.extend(bytes(max(0, at - len(content))))  # a hole reads as zeros
    content[at : at + len(data)] = data


def fingerprint(tree: Tree) -> int:
    return hash(tuple((n, fingerprint(t) if isinstance(t, dict) else hash(t)) for n, t in sorted(tree.items())))


def lay_out(tree: Tree, folder: Path) -> None:
    """Make the files of the tree in `folder`."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            lay_out(content, folder / name)
        elif isinstance(content, str):
            os.symlink(content, folder / name)
        else:
            (folder / name).write_bytes(content)


# ---- from strace


STRACE = ("strace", "-f", "-y", "-xx", "-s", "100000000", "--seccomp-bpf", "-e", "trace=" + ",".join((
    "open", "openat", "write", "pwrite64", "lseek", "fsync", "fdatasync", "ftruncate", "truncate", "rename", "renameat",
    "renameat2", "link", "linkat", "symlink", "symlinkat", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir",
)))  # fmt: skip


class StraceReader:
    """The calls below `root` in what STRACE wrote, as `recorded` gives them. Knows which files there are, and file positions."""

    def __init__(self, root: str | os.PathLike) -> None:
        self._root = os.path.realpath(root)
        self._there: set[str] = set()
        self._positions: dict[str, int] = {}  # of descriptors, by "3</path>"; -1: it appends
        self._unfinished: dict[str, str] = {}

    def calls(self, lines: Iterator[str]) -> Iterator[tuple[str, int, Call]]:
        for line in lines:
            process, _, text = line.rstrip("\n").partition(" ")
            text = text.lstrip()
            if text.endswith("<unfinished ...>"):
                self._unfinished[process] = text.removesuffix("<unfinished ...>").rstrip()
                if text.startswith(("fsync", "fdatasync")):
                    yield from self._read(int(process), f"{self._unfinished[process]}) = 0", ("begin",))
                continue
            resumed = re.match(r"<\.\.\. \w+ resumed>(.*)", text)
            if resumed:
                text = self._unfinished.pop(process) + resumed[1]
            yield from self._read(int(process), text, ("end",) if resumed else ("begin", "end"))

    def _read(self, process: int, text: str, whats: tuple[str, ...]) -> Iterator[tuple[str, int, Call]]:
        match = re.fullmatch(r"(\w+)\((.*)\)\s+= (-?\d+)(?:<(.*?)>)?.*", text)
        if match is None or match[3].startswith("-"):
            return
        name, arguments = match[1], [unhexed(argument) for argument in match[2].split(", ")]
        call = self._call(name.removesuffix("2").removesuffix("at"), name, arguments, match[3], unhexed(match[4] or ""))
        if call is not None and call.path.startswith(self._root):
            yield from ((what, process, call) for what in whats if what == "end" or call.kind == "fsync")

    def _call(self, kind: str, name: str, arguments: list[Any], result: str, opened: str) -> Call | None:
        if kind == "open":
            flags = arguments[2] if name == "openat" else arguments[1]
            self._positions[f"{result}<{opened}>"] = -1 if "O_APPEND" in flags else 0
            if "O_CREAT" in flags and opened not in self._there:
                self._there.add(opened)
                return Call("create", opened)
            return Call("truncate", opened) if "O_TRUNC" in flags else None
        if kind in ("write", "pwrite64"):
            fd, data = arguments[0], arguments[1].encode("latin1")[: int(result)]
            at = int(arguments[3]) if kind == "pwrite64" else self._positions.get(fd, 0)
            if kind == "write" and at >= 0:
                self._positions[fd] = at + len(data)
            return Call("write", path_of(fd), data=data, offset=at)
        if kind == "lseek":
            if self._positions.get(arguments[0], 0) >= 0:
                self._positions[arguments[0]] = int(result)
            return None
        if kind in ("fsync", "fdatasync"):
            return Call("fsync", path_of(arguments[0]))
        if kind in ("ftruncate", "truncate"):
            path = path_of(arguments[0]) if kind == "ftruncate" else arguments[0]
            return Call("truncate", path, size=int(arguments[1]))
        return self._naming(kind, arguments)

    def _naming(self, kind: str, arguments: list[Any]) -> Call:
        """rename, link, symlink, unlink, mkdir, rmdir: paths, each behind the folder that it starts from if there is one."""
        paths, folder = [], ""
        for argument in arguments:
            if re.fullmatch(r"(AT_FDCWD|\d+)<.*>", argument):
                folder = path_of(argument)
            elif not re.fullmatch(r"\d+|[A-Z_|]+", argument):
                paths.append(os.path.join(folder, argument) if kind != "symlink" or paths else argument)
        if kind == "symlink":
            return Call("symlink", paths[1], paths[0])
        if kind in ("rename", "unlink"):
            self._there.discard(paths[0])
        self._there.update(paths[1:])
        return Call(kind, paths[0], *paths[1:2])


def unhexed(text: str) -> str:
    r"""What strace -xx wrote as "\x66\x6f", without its quotes."""
    return re.sub(r"\\x([0-9a-f]{2})", lambda m: chr(int(m[1], 16)), text.strip().strip('"'))


def path_of(described: str) -> str:
    """/path of "3</path>"."""
    return described.partition("<")[2].removesuffix(">")
