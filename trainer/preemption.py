"""Requests to stop or to save that reach this process as signals.

    SIGTERM, SIGUSR1, SIGINT   stop: finish the update, save, leave with status 75
    SIGUSR2                    save at the next update and go on
    SIGINT again               end at once with status 1, touching no file

Owns: the handlers and the flags that they set; whoever trains looks at the flags between updates.
Must not know: who trains, other ranks (what to do together is agreed elsewhere), files.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from types import FrameType

STOPPED_STATUS = 75  # EX_TEMPFAIL: start me again
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAVE_SIGNALS = (signal.SIGUSR2,)
SIGNALS = STOP_SIGNALS + SAVE_SIGNALS


@dataclass
class _Flags:
    stop_signal: int | None = None
    save: bool = False
    interrupts: int = 0


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
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                handler = self._on_stop if signum in STOP_SIGNALS else self._on_save
                self._previous[signum] = signal.signal(signum, handler)
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

    def clear_save(self) -> None:
        """The save that was asked for has been made."""
        self._flags.save = False

    def request_stop(self, signum: int = signal.SIGTERM) -> None:
        """As if the signal had come, without counting interrupts."""
        if self._flags.stop_signal is None:
            self._flags.stop_signal = signum

    def request_save(self) -> None:
        self._flags.save = True

    def close(self) -> None:
        """Put back the handlers that were in force before."""
        for signum, handler in self._previous.items():
            # None stands for a handler that was not installed from Python: it cannot be put back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            self._flags.interrupts += 1
            if self._flags.interrupts > 1:
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"interrupted twice: ending at once\n")
                os._exit(1)
        self.request_stop(signum)

    def _on_save(self, signum: int, frame: FrameType | None) -> None:
        self.request_save()
