"""A checkpoint, file or folder, that appears under its names whole and durable, or not at all: each save is cut off at
every call that it makes of the system, one after another. Numbers in brackets are the invariants of docs/checkpoint.md.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import checkpoint_utils
from checkpoint_file import CheckpointWriteError
from checkpoint_utils import CheckpointName
from tests.test_checkpoint_folders import FolderTrainer, hidden, links, saved_update
from tests.test_checkpoint_utils import FakeTrainer, config, save_at

FILE_LAYER = ("open", "pwrite", "fsync", "replace", "rename", "link", "symlink", "unlink", "rmdir", "mkdir", "makedirs")
ASKS_FOR_ROOM = ("open", "pwrite", "fsync", "replace", "rename", "link", "mkdir", "makedirs")


@dataclass(frozen=True)
class Form:
    trainer: type[FakeTrainer]
    ending: str
    publish: str

    def save(self, cfg, num_updates: int, val_loss: float | None = None, trainer: FakeTrainer | None = None):
        return save_at(cfg, num_updates, val_loss, trainer=trainer or self.trainer(cfg))


FORMS = {
    "file": Form(FakeTrainer, ".pt", "publish_checkpoint"),
    "folder": Form(FolderTrainer, "", "publish_checkpoint_folder"),
}


@pytest.fixture(params=FORMS)
def form(request) -> Form:
    return FORMS[request.param]


def content(folder: Path) -> dict[str, int]:
    """The update of each checkpoint by its name without the ending; every name is a whole checkpoint."""
    names = [name for name in os.listdir(folder) if CheckpointName.parse(name)]
    return {name.removesuffix(".pt"): saved_update(folder / name) for name in names}


def litter(folder: Path) -> list[str]:
    linked = [os.readlink(link) for link in links(folder)]
    return [name for name in hidden(folder) if name not in linked]


class PowerCut(BaseException):
    pass


def cut_at(patch: pytest.MonkeyPatch, error_at: Callable[[int, str], BaseException | None]) -> dict[str, int]:
    """Have calls of the file layer fail; `error_at` is given the number and the name of each."""
    count = {"calls": 0}

    def wrap(name: str) -> None:
        original = getattr(os, name)

        def call(*args, **kwargs):
            count["calls"] += 1
            error = error_at(count["calls"], name)
            if error is not None:
                raise error
            return original(*args, **kwargs)

        patch.setattr(os, name, call)

    for name in FILE_LAYER:
        wrap(name)
    return count


def power_cuts(tmp_path: Path, prepare: Callable, act: Callable) -> Iterator[tuple[Path, bool]]:
    """For each moment of `act`, after `prepare`: the folder in which it was cut off there, and whether it had ended."""
    for moment in itertools.count(1):
        folder = tmp_path / str(moment)
        prepared = prepare(folder)
        with pytest.MonkeyPatch.context() as patch:
            cut_at(patch, lambda call, name: PowerCut() if call >= moment else None)
            try:
                act(prepared)
                finished = True
            except PowerCut:
                finished = False
        yield folder, finished
        shutil.rmtree(folder)
        if finished:
            assert moment > 10
            return


def test_a_save_killed_anywhere_leaves_the_one_before_loadable(tmp_path, form):  # [P1] [P2] [P3]
    values = {"save_interval_updates": 10, "keep_interval_updates": 1, "keep_best_checkpoints": 1}

    def saved_once(folder: Path):
        cfg = config(folder, **values)
        form.save(cfg, 10, 0.5)
        trainer = form.trainer(cfg)
        assert checkpoint_utils.load_checkpoint(cfg, trainer)[0] is not None
        return cfg, trainer

    for folder, finished in power_cuts(tmp_path, saved_once, lambda run: form.save(run[0], 20, 0.4, trainer=run[1])):
        found = content(folder)
        assert found["checkpoint_last"] in (10, 20)
        assert finished <= (found["checkpoint_last"] == 20)
        if found["checkpoint_last"] == 20:  # it counts last: the other names are there
            assert found["checkpoint_1_20"] == found["checkpoint_best"] == found["checkpoint.best_loss_0.4"] == 20
        cfg = config(folder, **values)
        again = form.trainer(cfg)
        assert checkpoint_utils.load_checkpoint(cfg, again)[0] is not None
        assert again.weight.unique().tolist() == [found["checkpoint_last"]]
        assert litter(folder) == []


def test_the_same_update_saved_again_never_takes_the_last_away(tmp_path, form):  # [P1] [P2]
    def saved_once(folder: Path):
        cfg = config(folder, save_interval_updates=10)
        form.save(cfg, 10)
        return cfg

    for folder, _ in power_cuts(tmp_path, saved_once, lambda cfg: form.save(cfg, 10)):
        cfg = config(folder, save_interval_updates=10)
        trainer = form.trainer(cfg)
        assert checkpoint_utils.load_checkpoint(cfg, trainer)[0] is not None and trainer.num_updates == 10
        assert content(folder) == {"checkpoint_1_10": 10, "checkpoint_last": 10}
        assert litter(folder) == []


def test_a_failed_save_is_an_error_that_deletes_nothing_and_leaves_no_litter(tmp_path, form):  # [P5] [N6]
    failures = 0
    for moment in itertools.count(1):
        folder = tmp_path / str(moment)
        cfg = config(folder, save_interval_updates=10, keep_interval_updates=1)
        form.save(cfg, 10, 0.5)
        before = content(folder)

        def no_room(call: int, name: str, moment: int = moment) -> OSError | None:
            return OSError(28, "No space left on device") if call == moment and name in ASKS_FOR_ROOM else None

        with pytest.MonkeyPatch.context() as patch:
            count = cut_at(patch, no_room)
            try:
                form.save(cfg, 20)
            except CheckpointWriteError as error:
                failures += 1
                assert "No space left" in str(error) and str(folder) in str(error) and "Make room" in str(error)
                assert error.exit_status == 1
                after = content(folder)
                assert set(before) <= set(after) and after["checkpoint_1_10"] == 10
                assert not [name for name in os.listdir(folder) if name.endswith((".tmp", ".old"))]
        shutil.rmtree(folder)
        if moment > count["calls"]:
            break
    assert failures >= 8


KILLED = """
import sys, torch
sys.path.insert(0, {root!r})
import checkpoint_utils
state = {{"format_version": 1, "run_id": "r", "model": {{"w": torch.full((200_000,), 1.0)}}, "optimizer_history": [{{"num_updates": 1}}]}}
print("ready", flush=True)
for update in range(1, 10_000):
    state["model"]["w"].fill_(update)
    state["optimizer_history"][-1]["num_updates"] = update
    checkpoint_utils.{publish}(state, {path!r})
