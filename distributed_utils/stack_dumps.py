"""Stacks of processes that cannot give them any more: stopped, deaf, or with their interpreter held by a library.

A process that has called `offer` dumps the Python stacks of its threads when it gets DUMP_SIGNAL, from the signal
handler itself (faulthandler), behind the beats of its Heartbeat. Children that it forks later do the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import time
from typing import Any

from distributed_utils.heartbeat import FRAMES_SHOWN, process_state, read_shared_dumps

DUMP_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 3
WAIT_S = 1.0
_MOST_CHILDREN, _FRAMES_OF_CHILD = 4, 8
_STATES = {
    "T": "stopped (state T, as by SIGSTOP)",
    "t": "stopped by a debugger (state t)",
    "D": "in a system call that cannot be interrupted (state D: a disk, a network file system, a device)",
    "R": "running (state R)",
    "S": "asleep (state S)",
    "Z": "dead (state Z)",
    "": "gone",
}


def offer(fd: int) -> None:
    """Dump the stacks of this process into `fd` whenever DUMP_SIGNAL comes."""
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True, chain=False)


def describe_state(pid: int) -> str:
    """What /proc says of a process of this machine, in words."""
    state = process_state(pid)
    return _STATES.get(state, f"in state {state}")


def dump(pid: int, fd: int, main_ident: int) -> str:
    """The stack of a process's main thread, innermost call last, as it was when we asked; '' if it cannot give one.

    fd, main_ident: of its Heartbeat, and of its main thread. A stopped process goes on after the dump.
    """
    if not _catches(pid, DUMP_SIGNAL):
        return ""
    begin = len(read_shared_dumps(pid, fd).encode(errors="replace"))
    try:
        _signal_main_thread(pid, DUMP_SIGNAL)
        if process_state(pid) == "T":
            os.kill(pid, signal.SIGCONT)  # it handles what is pending before anything else
    except OSError:
        return ""
    deadline, text = time.monotonic() + WAIT_S, ""
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, text = text, read_shared_dumps(pid, fd, begin)
        if text and text == before:
            break
    return stack_of_thread(text, main_ident)


def _signal_main_thread(pid: int, signum: int) -> None:
    """To it alone, whose thread id is the pid: while another thread handled the signal it would run on."""
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if tgkill is None:  # not in every C library
        os.kill(pid, signum)
    elif tgkill(pid, pid, signum) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def stack_of_thread(text: str, ident: int) -> str:
    """The part of a dump of faulthandler that is of thread `ident`, else its last part, which is the oldest thread."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    mine = [part for part in parts if re.match(rf"(Current t|T)hread 0x0*{ident:x}\b", part)]
    lines = [line for line in (mine or parts[-1:] or [""])[0].splitlines()[1:] if line.startswith("  ")]
    return innermost(lines[::-1])


def innermost(lines: list[str], count: int = FRAMES_SHOWN) -> str:
    """The last `count` of `lines`, and a sign that there were more."""
    return "\n".join(["  ..."] * (len(lines) > count) + lines[-count:])


def dump_children(fd: int, main_ident: int) -> str:
    """Where the child processes of this one stand, those with the deepest stacks first: an idle one has a short one."""
    found = []
    for child in multiprocessing.active_children():
        state = describe_state(child.pid)
        lines = dump(child.pid, fd, main_ident).splitlines()
        title = f"child process {child.name} (pid {child.pid}) is {state}"
        shown = f"{title}:\n{innermost(lines, _FRAMES_OF_CHILD)}" if lines else title
        found.append((len(lines), shown))
    found.sort(key=lambda one: -one[0])
    return "\n".join(text for _, text in found[:_MOST_CHILDREN])


def _catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for `signum`; to another one the signal would be death."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def kill(pid: int) -> None:
    """End a process of this machine that does not answer: a stopped one hears nothing else."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def own_home() -> str:
    """The machine and the process namespace that this process lives in: where pids mean the same."""
    parts: list[Any] = []
    for read in (
        lambda: open("/proc/sys/kernel/random/boot_id").read().strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        try:
            parts.append(read())
        except OSError:
            return ""
    return " ".join(parts)
