"""Saves that fail: the disk is full, read-only, limited or broken for a while, or for good.

For a while: training goes on, what was there stays as it was, and the run ends as the one that met nothing. For good: it
ends with status 1 after `checkpoint.max_failed_saves`, on all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk import seen
from tests.dist.harness import run_ranks_to_any_end
from tests.resume.harness import run_to_status
from tests.resume.killing import LAYOUTS, Arrangement, differences

FIRST, LAST, MAX_UPDATE = 8, 9, 12  # the saves of these updates fail
WORDS = {
    "full": "No space left on device",
    "read-only": "Read-only file system",
    "limit": "File too large",
    "quota": "Disk quota exceeded",
    "write error": "Input/output error",
    "fsync error": "Input/output error",
    "rename error": "Input/output error",
}
INJECTED = {
    "quota": (("write",), errno.EDQUOT),
    "write error": (("write",), errno.EIO),
    "fsync error": (("fsync",), errno.EIO),
    "rename error": (("rename",), errno.EIO),
}
QUICK = [
    ("full", Arrangement("one process")),
    ("read-only", Arrangement("data parallel", folder=True)),
    ("fsync error", Arrangement("zero", asynchronous=True)),
]
FORMS = ((False, False), (True, False), (False, True), (True, True))  # folder, asynchronous
ALL = [  # each trouble in each layout, the forms taking turns
    (trouble, Arrangement(layout, *FORMS[(i + j) % 4])) for i, trouble in enumerate(WORDS) for j, layout in enumerate(LAYOUTS)
]


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """A file system of two megabytes at `folder`, on which this process may do as it likes."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "fairtrain-test", str(folder)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Trouble:
    """What is wrong with the disk from `begin` to `end`; each rank has one."""

    def __init__(self, kind: str, save_dir: Path, is_master: bool) -> None:
        self.kind, self.save_dir, self.is_master, self.active = kind, save_dir, is_master, False

    def begin(self) -> None:
        self.active = True
        if self.is_master:
            self.before = self.content()
        if self.kind == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        elif self.kind == "full" and self.is_master:
            with contextlib.suppress(OSError), open(self.save_dir / "of somebody else", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        elif self.kind == "read-only" and self.is_master:
            subprocess.run(["mount", "-o", "remount,ro", str(self.save_dir)], check=True)

    def end(self) -> None:
        self.active = False
        if self.kind == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        elif self.kind == "read-only" and self.is_master:
            subprocess.run(["mount", "-o", "remount,rw", str(self.save_dir)], check=True)
        elif self.kind == "full" and self.is_master:
            (self.save_dir / "of somebody else").unlink()
        if self.is_master:
            after = self.content()
            assert {name: after.get(name) for name in self.before} == self.before, "what was there has changed"
            litter = [name for name in set(after) - set(self.before) if "/." in f"/{name}"]
            assert not litter, litter

    def content(self) -> dict[str, str]:
        """Digests of all files, hidden ones too, by their paths; links by what they name."""
        found = {}
        for path in sorted(self.save_dir.rglob("*")):
            if path.is_symlink():
                found[str(path.relative_to(self.save_dir))] = os.readlink(path)
            elif path.is_file():
                found[str(path.relative_to(self.save_dir))] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def around(self, call, do):
        kinds, code = INJECTED.get(self.kind, ((), 0))
        if self.active and call.kind in kinds:
            raise OSError(code, os.strerror(code))
        return do()


def troubled_session(cfg: dict, kind: str, ends: bool) -> int:
    """A session whose disk fails just before update FIRST and, if it `ends`, is well again after update LAST."""
    import distributed_utils
    from tests.resume.task import Toy
    from trainer.config import complete_config
    from trainer.train import main

    save_dir = Path(cfg["checkpoint"]["save_dir"])
    trouble = Trouble(kind, save_dir, distributed_utils.is_master())
    original = Toy.train_step

    def train_step(self, samples):
        if self.get_num_updates() + 1 in (FIRST, LAST + 1):
            self.saves.flush()  # the save before, or the one that has failed, is over
            distributed_utils.barrier()
        if self.get_num_updates() + 1 == FIRST:
            trouble.begin()
            distributed_utils.barrier()
        if self.get_num_updates() == LAST and ends:
            trouble.end()
            distributed_utils.barrier()
        return original(self, samples)

    Toy.train_step = train_step
    with seen(save_dir, trouble.around):
        return main(complete_config(cfg))


def run(tmp_path: Path, kind: str, arrangement: Arrangement, ends: bool, max_failed_saves: int) -> list:
    cfg = arrangement.config(tmp_path, MAX_UPDATE)
    cfg["checkpoint"]["max_failed_saves"] = max_failed_saves
    return run_ranks_to_any_end(troubled_session, arrangement.world_size, cfg, kind, ends, timeout=120)


def undisturbed(cache: dict, arrangement: Arrangement, tmp_path_factory) -> Path:
    if arrangement not in cache:
        run_dir = tmp_path_factory.mktemp("through")
        run_to_status(arrangement.config(run_dir, MAX_UPDATE), 0, arrangement.world_size)
        cache[arrangement] = run_dir
    return cache[arrangement]


@pytest.fixture(scope="module")
def cache() -> dict:
    return {}


def passes_without_a_trace(tmp_path, tmp_path_factory, cache, kind, arrangement) -> None:
    with mounted(tmp_path / "checkpoints"):
        outcomes = run(tmp_path, kind, arrangement, True, max_failed_saves=4)
        assert [outcome.value for outcome in outcomes] == [0] * arrangement.world_size, outcomes
        told = (tmp_path / "train.log").read_text()
        for update in (FIRST, LAST):
            assert f"the save of update {update} FAILED" in told, told
        assert WORDS[kind] in told and str(tmp_path / "checkpoints") in told
        assert differences(undisturbed(cache, arrangement, tmp_path_factory), tmp_path) == []


@pytest.mark.parametrize("kind, arrangement", QUICK, ids=str)
def test_a_disk_that_fails_for_a_while_changes_nothing(
    tmp_path, tmp_path_factory, cache, kind, arrangement
):  # [P5] [N6]
    passes_without_a_trace(tmp_path, tmp_path_factory, cache, kind, arrangement)


@pytest.mark.slow
@pytest.mark.parametrize("kind, arrangement", ALL, ids=str)
def test_every_trouble_in_every_arrangement(tmp_path, tmp_path_factory, cache, kind, arrangement):  # [P5] [N6]
    passes_without_a_trace(tmp_path, tmp_path_factory, cache, kind, arrangement)


@pytest.mark.parametrize("arrangement", [Arrangement("data parallel", folder=True)], ids=str)
def test_a_disk_that_stays_full_ends_the_run_on_all_ranks(tmp_path, arrangement):  # [P5]
    with mounted(tmp_path / "checkpoints"):
        outcomes = run(tmp_path, "full", arrangement, False, max_failed_saves=2)
        for outcome in outcomes:
            assert "CheckpointWriteError" in outcome.error and WORDS["full"] in outcome.error, outcome
        told = (tmp_path / "train.log").read_text()
        assert f"the save of update {FIRST} FAILED" in told and "this was number 1" in told
        (tmp_path / "checkpoints" / "of somebody else").unlink()
        run_to_status(arrangement.config(tmp_path, MAX_UPDATE), 0, arrangement.world_size)  # room was made