"""


def test_sigkill_during_saves_never_leaves_a_broken_checkpoint(tmp_path, form):  # [P1]
    path = str(tmp_path / f"checkpoint_last{form.ending}")
    root = str(Path(checkpoint_utils.__file__).parent.parent)
    for delay in (0.011, 0.023):
        code = KILLED.format(root=root, path=path, publish=form.publish)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(delay)
        process.kill()
        process.wait()
        process.stdout.close()
        checkpoint_utils.remove_stale_temporaries(str(tmp_path))
        assert checkpoint_utils.verify_checkpoint(path) == []
        state = checkpoint_utils.load_checkpoint_to_cpu(path)
        assert state["model"]["w"].unique().tolist() == [state["optimizer_history"][-1]["num_updates"]]
    assert os.listdir(tmp_path) == [os.path.basename(path)]


def test_who_was_taken_over_while_he_saved_cannot_end_the_save(tmp_path, form, monkeypatch):
    cfg, fsync = config(tmp_path), os.fsync

    def taken_over(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        checkpoint_utils.remove_stale_temporaries(str(tmp_path), is_written=lambda path: False)
        form.save(cfg, 30)
        fsync(fd)

    form.save(cfg, 10)
    monkeypatch.setattr(os, "fsync", taken_over)
    with pytest.raises(CheckpointWriteError):
        form.save(cfg, 20)
    assert set(content(tmp_path).values()) <= {10, 30} and content(tmp_path)["checkpoint_last"] == 30
    assert litter(tmp_path) == []
