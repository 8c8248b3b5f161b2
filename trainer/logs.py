"""What a run writes down about itself: log.jsonl, train.log, and on request TensorBoard events and wandb.

Owns: the format of log.jsonl, what is logged and what is cut off at a resume, where Python's logging goes.
Must not know: the Trainer, checkpoints, ranks beyond "is this the one that writes".

log.jsonl is standard JSON, one object a line, floats in full precision. What JSON has no number for is a string that
`float` takes: "nan", "inf", "-inf". Each (event, num_updates, subset) stands there once, however often the run was
killed; only `resume` lines and lines without num_updates are exempt. A curve is never worth a run: when the disk
fails, one warning is given, training goes on, and what could not be written is kept and tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Mapping

from trainer.sinks import GrowingFile, TensorBoard, Wandb, replace_end

LOG_FILE = "log.jsonl"
# Fields that differ between two runs that are otherwise equal bit by bit: whoever compares lines leaves these out.
TIMING_KEYS = frozenset({"wall", "samples_per_second", "updates_per_second", "blocked_s", "time"})

_NEVER_CUT = frozenset({"resume"})

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------------------------
# A line of log.jsonl


def encode_line(record: Mapping[str, Any]) -> bytes:
    """The line of log.jsonl that stands for `record`, with its newline."""
    try:
        text = _encode(record)
    except ValueError:  # a number that is not finite: rare, so only then is the record walked through
        text = _encode(_spell_nonfinite(record))
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """What JSON does not know by itself: tensors and numpy values as numbers or lists, anything else as its text."""
    if hasattr(value, "tolist"):
        return _spell_nonfinite(value.tolist())
    return str(value)


_encode = json.JSONEncoder(allow_nan=False, default=_plain).encode


def _spell_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: _spell_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell_nonfinite(item) for item in value]
    return value


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for a torn one or what else is no record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_log(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a log.jsonl, first to last. A torn last line, as a live or killed run has it, is left out."""
    with open(path, "rb") as file:
        for line in file:
            record = decode_line(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record


# ---------------------------------------------------------------------------------------------------------------------
# log.jsonl: what is cut off at a resume


@dataclass
class _Cut:
    """How to make a log.jsonl end at an update: its first `keep` bytes, then `tail`; `at_the_cut` stands there."""

    keep: int
    tail: bytes = b""
    num_dropped: int = 0
    at_the_cut: set[tuple] = field(default_factory=set)


def _line_key(record: Mapping[str, Any]) -> tuple | None:
    """(event, num_updates, subset or count), which may stand in the file once; None for a line that is exempt."""
    num_updates = record.get("num_updates")
    if record.get("event") in _NEVER_CUT or not isinstance(num_updates, int):
        return None
    return record.get("event"), num_updates, record.get("subset", record.get("count"))


def _plan_cut(file: BinaryIO, num_updates: int) -> _Cut:
    """Walk back from the end of the file, over the lines beyond `num_updates`, to the first train line before it.

    Train lines stand in order, each other line behind the train lines of its update, so nothing beyond the cut stands
    further ahead: the cost is that of what is cut, not of the file.
    """
    cut = _Cut(keep=file.seek(0, os.SEEK_END))
    kept: list[tuple[int, bytes]] = []
    for offset, line in _lines_backwards(file):
        record = decode_line(line)
        key = None if record is None else _line_key(record)
        if record is None or (key is not None and key[1] > num_updates):
            cut.keep = offset
            cut.num_dropped += 1
            continue
        kept.append((offset, line))
        if key is not None and key[1] == num_updates:
            cut.at_the_cut.add(key)
        if key is not None and key[0] == "train" and key[1] < num_updates:
            break
    cut.tail = b"".join(line for offset, line in reversed(kept) if offset > cut.keep)
    return cut


def _lines_backwards(file: BinaryIO, block: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    """(offset, line with newline) from the last to the first. What stands behind the last newline comes without one."""
    end = file.seek(0, os.SEEK_END)
    rest = b""
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        lines = (file.read(end - start) + rest).splitlines(keepends=True)
        offset = end + len(rest)
        # The first line of a block may have begun before it.
        for line in reversed(lines[1:] if start else lines):
            offset -= len(line)
            yield offset, line
        rest, end = (lines[0] if start else b""), start


def _cut_log(path: Path, num_updates: int) -> _Cut:
    with open(path, "rb") as file:
        cut = _plan_cut(file, num_updates)
    if cut.num_dropped:
        replace_end(path, cut.keep, cut.tail)
        logger.info("%s: %d lines beyond update %d cut off", path.name, cut.num_dropped, num_updates)
    return cut


def _mend_log(path: Path) -> None:
    """Take away a last line that a killed run left torn."""
    with open(path, "rb") as file:
        last = next(_lines_backwards(file), None)
    if last is not None and not last[1].endswith(b"\n"):
        os.truncate(path, last[0])


# ---------------------------------------------------------------------------------------------------------------------
# The log of a run


class RunLog:
    """log.jsonl of a run, and its TensorBoard and wandb where they are asked for. Silent on ranks other than 0.

        log = RunLog(run_dir, cfg.common, is_master, run_id=trainer.run_id, config=to_plain(cfg))
        log.cut_after(num_updates)          # once the run knows where it starts, 0 for a fresh one
        log.event("resume", ...)
        log.train(stats)                    # stats: "epoch", "num_updates", "loss", ... ; about 10 µs
        log.valid("valid", stats)
        log.flush()                         # before a checkpoint, so that no update it holds lacks its line
        log.close()

    Raises ConfigError where TensorBoard or wandb is asked for and not installed, or wandb is not set up.
    """

    def __init__(
        self,
        run_dir: str | Path,
        common_cfg: Any,
        is_master: bool = True,
        run_id: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir).expanduser()
        self.run_id, self._config = run_id, config
        self._is_master = is_master
        self._log_interval = max(1, int(getattr(common_cfg, "log_interval", 1) or 1))
        self._file = GrowingFile(self.run_dir / LOG_FILE, mend=_mend_log)
        self._last_train = sys.maxsize  # nothing is known of the file until it has been cut
        self._seen: set[tuple] = set()
        self._newest = -1
        self._tensorboard = self._wandb = None
        if is_master:
            self._tensorboard = self._build_tensorboard(getattr(common_cfg, "tensorboard_logdir", None))
            project = getattr(common_cfg, "wandb_project", None)
            self._wandb = Wandb(project, self.run_dir) if project else None

    def _build_tensorboard(self, logdir: str | None) -> TensorBoard | None:
        if not logdir:
            return None
        folder, run_dir = Path(logdir).expanduser(), self.run_dir.resolve()
        if not folder.resolve().is_relative_to(run_dir):  # ${run_dir}/tb is in it already
            folder = self.run_dir / folder  # an absolute one stays
        # Outside its folder a run only ever cuts files that carry its own name: others may write there too.
        inside = folder.resolve().is_relative_to(run_dir)
        return TensorBoard(folder, "fairtrain" if inside else f"fairtrain-{self._folder_id()}")

    def _folder_id(self) -> str:
        return hashlib.blake2b(str(self.run_dir.resolve()).encode(), digest_size=6).hexdigest()

    def cut_after(self, num_updates: int) -> None:
        """The run goes on from `num_updates`: drop every line beyond it, so that none stands there twice."""
        if not self._is_master:
            return
        self._file.close()
        self._last_train = self._newest = num_updates
        self._seen = set()
        try:
            if self._file.path.exists():
                self._seen = _cut_log(self._file.path, num_updates).at_the_cut
            if self._tensorboard is not None:
                self._tensorboard.cut_after(num_updates)
        except OSError as error:
            logger.warning("lines beyond update %d cannot be cut off and may stand twice (%s)", num_updates, error)
        if self._wandb is not None:
            self._wandb.start(self.run_id or self._folder_id(), self._config)

    def train(self, stats: Mapping[str, Any]) -> None:
        """Log an update, if it is the first or a multiple of `common.log_interval`."""
        if not self._is_master:
            return
        num_updates = stats["num_updates"]
        if num_updates % self._log_interval and num_updates != 1:
            return
        if num_updates <= self._last_train:  # the run went back without saying so
            self.cut_after(num_updates - 1)
        self._last_train = num_updates
        record = {"event": "train", "epoch": stats.get("epoch"), "num_updates": num_updates, **stats}
        self._file.add(encode_line(record))
        if self._tensorboard is not None or self._wandb is not None:
            self._add_scalars("train", stats)

    def valid(self, subset: str, stats: Mapping[str, Any]) -> None:
        """Log a validation of `subset`; a second one at the same update is the same, and left out."""
        if self._event("valid", {"subset": subset, **stats}):
            # A subset may be called train: its scores must not mix with those of the training.
            self._add_scalars("valid-train" if subset == "train" else subset, stats)
            self._write_out()

    def event(self, name: str, **fields: Any) -> None:
        """Log anything else, such as `event("checkpoint", num_updates=…, path=…, blocked_s=…, bytes=…)`."""
        self._event(name, fields)

    def is_done(self, num_updates: int) -> bool:
        """Whether the log that was cut after `num_updates` says there that the run was done. Known to rank 0 alone."""
        return ("done", num_updates, None) in self._seen

    def _event(self, name: str, fields: Mapping[str, Any]) -> bool:
        if not self._is_master:
            return False
        record = {"event": name, **fields}
        key = _line_key(record)
        if key is not None:
            if key in self._seen:
                return False
            if key[1] > self._newest:
                self._newest = key[1]
                self._seen.clear()
            self._seen.add(key)
        self._file.add(encode_line(record))
        self._file.write_out()
        return True

    def _add_scalars(self, tag: str, stats: Mapping[str, Any]) -> None:
        numbers = {name: _number(value) for name, value in stats.items() if name != "num_updates"}
        numbers = {name: number for name, number in numbers.items() if number is not None}
        for sink in (self._tensorboard, self._wandb):
            if sink is not None:
                sink.add(tag, int(stats["num_updates"]), numbers)

    def _write_out(self) -> None:
        self._file.write_out()
        if self._tensorboard is not None:
            self._tensorboard.write_out()

    def flush(self) -> None:
        """Wait until all lines are on disk."""
        if self._is_master:
            self._file.sync()
            if self._tensorboard is not None:
                self._tensorboard.flush()

    def close(self) -> None:
        if self._is_master:
            self._file.close()
            for sink in (self._tensorboard, self._wandb):
                if sink is not None:
                    sink.close()


def _number(value: Any) -> float | None:
    """A scalar as a float; None for what is no number."""
    if isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0:
        return float(value)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Python's logging


def setup_logging(run_dir: str | Path, rank: int = 0, log_format: str = "auto") -> RunLogging:
    """Send Python's logging and warnings where a run wants them; called again, it replaces what it set up before.

    Rank 0: everything from INFO to stderr, in short lines (JSON objects for log_format=json, warnings alone for none),
    and to `run_dir`/train.log, appended with the time. Other ranks: warnings and errors to stderr, marked [rank N].
    Nothing is written in the folder before `open_file()`, when it is known to be this run's; what is said until then
    is kept for it.
    """
    teardown_logging()
    handlers: list[logging.Handler] = [_TerminalHandler(rank, log_format)]
    if rank == 0:
        handlers.append(_TrainLogHandler(Path(run_dir).expanduser() / "train.log"))
    root = logging.getLogger()
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    return RunLogging(handlers)


def teardown_logging() -> None:
    """Take away what `setup_logging` set up, and leave other handlers alone."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, (_TerminalHandler, _TrainLogHandler)):
            root.removeHandler(handler)
            handler.close()
    logging.captureWarnings(False)


class RunLogging:
    """The handlers of a run, given by `setup_logging`."""

    def __init__(self, handlers: list[logging.Handler]) -> None:
        self._handlers = handlers

    def open_file(self) -> None:
        """The folder is ours: write train.log from here on, beginning with what has been said so far."""
        for handler in self._handlers:
            if isinstance(handler, _TrainLogHandler):
                handler.open_file()


class _TerminalHandler(logging.StreamHandler):
    """Writes short lines to what sys.stderr is at that moment, so that they go above a live bar (trainer.progress)."""

    def __init__(self, rank: int, log_format: str) -> None:
        logging.Handler.__init__(self, logging.WARNING if rank or log_format == "none" else logging.INFO)
        self._prefix = f"[rank {rank}] " if rank else ""
        self._as_json = log_format == "json"

    @property
    def stream(self) -> Any:
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        text, level = self._prefix + super().format(record), record.levelname.lower()
        if self._as_json:
            return json.dumps({"level": level, "logger": record.name, "message": text})
        return text if record.levelno < logging.WARNING else f"{level}: {text}"

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        if not isinstance(sys.exc_info()[1], OSError):  # a terminal that is gone stops nothing; train.log has the line
            super().handleError(record)


class _TrainLogHandler(logging.FileHandler):
    """train.log. Where it cannot be written, stderr says so once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="a", encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._waiting: list[logging.LogRecord] | None = []  # until the file may be opened
        self._failing = False

    def open_file(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for record in waiting:
            self.handle(record)

    def _open(self) -> Any:
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting is not None:
            self._waiting.append(record)
            return
        try:
            super().emit(record)
        except OSError:  # opening it failed
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failing:
            self._failing = True
            print(f"warning: {self.baseFilename} cannot be written ({error.strerror or error})", file=sys.stderr)
