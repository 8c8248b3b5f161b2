"""What a run writes down about itself: log.jsonl, train.log, and on request TensorBoard events and wandb.

Owns: the format of log.jsonl and of the event files, what is cut off at a resume, where Python's logging goes.
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
import mmap
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, Mapping

from trainer.errors import ConfigError

LOG_FILE = "log.jsonl"
# Fields that differ between two runs that are otherwise equal bit by bit: whoever compares lines leaves these out.
TIMING_KEYS = frozenset({"wall", "samples_per_second", "updates_per_second", "blocked_s", "time"})

_NEVER_CUT = frozenset({"resume"})
_FLUSH_SECONDS = 1.0
_MAX_PENDING_BYTES = 32 << 20  # kept in memory while the disk refuses them; lines beyond that are lost, and counted

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
# Files that grow


class _GrowingFile:
    """Appends bytes at most once a second, and outlives a disk that fails.

    `add` takes whole lines or records. After a partial write the rest goes on where the disk stopped, so the file
    never has a hole; what the process had not written when it died is a torn end, which `mend` takes away.
    """

    def __init__(self, path: Path, mend: Callable[[Path], None]) -> None:
        self.path = path
        self._mend = mend
        self._fd: int | None = None
        self._pending: list[bytes] = []
        self._num_bytes = self._num_lost = 0
        self._failing = False
        self._due = 0.0

    def add(self, data: bytes) -> None:
        if self._failing and self._num_bytes > _MAX_PENDING_BYTES:
            self._num_lost += 1
        else:
            self._pending.append(data)
            self._num_bytes += len(data)
        if time.monotonic() >= self._due:
            self.write_out()

    def write_out(self) -> None:
        """Give to the operating system what waits; from then on it outlives this process."""
        data = memoryview(b"".join(self._pending))
        try:
            while data:
                if self._fd is None:
                    self._fd = self._open()
                data = data[os.write(self._fd, data) :]
            if self._failing:
                self._recovered()
        except OSError as error:
            self._failed(error)
        self._pending = [bytes(data)] if data else []
        self._num_bytes = len(data)
        self._due = time.monotonic() + _FLUSH_SECONDS

    def sync(self) -> None:
        """Write out, and wait until it is on disk: a checkpoint that outlives a power cut has its curve as well."""
        self.write_out()
        if self._fd is not None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                self._failed(error)

    def close(self) -> None:
        self.write_out()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._mend(self.path)
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def _failed(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            logger.warning("%s cannot be written (%s). Training goes on without it.", self.path, error.strerror or error)

    def _recovered(self) -> None:
        lost = f"; {self._num_lost} lines are lost" if self._num_lost else ", nothing is lost"
        self._failing, self._num_lost = False, 0
        logger.warning("%s can be written again%s.", self.path, lost)


def _replace_end(path: Path, keep: int, tail: bytes) -> None:
    """Make the file its first `keep` bytes followed by `tail`. Killed anywhere, it is the old or the new one."""
    if not tail:
        os.truncate(path, keep)
        return
    aside = path.with_name(path.name + ".tmp")
    try:
        with open(path, "rb") as old, open(aside, "wb") as new:
            _copy_bytes(old, new, keep)
            new.write(tail)
            new.flush()
            os.fsync(new.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _copy_bytes(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count > 0:
        block = source.read(min(count, 1 << 20))
        if not block:
            return
        target.write(block)
        count -= len(block)


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
    """(event, num_updates, subset), which may stand in the file once; None for a line that is exempt."""
    num_updates = record.get("num_updates")
    if record.get("event") in _NEVER_CUT or not isinstance(num_updates, int):
        return None
    return record.get("event"), num_updates, record.get("subset")


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
        _replace_end(path, cut.keep, cut.tail)
        logger.info("%s: %d lines beyond update %d cut off", path.name, cut.num_dropped, num_updates)
    return cut


def _mend_log(path: Path) -> None:
    """Take away a last line that a killed run left torn."""
    with open(path, "rb") as file:
        last = next(_lines_backwards(file), None)
    if last is not None and not last[1].endswith(b"\n"):
        os.truncate(path, last[0])


# ---------------------------------------------------------------------------------------------------------------------
# TensorBoard


class _TensorBoard:
    """Scalars as TensorBoard event files, one record for all numbers of a line.

    The records are written by us and not by a SummaryWriter: that one takes 80 µs for each number, needs a thread, and
    leaves steps of the killed run behind. Here they are cut out of the files of this run (and of nobody else), and a
    START record says from which step on a TensorBoard that is watching has to forget what it has read.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
        except ImportError as error:
            raise ConfigError(
                "common.tensorboard_logdir is set, but tensorboard is not installed. Install it with "
                "pip install 'fairtrain[tensorboard]', or turn it off with common.tensorboard_logdir=null"
            ) from error
        self._events, self._summaries, self._checksum = event_pb2, summary_pb2, masked_crc32c
        self._folder, self._owner = folder, owner
        self._file: _GrowingFile | None = None
        self._purge_step: int | None = None
        self._newest_stamp = 0

    def cut_after(self, num_updates: int) -> None:
        self.close()
        self._newest_stamp = self._find_newest_stamp()  # before files go: no name is used a second time
        for path in sorted(self._folder.glob(f"*tfevents*.{self._owner}")):
            _cut_events(path, num_updates)
        self._purge_step = num_updates + 1

    def add(self, tag: str, num_updates: int, stats: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        values = [value(tag=f"{tag}/{name}", simple_value=number) for name, number in stats.items()]
        self._write(step=num_updates, summary=self._summaries.Summary(value=values))

    def _write(self, **fields: Any) -> None:
        if self._file is None:
            self._file = _GrowingFile(self._new_path(), mend=lambda path: None)
            self._write(file_version="brain.Event:2")
            if self._purge_step is not None:
                start = self._events.SessionLog(status=self._events.SessionLog.START)
                self._write(step=self._purge_step, session_log=start)
        data = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = struct.pack("<I", self._checksum(length)), struct.pack("<I", self._checksum(data))
        self._file.add(length + checksums[0] + data + checksums[1])

    def _new_path(self) -> Path:
        """A name behind all names in the folder: readers take the files in the order of their names."""
        stamp = max(int(time.time()), self._newest_stamp + 1, self._find_newest_stamp() + 1)
        return self._folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{self._owner}"

    def _find_newest_stamp(self) -> int:
        stamps = [path.name.split(".")[3] for path in self._folder.glob("events.out.tfevents.*")]
        return max((int(stamp) for stamp in stamps if stamp.isdecimal()), default=0)

    def flush(self) -> None:
        if self._file is not None:
            self._file.sync()

    def write_out(self) -> None:
        if self._file is not None:
            self._file.write_out()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _cut_events(path: Path, num_updates: int) -> None:
    """Take the records beyond `num_updates`, and a torn end, out of an event file; remove a file without scalars."""
    size = path.stat().st_size
    keep, tail, end, num_scalars = size, [], 0, 0
    if size:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for begin, end, step, is_summary in _event_records(view):
                if step > num_updates:
                    keep = min(keep, begin)
                else:
                    num_scalars += is_summary
                    tail += [view[begin:end]] if keep < size else []
    if not num_scalars:
        path.unlink()
    elif min(keep, end) < size:
        _replace_end(path, min(keep, end), b"".join(tail))


def _event_records(view: mmap.mmap) -> Iterator[tuple[int, int, int, bool]]:
    """(begin, end, step, holds scalars) of each whole record: its length, checksum, an Event message, checksum.

    Of the message only the first fields are read: 1, the 8 bytes of wall_time; 2, the step, a varint, missing where it
    is 0; then the content, of which a summary is field 5.
    """
    begin, size = 0, len(view)
    while begin + 16 <= size:
        (length,) = struct.unpack_from("<Q", view, begin)
        end = begin + 16 + length
        if end > size:
            return
        step, place = 0, begin + 12 + 9
        if view[place] == 0x10:
            for shift in range(0, 64, 7):
                place += 1
                step |= (view[place] & 0x7F) << shift
                if view[place] < 0x80:
                    break
            place += 1
        yield begin, end, step, place < end and view[place] == 0x2A
        begin = end


# ---------------------------------------------------------------------------------------------------------------------
# wandb


class _Wandb:
    """Scalars to Weights & Biases. The wandb run has the id of the fairtrain run, so a resumed run continues it.

    What its server has received cannot be cut off: after a resume, steps that it already knows are not sent again.
    They are the same numbers, since a resume is exact.
    """

    def __init__(self, project: str, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "common.wandb_project is set, but wandb is not installed. Install it with "
                "pip install 'fairtrain[wandb]', or turn it off with common.wandb_project=null"
            ) from error
        self._wandb = wandb
        self._project, self._run_dir = project, run_dir
        self._run: Any = None
        self._failing = False

    def start(self, run_id: str, config: Mapping[str, Any] | None) -> None:
        if self._run is not None:
            return
        try:
            self._run = self._wandb.init(
                project=self._project,
                id=run_id,
                name=self._run_dir.name,
                resume="allow",
                dir=str(self._run_dir),
                config=dict(config) if config else None,
                settings=self._wandb.Settings(console="off"),  # train.log has the text; the bar is not for the server
            )
        except self._wandb.errors.UsageError as error:
            raise ConfigError(
                f"common.wandb_project={self._project}: {error} (run `wandb login`, set WANDB_MODE=offline, or turn it "
                "off with common.wandb_project=null)"
            ) from error
        except (self._wandb.errors.Error, OSError) as error:
            self._failed(error)

    def add(self, tag: str, num_updates: int, stats: Mapping[str, float]) -> None:
        if self._run is None or num_updates < self._run.step:
            return
        try:
            self._run.log({f"{tag}/{name}": number for name, number in stats.items()}, step=num_updates)
        except (self._wandb.errors.Error, OSError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            logger.warning("wandb failed (%s). Training goes on without it.", error)

    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            except (self._wandb.errors.Error, OSError) as error:
                self._failed(error)
            self._run = None


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
        self._file = _GrowingFile(self.run_dir / LOG_FILE, mend=_mend_log)
        self._last_train = sys.maxsize  # nothing is known of the file until it has been cut
        self._seen: set[tuple] = set()
        self._newest = -1
        self._tensorboard = self._wandb = None
        if is_master:
            self._tensorboard = self._build_tensorboard(getattr(common_cfg, "tensorboard_logdir", None))
            project = getattr(common_cfg, "wandb_project", None)
            self._wandb = _Wandb(project, self.run_dir) if project else None

    def _build_tensorboard(self, logdir: str | None) -> _TensorBoard | None:
        if not logdir:
            return None
        folder = self.run_dir / Path(logdir).expanduser()  # an absolute one stays
        # Outside its folder a run only ever cuts files that carry its own name: others may write there too.
        inside = folder.resolve().is_relative_to(self.run_dir.resolve())
        return _TensorBoard(folder, "fairtrain" if inside else f"fairtrain-{self._folder_id()}")

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
            logger.warning("Lines beyond update %d cannot be cut off the log and may stand twice (%s).", num_updates, error)
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
        self._file.add(encode_line({"event": "train", "epoch": stats.get("epoch"), "num_updates": num_updates, **stats}))
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


def setup_logging(run_dir: str | Path, rank: int = 0, log_format: str = "auto") -> None:
    """Send Python's logging and warnings where a run wants them; called again, it replaces what it set up before.

    Rank 0: everything from INFO to `run_dir`/train.log (appended, with the time) and, in short, to stderr (as JSON
    objects for log_format=json; warnings alone for none). Other ranks: warnings and errors to stderr, marked [rank N].
    """
    teardown_logging()
    terminal = _TerminalHandler(rank, log_format)
    handlers: list[logging.Handler] = [terminal]
    if rank == 0:
        handlers.append(_TrainLogHandler(Path(run_dir).expanduser() / "train.log"))
    root = logging.getLogger()
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)


def teardown_logging() -> None:
    """Take away what `setup_logging` set up, and leave other handlers alone."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, (_TerminalHandler, _TrainLogHandler)):
            root.removeHandler(handler)
            handler.close()
    logging.captureWarnings(False)


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
    """train.log. It is opened with its first line; where it cannot be written, stderr says so once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="a", encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._failing = False

    def _open(self) -> Any:
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
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
