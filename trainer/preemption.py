"""Requests to stop or to save that reach this process as signals.

    SIGTERM, SIGUSR1, SIGINT   stop: finish the update, save, leave with status 75
    SIGUSR2                    save at the next update and go on
    SIGINT again               end at once with status 1, touching no file

Owns: the handlers and the flags that they set; whoever trains looks at the flags between updates.
A handler runs when the main thread is back in Python, so a request waits for what is being computed or written. The
second interrupt must not: it is counted by a thread that the system itself wakes (signal.set_wakeup_fd).
Must not know: who trains, other ranks (what to do together is agreed elsewhere), files.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

STOPPED_STATUS = 75  # EX_TEMPFAIL: start me again
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAVE_SIGNALS = (signal.SIGUSR2,)
SIGNALS = STOP_SIGNALS + SAVE_SIGNALS


@dataclass
class _Flags:
    stop_signal: int | None = None
    because: str | None = None
    save: bool = False


class StopRequest:
    """Flags set by signals. Use it as a context manager, or call `close()` to put the earlier handlers back.

    Where another StopRequest is installed already, the new one shares its flags: a signal that came during start-up,
    or between two points of a sweep, is not forgotten. Signals that the launcher had blocked are let through.
    Outside the main thread no handler can be installed; the flags then change by `request_stop` and `request_save`.
    """

    def __init__(self) -> None:
        outer = self.installed()
        self._flags = outer._flags if outer is not None else _Flags()
        self._previous: dict[int, object] = {}
        self._interrupts: _Interrupts | None = None
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                handler = self._on_stop if signum in STOP_SIGNALS else self._on_save
                self._previous[signum] = signal.signal(signum, handler)
            if outer is None:
                self._interrupts = _Interrupts(end_at_once)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    @staticmethod
    def installed() -> StopRequest | None:
        """The StopRequest whose handlers are in force in this process."""
        owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        return owner if isinstance(owner, StopRequest) else None

    @property
    def stop_requested(self) -> bool:
        return self._flags.stop_signal is not None

    @property
    def save_requested(self) -> bool:
        return self._flags.save

    @property
    def signal_name(self) -> str | None:
        """Which signal asked for the stop; None if none did."""
        return None if self._flags.stop_signal is None else signal.Signals(self._flags.stop_signal).name

    @property
    def reason(self) -> str:
        """Who asked for the stop, for a message: `request`, or what `request_stop` was given."""
        return self._flags.because or "request"

    def clear_save(self) -> None:
        """The save that was asked for has been made."""
        self._flags.save = False

    def request_stop(self, signum: int = signal.SIGTERM, because: str | None = None) -> None:
        """As if the signal had come, without counting interrupts. because: who asks, if it is no signal."""
        if self._flags.stop_signal is None:
            self._flags.stop_signal, self._flags.because = signum, because

    def request_save(self) -> None:
        self._flags.save = True

    def close(self) -> None:
        """Put back the handlers that were in force before."""
        for signum, handler in self._previous.items():
            # None stands for a handler that was not installed from Python: it cannot be put back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        if self._interrupts is not None:
            self._interrupts.close()
            self._interrupts = None

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        self.request_stop(signum)

    def _on_save(self, signum: int, frame: FrameType | None) -> None:
        self.request_save()


def end_at_once() -> None:
    """End this process with status 1, whatever its threads are doing."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"interrupted twice: ending at once\n")
    os._exit(1)


class _Interrupts:
    """A thread that counts SIGINT and calls `on_second`, also while the main thread waits inside a system call."""

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._count, name="interrupts", daemon=True)
        self._thread.start()

    def _count(self) -> None:
        interrupts, received = 0, b""
        while 0 not in received:
            received = os.read(self._reading, 64)  # a byte for each signal, its number
            interrupts += received.count(signal.SIGINT)
            if interrupts > 1:
                self._on_second()

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous)
        os.write(self._writing, b"\0")  # no signal's number; forked children may hold the pipe open
        self._thread.join()
        os.close(self._writing)
        os.close(self._reading)
