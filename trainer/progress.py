"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere, nothing on ranks but 0.

Owns: how often something is shown, throughput and the time left, the terminal while a bar is alive.
Must not know: the Trainer, log.jsonl. Only stderr is written.

An update costs about a microsecond unless something is shown. Rates are those of this session: a resumed run does not
take the updates of the earlier one for its own, and the time in between counts nowhere.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol, TextIO

from trainer.errors import ConfigError
from trainer.logs import encode_line

LOG_FORMATS = ("auto", "rich", "simple", "json", "none")

_WINDOW_SECONDS = 10.0  # the throughput is that of so many last seconds


@dataclass
class Snapshot:
    """What is to be seen at an update. `eta` is in seconds; None stands for not yet known."""

    num_updates: int
    total_updates: int | None
    epoch: int
    stats: Mapping[str, Any]
    throughput: float | None  # samples, or what else `unit` counts, in a second
    eta: float | None
    unit: str = "samples"


class View(Protocol):
    """Where snapshots go: at least every `seconds`, and at `num_lines` evenly spaced updates of the run."""

    seconds: float
    num_lines: int

    def show(self, snapshot: Snapshot) -> None: ...
    def say(self, text: str, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Progress:
    """Shows how far a run is.

        with Progress(max_update, cfg.common.log_format, rank, num_updates) as progress:
            progress.update(num_updates, epoch, stats, num_samples)   # after each update
            progress.validated(stats)                                 # after a validation

    Args:
        total_updates: the last update of the run; None or 0 where nobody knows.
        log_format: auto (rich on a terminal, else simple), rich, simple, json, none.
        num_updates: where this session begins.
        num_samples: samples of the update on all ranks; without it, stats["sample_size"] is taken.
        unit: what that counts.
    """

    def __init__(
        self,
        total_updates: int | None,
        log_format: str = "auto",
        rank: int = 0,
        num_updates: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "samples",
    ) -> None:
        self._total, self._unit = total_updates or None, unit
        self._clock = clock
        self._view = _build_view(log_format, rank, stream or sys.stderr)
        num_lines = self._view.num_lines if self._view else 0
        self._step = max(1, self._total // num_lines) if self._total and num_lines else None
        self._num_updates = num_updates
        self._last: tuple[int, int, Mapping[str, Any]] | None = None  # not shown yet
        self._next_update, self._next_time = num_updates, 0.0  # the first update is shown: it lives
        self._num_samples = 0
        self._start: tuple[int, float] | None = None
        self._points: deque[tuple[float, int]] = deque()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, num_updates: int, epoch: int, stats: Mapping[str, Any], num_samples: float | None = None) -> None:
        """Note an update, and show it when it is time."""
        if self._view is None:
            return
        self._num_updates = num_updates
        self._last = (num_updates, epoch, stats)
        self._num_samples += stats.get("sample_size", 0) if num_samples is None else num_samples
        now = self._clock()
        if now >= self._next_time or num_updates >= self._next_update:
            self._show(num_updates, epoch, stats, now)

    def _show(self, num_updates: int, epoch: int, stats: Mapping[str, Any], now: float) -> None:
        self._last = None
        if self._start is None:  # rates count from here: the first update pays for warming up
            self._start = (num_updates, now)
        self._points.append((now, self._num_samples))
        while len(self._points) > 2 and now - self._points[1][0] >= _WINDOW_SECONDS:
            self._points.popleft()
        rate, eta = self._throughput(), self._eta(num_updates, now)
        snapshot = Snapshot(num_updates, self._total, epoch, stats, rate, eta, self._unit)
        self._next_time = now + self._view.seconds
        self._write(lambda view: view.show(snapshot))
        self._next_update = sys.maxsize if self._step is None else (num_updates // self._step + 1) * self._step
        if self._total and num_updates < self._total:
            self._next_update = min(self._next_update, self._total)

    def _throughput(self) -> float | None:
        (begin, before), (end, after) = self._points[0], self._points[-1]
        return (after - before) / (end - begin) if end > begin else None

    def _eta(self, num_updates: int, now: float) -> float | None:
        assert self._start is not None
        first, begin = self._start
        if self._total is None or num_updates <= first or now <= begin:
            return None
        return max(0, self._total - num_updates) * (now - begin) / (num_updates - first)

    def validated(self, stats: Mapping[str, Any]) -> None:
        """Show the scores of a validation; they stay on the screen."""
        scores = {name: value for name, value in stats.items() if name not in _NOT_SCORES and _is_number(value)}
        if not scores:
            return
        numbers = " ".join(f"{name} {value:.4g}" for name, value in scores.items())
        text = f"validation at update {self._num_updates}: {numbers}"
        self._write(lambda view: view.say(text, {"event": "valid", "num_updates": self._num_updates, **stats}))

    def close(self) -> None:
        """Show the last update, and leave the terminal as it was."""
        if self._view is not None and self._last is not None:
            self._show(*self._last, self._clock())
        self._write(lambda view: view.close())
        self._view = None

    def _write(self, act: Callable[[View], None]) -> None:
        if self._view is not None:
            try:
                act(self._view)
            except OSError:
                self._view = None  # the terminal, or the reader of the pipe, is gone: the run goes on


_NOT_SCORES = frozenset({"epoch", "num_updates", "wall", "event", "subset"})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _build_view(log_format: str, rank: int, stream: TextIO) -> View | None:
    if log_format not in LOG_FORMATS:
        raise ConfigError(f"common.log_format={log_format} is none of {', '.join(LOG_FORMATS)}")
    if rank != 0 or log_format == "none":
        return None
    if log_format == "json":
        return _JsonView(stream)
    # A bar that cannot move is no bar: without a terminal `rich` means lines, too.
    is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return _RichView(stream) if is_terminal and log_format != "simple" else _LineView(stream)


# ---------------------------------------------------------------------------------------------------------------------
# Words


def format_seconds(seconds: float | None) -> str:
    """0:12, 1:02:03, 2d 03:04:05."""
    if seconds is None:
        return "-"
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def _format_numbers(snapshot: Snapshot) -> str:
    parts = []
    for name, spec in (("loss", ".4g"), ("lr", ".1e"), ("gnorm", ".3g")):
        value = snapshot.stats.get(name)
        if value is not None:
            parts.append(f"{name} {value:{spec}}")
    rate = snapshot.throughput
    if rate is not None:
        parts.append(f"{rate:,.0f} {snapshot.unit}/s" if rate >= 10 else f"{rate:.2g} {snapshot.unit}/s")
    if snapshot.total_updates is not None:
        parts.append(f"eta {format_seconds(snapshot.eta)}")
    return " ".join(parts)


def _format_place(snapshot: Snapshot) -> str:
    return f"{snapshot.num_updates}/{snapshot.total_updates}" if snapshot.total_updates else f"{snapshot.num_updates}"


# ---------------------------------------------------------------------------------------------------------------------
# Views


class _LineView:
    """Plain lines, for files and pipes."""

    seconds, num_lines = 30.0, 20

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, snapshot: Snapshot) -> None:
        self._print(f"update {_format_place(snapshot)} epoch {snapshot.epoch} {_format_numbers(snapshot)}")

    def say(self, text: str, record: Mapping[str, Any]) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class _JsonView(_LineView):
    """One JSON object a line, for programs that read along."""

    def show(self, snapshot: Snapshot) -> None:
        record = {"event": "progress", "epoch": snapshot.epoch, "num_updates": snapshot.num_updates}
        record |= {"total_updates": snapshot.total_updates, **snapshot.stats}
        record |= {f"{snapshot.unit}_per_second": snapshot.throughput, "eta": snapshot.eta}
        self._print(encode_line(record).decode().rstrip())

    def say(self, text: str, record: Mapping[str, Any]) -> None:
        self._print(encode_line(record).decode().rstrip())


class _RichView:
    """A live bar. Whatever is printed while it lives (logging, print, warnings) goes above it.

    It is drawn by the training thread, a few times a second: no thread of its own has to be forked with the workers.
    """

    seconds, num_lines = 0.2, 0  # a picture takes about 0.2 ms

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._streams: list[tuple[str, TextIO, TextIO]] = []

    def _start(self) -> None:
        self._live.start()
        self._console.show_cursor(True)  # rich hides it, and a run that is killed could not bring it back
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                above = _AboveBar(stream, self._print_above)
                self._streams.append((name, stream, above))
                setattr(sys, name, above)

    def show(self, snapshot: Snapshot) -> None:
        if not self._live.is_started:
            self._start()
        self._live.update(self._picture(snapshot), refresh=True)

    def _picture(self, snapshot: Snapshot) -> Any:
        """One row: the place, a bar as wide as there is room, the numbers. As one text, since a table takes ten times
        as long to draw. On a narrow terminal the bar goes first, then the last numbers."""
        from rich.text import Text

        place = f"epoch {snapshot.epoch}  {_format_place(snapshot)} "
        numbers = f" {_format_numbers(snapshot)}"
        row = Text(place, no_wrap=True, overflow="ellipsis")
        width = self._console.width - len(place) - len(numbers)
        if snapshot.total_updates and width >= 6:
            done = min(width, width * snapshot.num_updates // snapshot.total_updates)
            row.append("━" * done, "bar.complete" if done < width else "bar.finished")
            row.append("━" * (width - done), "bar.back")
        return row.append(numbers)

    def _print_above(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def say(self, text: str, record: Mapping[str, Any]) -> None:
        self._print_above(text)

    def close(self) -> None:
        for name, stream, above in self._streams:
            above.flush()
            if getattr(sys, name) is above:
                setattr(sys, name, stream)
        self._streams = []
        if self._live.is_started:
            self._live.stop()


class _AboveBar(io.TextIOBase):
    """Stands in for a stream of the terminal: whole lines are printed above the bar.

    In a process forked from this one (a worker of a DataLoader) it is the plain stream: the bar is not the worker's.
    """

    def __init__(self, stream: TextIO, print_above: Callable[[str], None]) -> None:
        self._stream, self._print_above, self._owner, self._line = stream, print_above, os.getpid(), ""

    def write(self, text: str) -> int:
        if os.getpid() != self._owner:
            return self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._print_above("\n".join(lines))
        return len(text)

    def flush(self) -> None:
        if os.getpid() != self._owner:
            self._stream.flush()
        elif self._line:
            line, self._line = self._line, ""
            self._print_above(line)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding
