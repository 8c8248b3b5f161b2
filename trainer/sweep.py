"""`--multirun`: one run after the other, a process each, in a folder of its own.

Owns: the points of a sweep, the names of their folders, what becomes of their statuses. A point that fails is recorded
in `multirun.jsonl` and the sweep goes on; a signal ends it. Must not know: how a point trains.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.compose import compose, hydra_of
from trainer.errors import ConfigError
from trainer.overrides import Override, parse

START_ME_AGAIN = 75
LONGEST = 120  # letters of a folder's name
UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]")
STOPS = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def run(flags: argparse.Namespace) -> int:
    """Run all points. Returns 75 if any point's status is, else the largest."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        raise ConfigError(
            "--multirun starts its own ranks: leave torchrun out, distributed_training.distributed_world_size=N"
        )
    if any(parse(text).key == "resume" for text in flags.overrides):
        raise ConfigError("resume=DIR continues one run, --multirun starts several: leave one out")
    points = _points(flags)
    sweep = _Sweep(flags)
    statuses = []
    with sweep.signals():
        for number, overrides in enumerate(points, 1):
            if sweep.stopped:
                break
            print(f"fairtrain: point {number} of {len(points)}: {' '.join(overrides)}", file=sys.stderr, flush=True)
            statuses.append(sweep.run_point(overrides))
            print(f"fairtrain: point {number} ended with status {statuses[-1]}", file=sys.stderr, flush=True)
    return final_status(statuses, cut_short=len(statuses) < len(points))


def final_status(statuses: Sequence[int], cut_short: bool = False) -> int:
    """75 (start me again) if any point's is or points are left, else the largest; a death by signal counts as 1."""
    known = [1 if status < 0 else status for status in statuses]
    return START_ME_AGAIN if cut_short or START_ME_AGAIN in known else max(known, default=0)


# Points


def _points(flags: argparse.Namespace) -> list[list[str]]:
    """The overrides of each point, the last override varying fastest."""
    with hydra_of(flags) as hydra:
        choices = [_choices(override, hydra.config_loader) for override in map(parse, flags.overrides)]
    return [list(point) for point in itertools.product(*choices)]


def _choices(override: Override, config_loader: Any) -> list[str]:
    """What one override stands for: itself, or each value of its sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, QuotedString
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create(config_loader=config_loader).parse_overrides([override.text])[0]
        if not parsed.is_sweep_override():
            return [override.text]
        if not parsed.is_discrete_sweep():
            raise ConfigError(f"{override.text}: an interval has no end of values; give a choice or a range")
        if isinstance(parsed._value, ChoiceSweep) and _is_text_key(override.key):
            odd = [item for item in parsed._value.list if not isinstance(item, (str, QuotedString))]
            if odd:
                raise ConfigError(
                    f"{override.text}: {override.key} is text: put each value in quotes, such as \"'{odd[0]}'\""
                )
        return [f"{override.prefix}{override.key}={value}" for value in parsed.sweep_string_iterator()]
    except HydraException as error:
        if "," not in (override.raw or ""):
            return [override.text]  # no sweep: the point's own start reads it, or says what is wrong
        raise ConfigError(f"{override.text}: {str(error).splitlines()[0]}") from error


def _is_text_key(key: str) -> bool:
    from omegaconf import OmegaConf

    from trainer.fields import is_text
    from trainer.overrides import field_type

    return is_text(field_type(OmegaConf.create({}), key))


def point_name(overrides: Sequence[str]) -> str:
    """The folder's name for a point: its overrides in the order of their keys, safe for every file system.

    The same overrides give the same name, others another: where letters were replaced or cut off, a hash of the
    exact overrides is added.
    """
    exact = sorted(override for override in overrides if parse(override).key != "run_dir")
    plain = ",".join(exact)
    safe = UNSAFE.sub("_", plain).lstrip(".-~")
    if safe == plain and 0 < len(safe) <= LONGEST:
        return safe
    digest = hashlib.sha256("\0".join(exact).encode()).hexdigest()[:10]
    return f"{safe[: LONGEST - 11] or 'point'}-{digest}"


# Running


class _Sweep:
    """Runs points and passes signals on to the one that runs."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags, self._child, self.stopped = flags, None, False

    def signals(self) -> _Signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPS, *PASSED_ON))  # blocked, if torchrun's variables were found
        return _Signals(self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.stopped = self.stopped or number in STOPS
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def run_point(self, overrides: list[str]) -> int:
        """Run a point to its end; its status is recorded beside its folder."""
        try:
            base = self._base_folder(overrides)
        except ConfigError as error:
            print(f"fairtrain: {error}", file=sys.stderr, flush=True)
            return 2
        run_dir = os.path.join(base, point_name(overrides))
        rest = [text for text in overrides if parse(text).key != "run_dir"]
        status = self._start_and_wait([*rest, f"run_dir={run_dir}"])
        _record(Path(base), {"overrides": overrides, "run_dir": run_dir, "status": status, "time": time.time()})
        return status

    def _base_folder(self, overrides: list[str]) -> str:
        flags = argparse.Namespace(**{**vars(self._flags), "overrides": overrides})
        return os.path.expanduser(compose(flags).cfg.run_dir)

    def _start_and_wait(self, overrides: list[str]) -> int:
        flags = [f"--config-name={self._flags.config_name}"]
        flags += [f"--config-dir={self._flags.config_dir}"] if self._flags.config_dir else []
        command = [sys.executable, "-m", "trainer", *flags, *overrides]
        # A group of its own: Ctrl-C reaches the point once, from us, and not a second time from the terminal.
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
        ) as child:
            self._child = child
            if self.stopped:  # a signal came while the point was being started
                child.send_signal(signal.SIGTERM)
            return child.wait()


def _die_with_parent() -> None:
    """In the child, before exec: the kernel asks it to stop when the sweep's process dies."""
    import ctypes

    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):  # not Linux: an orphan runs on to its end
        pass


def _record(base: Path, point: dict) -> None:
    try:
        base.mkdir(parents=True, exist_ok=True)
        with open(base / "multirun.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
    except OSError as error:
        print(f"fairtrain: {base}/multirun.jsonl cannot be written: {error}", file=sys.stderr)


class _Signals:
    """Handlers for the time of a sweep, the earlier ones put back afterwards."""

    def __init__(self, handler: Any) -> None:
        self._handler, self._earlier = handler, {}

    def __enter__(self) -> None:
        for number in (*STOPS, *PASSED_ON):
            self._earlier[number] = signal.signal(number, self._handler)

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
