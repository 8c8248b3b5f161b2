"""Damage at random places: noticed by verify and by every load, or it meant nothing [R2]; the run goes back, loudly [R3]."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

import checkpoint_file
import checkpoint_utils
from tests.test_checkpoint_file import assert_same
from tests.test_checkpoint_utils import FakeTrainer, config, save_at


def make_state(num_updates: int, run_id: str = "r") -> dict:
    generator = torch.Generator().manual_seed(num_updates)
    model = {f"layer.{i}.weight": torch.randn(40, 30 + i, generator=generator) for i in range(4)}
    return {
        "format_version": 1,
        "run_id": run_id,
        "model": {**model, "count": torch.tensor(num_updates), "half": torch.randn(77, generator=generator).half()},
        "optimizer_history": [{"num_updates": num_updates}],
        "extra_state": {"train_iterator": {"epoch": 1, "samples_in_epoch": 8 * num_updates}, "words": ["a", 1.5, None]},
    }


def hurt(dice: random.Random, path: Path, other: Path) -> str:
    """Damage the bytes of a file; `other` is a sound one of its kind. Returns what was done."""
    data, kind = bytearray(path.read_bytes()), dice.choice(["bit", "zeros", "noise", "tail", "empty", "other", "shift", "double"])
    at, size = dice.randrange(max(len(data), 1)), dice.choice([1, 16, 300, 5000])
    if kind == "bit":
        data[at] ^= 1 << dice.randrange(8)
    elif kind == "zeros":
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif kind == "noise":
        data[at : at + size] = dice.randbytes(len(data[at : at + size]))
    elif kind == "tail":
        del data[at:]
    elif kind == "empty":
        data.clear()
    elif kind == "other":
        data = bytearray(other.read_bytes())
    elif kind == "shift":
        del data[at : at + size]
    else:
        data[at:at] = data[at : at + size]
    path.unlink()
    path.write_bytes(data)
    return f"{kind} at {at}, {size} bytes, of {path.name}"


def damaged(dice: random.Random, path: Path, other: Path) -> str:
    if path.is_file():
        return hurt(dice, path, other)
    names = sorted(os.listdir(path))
    name = dice.choice(names)
    if dice.random() < 0.1:
        (path / name).unlink()
        return f"{name} removed"
    return hurt(dice, path / name, other / name)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> dict[str, tuple[Path, Path, dict]]:
    """A file and a folder, each with another one of an earlier update, and what is in it."""
    folder = tmp_path_factory.mktemp("sound")
    found = {}
    for form, suffix, write in (
        ("file", ".pt", checkpoint_file.write_checkpoint_file),
        ("folder", "", lambda state, path: checkpoint_file.write_checkpoint_folder(state, path)),
    ):
        paths = [folder / f"checkpoint_1_{u}{suffix}" for u in (20, 10)]
        for path, num_updates in zip(paths, (20, 10)):
            write(make_state(num_updates), str(path))
        found[form] = (*paths, make_state(20))
    return found


def is_noticed_or_nothing(sound: tuple[Path, Path, dict], folder: Path, number: int) -> bool:
    """Damage number `number`: whether it was noticed by verify and the load alike, in words that name the file."""
    original, other, state = sound
    path = folder / original.name
    (shutil.copytree if original.is_dir() else shutil.copy)(original, path)
    what = damaged(random.Random(number), path, other)
    problems = checkpoint_utils.verify_checkpoint(path)
    assert all(str(path) in problem for problem in problems), (number, what, problems)
    try:
        with checkpoint_file.open_local_checkpoint(path) as reader:
            loaded = reader.materialize(reader.skeleton)
    except checkpoint_file.CheckpointError as error:
        assert problems and str(path) in str(error), (number, what, problems, error)
        noticed = True
    else:
        replaced = "other" in what and path.is_file()
        expected = make_state(10) if replaced else state
        assert_same(loaded, expected, f"{number}: {what}")
        noticed = bool(problems)
        assert noticed or not replaced, what
    (shutil.rmtree if original.is_dir() else os.unlink)(path)
    return noticed


@pytest.mark.parametrize("form", ["file", "folder"])
def test_damage_anywhere_is_noticed_or_means_nothing(sound, tmp_path, form):
    noticed = sum(is_noticed_or_nothing(sound[form], tmp_path, number) for number in range(60))
    assert noticed > 45  # what means nothing is rare


@pytest.mark.slow
@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_thousand_damages_are_noticed_or_mean_nothing(sound, tmp_path, form):
    noticed = sum(is_noticed_or_nothing(sound[form], tmp_path, number) for number in range(1000, 2000))
    print(f"{form}: {noticed} of 1000 noticed, the others mean nothing")
    assert noticed > 750


def test_a_changed_tensor_is_named(sound, tmp_path):
    for form in ("file", "folder"):
        original, _, state = sound[form]
        path = tmp_path / original.name
        (shutil.copytree if original.is_dir() else shutil.copy)(original, path)
        target = path if path.is_file() else next(path.glob("*.distcp"))
        data = target.read_bytes()
        needle = state["model"]["layer.2.weight"].numpy().tobytes()[400:416]
        target.write_bytes(data.replace(needle, bytes(16)))
        with pytest.raises(checkpoint_file.CheckpointDamagedError, match=r"layer\.2\.weight"):
            checkpoint_utils.load_checkpoint_to_cpu(path)
        assert "layer.2.weight" in checkpoint_utils.verify_checkpoint(path)[0]


def test_a_run_goes_back_to_the_newest_that_is_sound_and_keeps_what_is_damaged(tmp_path, caplog):
    for number in range(8):
        caplog.clear()
        folder = tmp_path / str(number)
        cfg = config(folder, save_interval_updates=1)
        for update in (9, 10, 11):
            save_at(cfg, update)
        last, dice = folder / "checkpoint_last.pt", random.Random(number)
        for name in ("checkpoint_last.pt", "checkpoint_1_11.pt"):
            what = hurt(dice, folder / name, folder / "checkpoint_1_9.pt")
        broken = last.read_bytes()
        trainer = FakeTrainer(cfg)
        checkpoint_utils.load_checkpoint(cfg, trainer)
        if trainer.num_updates == 9:  # last was replaced by an older one, which is said
            assert "CUT OFF, OR IT WAS REPLACED" in caplog.text
        elif trainer.num_updates == 10:
            assert "DAMAGED CHECKPOINT PASSED OVER" in caplog.text and "GOING BACK TO AN OLDER CHECKPOINT" in caplog.text
            assert (folder / "damaged" / "checkpoint_last.pt").read_bytes() == broken
            assert not last.exists(), what
            save_at(cfg, 12)  # retention and the next start do not see what was kept
            assert (folder / "damaged" / "checkpoint_last.pt").exists()


def test_another_checkpoint_under_a_name_with_numbers_is_not_taken(tmp_path, caplog):
    cfg = config(tmp_path, save_interval_updates=1)
    for update in (9, 10, 11):
        save_at(cfg, update)
    (tmp_path / "checkpoint_last.pt").unlink()
    (tmp_path / "checkpoint_1_11.pt").unlink()
    shutil.copy(tmp_path / "checkpoint_1_9.pt", tmp_path / "checkpoint_1_11.pt")
    assert "another file was put in its place" in checkpoint_utils.verify_checkpoint(tmp_path / "checkpoint_1_11.pt")[0]
    trainer = FakeTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.num_updates == 10 and "is named for update 11, but holds update 9" in caplog.text
    assert (tmp_path / "damaged" / "checkpoint_1_11.pt").exists()
