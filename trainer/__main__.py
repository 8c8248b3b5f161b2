"""`python -m trainer`, and the console script `fairtrain`: signals first, then everything that takes long to import."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

START_ME_AGAIN = 75
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main() -> NoReturn:
    """Take requests to stop from the first moment on, then do what the command line says."""
    take_early_signals()
    from trainer import cli

    cli.main()


def take_early_signals() -> None:
    """Until training takes the signals over: a request to stop ends the process with 75, one to save is too early.

    Importing torch takes seconds, in which a signal would otherwise end the process as a failure. To the ranks of torchrun
    a signal comes when they are ready to agree with the others on what to do. Other ranks keep the defaults: whoever
    started them knows why it ends them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, signal.SIGUSR2))
        return
    if "RANK" in os.environ:
        return
    for number in STOPS:
        signal.signal(number, _leave_early)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _leave_early(number: int, frame: Any) -> NoReturn:
    os.write(
        2, f"fairtrain: stopped by {signal.Signals(number).name} before the first update; start me again\n".encode()
    )
    os._exit(START_ME_AGAIN)


if __name__ == "__main__":
    main()
