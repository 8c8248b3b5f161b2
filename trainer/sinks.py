"""Where numbers go apart from log.jsonl: TensorBoard's event files and wandb. And the files that grow, of all of them.

Owns: how bytes are appended while a disk may fail, the event files, the wandb run.
Must not know: log.jsonl, the Trainer. trainer.logs decides what is logged and when something is cut off.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, Mapping

from trainer.errors import ConfigError

_FLUSH_SECONDS = 1.0
_MAX_PENDING_BYTES = 32 << 20  # kept in memory while the disk refuses them; lines beyond that are lost, and counted

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------------------------
# Files that grow


class GrowingFile:
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
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        _sync_folder_of(self.path)  # a file whose name is not on the disk goes in a power cut, synced or not
        return fd

    def _failed(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            reason = error.strerror or error
            logger.warning("%s cannot be written (%s). Training goes on without it.", self.path, reason)

    def _recovered(self) -> None:
        lost = f"; {self._num_lost} lines are lost" if self._num_lost else ", nothing is lost"
        self._failing, self._num_lost = False, 0
        logger.warning("%s can be written again%s.", self.path, lost)


def _sync_folder_of(path: Path) -> None:
    # Imported here: it needs torch, which takes a second, and who reads logs, such as fairtrain-plot, does without.
    from checkpoint_utils.file_system import sync_folder

    sync_folder(str(path.parent))


def replace_end(path: Path, keep: int, tail: bytes) -> None:
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
        _sync_folder_of(path)  # else what is appended and synced from now on is in a file without a name
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
# TensorBoard


class TensorBoard:
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
        self._file: GrowingFile | None = None
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
            self._file = GrowingFile(self._new_path(), mend=lambda path: None)
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
        replace_end(path, min(keep, end), b"".join(tail))


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


class Wandb:
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
