"""Who has a folder: a lock for the processes of this host, a beat for those of others.

Owns: the file `.lock`, locked (flock) by its owner, who rewrites what it holds every BEAT_S. A start that finds
    no owner, or one that has let go               takes the folder
    an owner of this host, and the lock free       takes it: the owner is dead
    an owner of the same job, elsewhere            takes it: a restart is by whoever ended the others
    any other owner                                watches: a beat that changes is a live run, and it is refused;
                                                   PERIOD_S without a change is a dead one
No clock is compared with another machine's. An owner that stood still for so long that it was taken over learns that in
`check`, before it writes. Must not know: what is in the folder.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import FolderLostError

logger = logging.getLogger(__name__)

NAME = ".lock"
BEAT_S = 5.0
PERIOD_S = 30.0  # without a beat that is seen to change: the owner is dead
PATIENCE = 5.0  # seconds that a start waits for a run that is just ending
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_BYTES = 1024  # of the file: it is rewritten in place, so that no disk is too full for it
_LOOK_S = 0.05


@dataclass(frozen=True)
class Owner:
    """What the file says of who has the folder. `jobs`: marks of the jobs it is a member of. `beat`: grows."""

    pid: int
    hostname: str
    boot: str
    token: str
    jobs: tuple[str, ...] = ()
    beat: int = 0
    has_left: bool = False

    @classmethod
    def this_process(cls) -> Owner:
        return cls(os.getpid(), socket.gethostname()[:80], _boot_id(), uuid.uuid4().hex, jobs_of(os.environ))

    @property
    def is_of_this_host(self) -> bool:
        """One kernel, one hostname. Containers of one machine count as hosts: their mounts may not share locks."""
        return (self.hostname, self.boot) == (socket.gethostname()[:80], _boot_id())

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}"

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode().ljust(_BYTES - 1) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Owner | None:
        try:
            fields = json.loads(data)
            return cls(**{**fields, "jobs": tuple(fields["jobs"])})
        except (ValueError, TypeError, KeyError):
            return None


class HeldError(Exception):
    """A live run has the folder. `owner` is None where the file does not say who."""

    def __init__(self, owner: Owner | None) -> None:
        self.owner = owner
        super().__init__(str(owner) if owner is not None else "its pid is not known")


def jobs_of(env: Mapping[str, str]) -> tuple[str, ...]:
    """Marks of the launch and of the Slurm job that this process belongs to; equal marks, one job."""
    launch, slurm = env.get("TORCHELASTIC_RUN_ID", ""), env.get("SLURM_JOB_ID", "")
    found = [f"launch {launch}"] if launch and launch != "none" else []  # torchrun's name for one without a name
    found += [f"slurm {env.get('SLURM_CLUSTER_NAME', '')} {slurm}"] if slurm else []
    return tuple(hashlib.blake2b(mark.encode(), digest_size=8).hexdigest() for mark in found)


class Lease:
    """The hold of one process on a folder. The caller makes the folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._me = Owner.this_process()
        self._fd: int | None = None
        self._seen_at = 0.0  # when this process last read its own name there
        self._lost_to: Owner | None = None
        self._is_lost = False
        self._beating = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        return self._fd is not None

    def take(self) -> None:
        """Take the folder, waiting up to PERIOD_S for an owner that may be dead. Raises: HeldError; OSError."""
        fd = self._open()
        try:
            while True:
                locked, owner = self._wait_until_free(fd)
                if self._is_the_file(fd):
                    if self._claim(owner):
                        break
                else:
                    os.close(fd)
                    fd = self._open()  # it was removed, or replaced by another start
            fd = self._write_first(fd, replace=not self._nobody_writes_to(owner, locked))
        except BaseException:
            os.close(fd)
            raise
        finally:
            self._unclaim()
        self._fd, self._seen_at = fd, _now()
        _forget_in_children(self)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def check(self, surely: bool = False) -> None:
        """Before something is written. Costs a look at the clock, unless this process stood still; surely: a read.

        Raises: FolderLostError if another start has taken the folder over.
        """
        if self._fd is None:
            return
        if not self._is_lost and (surely or _now() - self._seen_at > PERIOD_S / 2):
            self._beat_once()
        if self._is_lost:
            raise FolderLostError(str(self.path.parent), str(self._lost_to) if self._lost_to else "its .lock is gone")

    def close(self) -> None:
        """Let go. The file stays, and says that nobody has the folder."""
        if self._fd is None:
            return
        self._stop.set()
        with self._beating:
            if not self._is_lost:
                self._me = dataclasses.replace(self._me, has_left=True)
                self._write(self._fd)
            os.close(self._fd)
            self._fd = None

    # ---- taking ----

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)

    def _is_the_file(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _read(self) -> Owner | None:
        """What the name leads to now, opened anew: that is when a network file system asks its server."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return Owner.from_bytes(os.pread(fd, _BYTES, 0))
        finally:
            os.close(fd)

    def _wait_until_free(self, fd: int) -> tuple[bool | None, Owner | None]:
        """Return (whether the lock is ours, None where there are no locks; the dead or former owner)."""
        begun = unchanged_since = time.monotonic()
        last, changes = None, -1
        while True:
            locked = _try_lock(fd, self.path)
            owner, now = self._read_or_none(), time.monotonic()
            if owner != last:
                last, changes, unchanged_since = owner, changes + 1, now
            if self._is_free(owner, locked) or self._is_dead(owner, locked, now - unchanged_since):
                return locked, owner
            # One change may be the last word of a dead one, which a network file system showed late.
            is_alive = locked is False if _lock_decides(owner, locked) else changes > 1
            if is_alive and now - begun > PATIENCE:
                raise HeldError(owner)
            time.sleep(_LOOK_S if now - begun < PATIENCE else 10 * _LOOK_S)

    def _is_free(self, owner: Owner | None, locked: bool | None) -> bool:
        if locked is False:
            return False
        if owner is None or owner.has_left:
            return True
        return owner.is_of_this_host and (locked is True or not _is_alive(owner.pid))

    def _is_dead(self, owner: Owner | None, locked: bool | None, unchanged_s: float) -> bool:
        """Of an owner whom no lock of ours tells anything about."""
        if _lock_decides(owner, locked):
            return False
        is_of_our_job = not owner.is_of_this_host and bool(set(owner.jobs) & set(self._me.jobs))
        return is_of_our_job or unchanged_s > PERIOD_S

    def _claim(self, owner: Owner | None) -> bool:
        """Be the only one that takes over from this owner, on all hosts. False: look again."""
        claim = self._claim_path
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            self._wait_for_claim(claim)
            return False
        self._has_claimed = True
        if self._read_or_none() == owner:
            return True
        self._unclaim()
        return False

    _has_claimed = False

    @property
    def _claim_path(self) -> Path:
        return self.path.with_name(NAME + ".claim")

    def _wait_for_claim(self, claim: Path) -> None:
        """Another start is taking over, which takes an instant; one that was killed in it leaves its claim."""
        begun = time.monotonic()
        while claim.exists():
            if time.monotonic() - begun > PATIENCE:
                claim.unlink(missing_ok=True)
            time.sleep(_LOOK_S)

    def _unclaim(self) -> None:
        if self._has_claimed:
            self._has_claimed = False
            self._claim_path.unlink(missing_ok=True)

    def _read_or_none(self) -> Owner | None:
        try:
            return self._read()
        except FileNotFoundError:
            return None

    def _nobody_writes_to(self, owner: Owner | None, locked: bool | None) -> bool:
        """Whether the file may be written in place: a former owner elsewhere may wake up with it open."""
        return locked is not False and (owner is None or owner.has_left or owner.is_of_this_host)

    def _write_first(self, fd: int, replace: bool) -> int:
        """Put our name there, in a file of its own if the old one may have a writer. Returns the open file."""
        if not replace:
            self._write(fd)
            return fd
        new = self.path.with_name(f"{NAME}.{self._me.token}")
        new_fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _try_lock(new_fd, new)
            self._write(new_fd)
            os.replace(new, self.path)
        except BaseException:
            os.close(new_fd)
            new.unlink(missing_ok=True)
            raise
        os.close(fd)
        return new_fd

    def _write(self, fd: int) -> None:
        data = self._me.to_bytes()
        if os.fstat(fd).st_size > len(data):
            os.ftruncate(fd, len(data))
        os.pwrite(fd, data, 0)
        try:
            os.fsync(fd)
        except OSError as error:
            logger.debug("%s: not synced (%s)", self.path, error)

    # ---- holding ----

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S) and not self._is_lost:
            self._beat_once()

    def _beat_once(self) -> None:
        """See that our name stands there, and change the beat beside it."""
        with self._beating:
            if self._fd is None or self._is_lost:
                return
            try:
                owner = self._read()
                if owner is None or owner.token != self._me.token:
                    self._is_lost, self._lost_to = True, owner
                    return
                self._me = dataclasses.replace(self._me, beat=self._me.beat + 1)
                self._write(self._fd)
                self._seen_at = _now()
            except FileNotFoundError:
                self._is_lost = True
            except OSError as error:
                logger.warning("%s: the beat of this run cannot be written (%s)", self.path, error)

    def forget(self) -> None:
        """In a forked child: it must not hold the lock, since it may live a little longer than its parent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)  # the parent's lock stays


def _forget_in_children(lease: Lease) -> None:
    reference = weakref.ref(lease)

    def forget() -> None:
        alive = reference()
        if alive is not None:
            alive.forget()

    os.register_at_fork(after_in_child=forget)


def _lock_decides(owner: Owner | None, locked: bool | None) -> bool:
    """Whether the lock alone says if the owner lives: it is on this host, and there are locks."""
    return owner is None or (owner.is_of_this_host and locked is not None)


def _try_lock(fd: int, path: Path) -> bool | None:
    """True: ours. False: another process has it. None: this mount has no locks."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS_HERE:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: the hostname must do
        return ""


def _now() -> float:
    """Seconds that also pass while this machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
