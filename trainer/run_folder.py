"""The folder of a run: made, held by one live run at a time, and the config that is kept in it.

Owns: `<run_dir>/.hydra/` and how a saved config is found again. Must not know: which
checkpoint a run goes on from (checkpoint_utils decides), Hydra (`.hydra` is where people look for a config).

What holds: of two processes at most one has the folder (trainer/lease.py); `.hydra/config.yaml` is absent or whole at
every instant; a config that was there before is in `.hydra/N/` before it is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import to_plain
from trainer.errors import ConfigError
from trainer.lease import NAME, HeldError, Lease

logger = logging.getLogger(__name__)

KEPT = ("config.yaml", "overrides.yaml")
SEEN_WITHIN_S = 1.0


def prepare(run_dir: str, cfg: DictConfig, is_master: bool, typed: Sequence[str] = ()) -> RunFolder:
    """Make the folder, see that it can be written, and hold it until `close()` or the end of the process.

    Only the master touches the disk. Nothing but the folder and its `.lock` is written; `write_config()` comes later,
    when all that the config asks for has been built.
    Raises: ConfigError where the folder cannot be made or written, or where a live run has it.
    """
    folder = RunFolder(Path(run_dir).expanduser(), cfg, typed)
    if is_master:
        folder.hold()
    return folder


def folder_of_checkpoints(save_dir: Path, run_dir: Path) -> Path | None:
    """The folder to hold besides `run_dir`, so that no other run writes to `save_dir`; None: there is none.

    That is `save_dir`, where it lies outside or another run, whose run_dir lies elsewhere, has held it; and the run folder
    that it lies in, if that is another run's.
    """
    if (save_dir / NAME).exists():
        return save_dir
    if save_dir.resolve().is_relative_to(run_dir.resolve()):
        return None
    return save_dir.parent if (save_dir.parent / NAME).exists() else save_dir


def is_seen(path: Path) -> bool:
    """Whether another machine's new file is there, a moment given to mounts that remember what was absent."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(OSError):
                os.listdir(folder)  # over NFS, asks the server anew
        time.sleep(0.1)
    return True


class RunFolder:
    """A run's folder. On other ranks than the master it does nothing."""

    def __init__(self, path: Path, cfg: DictConfig, typed: Sequence[str] = ()) -> None:
        self.path, self._cfg, self._typed = path, cfg, list(typed)
        self._lease: Lease | None = None
        self._made: list[Path] = []  # the folders that this start made, innermost first
        self._lock_is_new = False

    def hold(self, override: str = "run_dir") -> None:
        """Take the folder, or say who has it. override: the setting that named it."""
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self._lock_is_new = not (self.path / NAME).exists()
            self._take()
        except OSError as error:
            self._remove_empty()
            raise ConfigError(
                f"{override} {str(self.path)!r} cannot be written ({error.strerror}). Choose another with {override}=..."
            ) from error
        except HeldError as error:
            raise ConfigError(
                f"{override} {str(self.path)!r} belongs to a run that is alive ({error}). Choose another: {override}=..."
            ) from error

    def _take(self) -> None:
        lease = Lease(self.path)
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lease.take()
                break
            except FileNotFoundError:  # a start that was refused took the folder with it
                continue
        self._lease = lease

    def check(self, surely: bool = False) -> None:
        """Raise FolderLostError if another start has taken the folder over (`Lease.check`)."""
        if self._lease is not None:
            self._lease.check(surely)

    def discard(self) -> None:
        """This start is refused: take away its lock and the folders that it made, if nobody has put anything in them."""
        if self._lease is not None and self._lock_is_new and os.listdir(self.path) == [NAME]:
            os.unlink(self.path / NAME)
            self._remove_made()
        self.close()

    def _remove_empty(self) -> None:
        """The folder could not be taken: a lock without a word, for want of room, is nobody's."""
        lock = self.path / NAME
        with contextlib.suppress(OSError):
            if self._lock_is_new and lock.stat().st_size == 0:
                lock.unlink()
        self._remove_made()

    def _remove_made(self) -> None:
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                break  # somebody else uses it, or it was never made

    def write_config(self) -> None:
        """Keep this start's config and overrides in `.hydra/`, what was there before in `.hydra/N/`."""
        if self._lease is None:
            return
        kept = self.path / ".hydra"
        texts = {
            "config.yaml": OmegaConf.to_yaml(OmegaConf.create(to_plain(self._cfg))),
            "overrides.yaml": OmegaConf.to_yaml(OmegaConf.create(list(self._typed))),
        }
        is_new = not kept.exists()
        try:
            kept.mkdir(exist_ok=True)
            _keep_earlier(kept)
            for name, text in texts.items():
                _replace(kept / name, text)
        except OSError as error:
            if is_new:
                shutil.rmtree(kept, ignore_errors=True)
            raise ConfigError(
                f"{kept} cannot be written ({error.strerror}). Choose another folder with run_dir=..."
            ) from error

    def close(self) -> None:
        """Let go of the folder. The lock file stays."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None


def _keep_earlier(kept: Path) -> None:
    """Copy what is there into the next free number; a copy, so that `config.yaml` is never absent."""
    if not (kept / "config.yaml").exists():
        return
    numbers = [int(entry.name) for entry in kept.iterdir() if entry.name.isdigit()]
    earlier = kept / str(max(numbers, default=0) + 1)
    earlier.mkdir()
    for name in KEPT:
        if (kept / name).exists():
            shutil.copyfile(kept / name, earlier / name)


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


# The config of a run that was


def saved_config(run_dir: str) -> tuple[dict, str]:
    """(plain config, the file it is from): `.hydra/config.yaml`, or the newest checkpoint that can be read.

    The words of the file are data: no reference is resolved, nothing is imported.
    Raises: ConfigError where the folder is missing or has neither.
    """
    folder = Path(run_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"resume={run_dir}: there is no such folder")
    path = folder / ".hydra" / "config.yaml"
    problem = f"{path} is missing"
    if path.exists():
        try:
            return _read_config(path), str(path)
        except ConfigError as error:
            problem = str(error)
            logger.warning("%s; looking into the checkpoints instead", error)
    found = _config_of_newest(folder / "checkpoints")
    if found is not None:
        return found
    raise ConfigError(f"resume={run_dir}: {problem}, and no checkpoint that can be read is in {folder / 'checkpoints'}")


def _read_config(path: Path) -> dict:
    import yaml

    try:
        loaded = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, DictConfig) or not loaded:
        raise ConfigError(f"{path} holds no config")
    return OmegaConf.to_container(loaded, resolve=False)


def _config_of_newest(folder: Path) -> tuple[dict, str] | None:
    """(cfg, path) of the run's last checkpoint, else of the readable one with the most updates; files and folders."""
    lasts = [path for path in (folder / "checkpoint_last", folder / "checkpoint_last.pt") if path.exists()]
    folders = [path.parent for path in folder.glob("*/.metadata")]
    others = [path for path in sorted([*folder.glob("*.pt"), *folders]) if path not in lasts]
    for paths in (lasts, others):
        found = [(*read, str(path)) for path in paths if (read := _config_in(path)) is not None]
        if found:
            return max(found, key=lambda each: each[0])[1:]
    return None


def _config_in(checkpoint: Path) -> tuple[int, dict] | None:
    """(num_updates, cfg) of a checkpoint, its tensors left on the disk; None where it cannot be read."""
    from checkpoint_file import CheckpointError, open_checkpoint

    try:
        with open_checkpoint(str(checkpoint)) as reader:
            cfg, history = reader.skeleton.get("cfg"), reader.skeleton.get("optimizer_history")
    except (OSError, CheckpointError) as error:
        logger.warning("%s cannot be read: %s", checkpoint, str(error).splitlines()[0])
        return None
    if not isinstance(cfg, dict):
        return None
    return (history[-1]["num_updates"] if history else 0), cfg
