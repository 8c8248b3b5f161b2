"""Try again, later each time."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

logger = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S, TRIES = 0.5, 30.0, 8  # about a minute and a half in all

Result = TypeVar("Result")


def with_retries(do: Callable[[], Result], what: str, is_worth_it: Callable[[Exception], bool]) -> Result:
    """What `do` gives. Errors that `is_worth_it` says pass by themselves are tried again, up to TRIES times in all.

    what: says in the log what is tried. Raises: the last error.
    """
    for wait in waits():
        try:
            return do()
        except Exception as error:
            if not is_worth_it(error):
                raise
            logger.warning("%s: %s; trying again in %.1f s", what, type(error).__name__, wait)
            threading.Event().wait(wait)
    return do()


def waits() -> Iterator[float]:
    """Seconds before each further try, doubled each time; spread, so that ranks and runs do not come all at once."""
    spread = random.SystemRandom()  # training's own generators stay as they are
    for i in range(TRIES - 1):
        yield min(FIRST_WAIT_S * 2**i, LONGEST_WAIT_S) * spread.uniform(0.5, 1.0)
