"""Properties of checkpoints that are folders, on one process. Numbers in brackets are the invariants of docs/checkpoint.md."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint_file
import checkpoint_utils
from checkpoint_file import CheckpointDamagedError
from checkpoint_utils import CheckpointName
from tests import test_checkpoint_utils as files
from tests.test_checkpoint_utils import FakeTrainer, config, save_at


class FolderTrainer(FakeTrainer):
    use_sharded_state = True

    @staticmethod
    def publish(state, filename, group) -> int:
        in_its_form = checkpoint_utils.publish_checkpoint_folder
        return (checkpoint_utils.publish_checkpoint if str(filename).endswith(".pt") else in_its_form)(state, filename, group)


def save_folder_at(cfg, num_updates: int, val_loss=None, trainer=None, **options):
    return save_at(cfg, num_updates, val_loss, trainer=trainer or FolderTrainer(cfg), **options)


def saved_update(path) -> int:
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    assert set(state["model"]["weight"].tolist()) == {float(state["optimizer_history"][-1]["num_updates"])}
    return state["optimizer_history"][-1]["num_updates"]


def content(folder) -> dict[str, int]:
    """The update of each checkpoint by its name."""
    return {name: saved_update(folder / name) for name in os.listdir(folder) if CheckpointName.parse(name)}


def hidden(folder) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


def part(folder: Path) -> Path:
    return folder / "__0_0.distcp"


def flip(path: Path) -> None:
    """Change one byte of a tensor."""
    raw = bytearray(path.read_bytes())
    at = raw.index(torch.full((8,), float(saved_update(path.parent))).numpy().tobytes())
    raw[at + 5] ^= 4
    path.unlink()  # what is linked to it is not to change
    path.write_bytes(raw)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "checkpoints"


def test_a_file_of_a_folder_given_for_the_folder_is_refused_by_its_name(folder):
    save_folder_at(config(folder), 10)
    whole = folder / "checkpoint_last"
    for name in os.listdir(whole):
        with pytest.raises(checkpoint_file.NotACheckpointError) as caught:
            checkpoint_file.open_local_checkpoint(whole / name, own_format=False)
        assert str(caught.value).startswith(f"{whole / name}: is a part of the checkpoint folder {whole}: name the folder")


# ---- names, links and retention


def test_a_save_is_one_folder_with_relative_links_beside_it(folder):  # [D4] [P4]
    saved = save_folder_at(config(folder, save_interval_updates=10), 10, 0.5)
    assert sorted(os.listdir(folder)) == ["checkpoint_1_10", "checkpoint_best", "checkpoint_last"]
    assert os.readlink(folder / "checkpoint_last") == os.readlink(folder / "checkpoint_best") == "checkpoint_1_10"
    assert not os.path.islink(folder / "checkpoint_1_10")
    assert content(folder) == {"checkpoint_1_10": 10, "checkpoint_best": 10, "checkpoint_last": 10}
    assert saved.paths[-1] == str(folder / "checkpoint_last")
    assert saved.bytes == sum(path.stat().st_size for path in (folder / "checkpoint_1_10").iterdir())


def test_what_only_links_name_is_hidden_and_goes_with_its_link(folder):  # [D4]
    cfg = config(folder)
    trainer = FolderTrainer(cfg)
    for update, score in ((1, 0.5), (2, None), (2, None), (3, 0.6)):
        save_folder_at(cfg, update, score, trainer=trainer)
    assert content(folder) == {"checkpoint_best": 1, "checkpoint_last": 3}
    assert sorted(hidden(folder)) == [".checkpoint_1_1", ".checkpoint_1_3"]


def test_further_names_are_folders_of_the_same_bytes(folder):  # [P4]
    cfg = config(folder, save_interval_updates=5, keep_best_checkpoints=2)
    save_folder_at(cfg, 5, 0.25, samples=10)
    names = ["checkpoint.best_loss_0.25", "checkpoint1", "checkpoint_1_5", "checkpoint_best", "checkpoint_last"]
    assert sorted(os.listdir(folder)) == names
    inodes = {os.stat(part(folder / name)).st_ino for name in names}
    assert len(inodes) == 1


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([None, 0.1, 0.2, 0.3]), st.booleans()), min_size=1, max_size=5
    ),
    st.fixed_dictionaries(
        {
            "save_interval_updates": st.integers(0, 2),
            "keep_interval_updates": st.integers(-1, 2),
            "keep_last_epochs": st.integers(-1, 1),
            "keep_best_checkpoints": st.integers(-1, 2),
            "no_last_checkpoints": st.booleans(),
        }
    ),
)
def test_the_names_that_stay_are_those_of_files(tmp_path_factory, steps, values):  # [N4] [N5] [D4]
    folders = {form: tmp_path_factory.mktemp("run") for form in (FakeTrainer, FolderTrainer)}
    found = {}
    for form, folder in folders.items():
        cfg = config(folder, **values)
        trainer, num_updates = form(cfg), 0
        for step, score, end in steps:
            num_updates += step
            save_at(cfg, num_updates, score, trainer=trainer, samples=10 if end else 3)
        load = files.saved_update if form is FakeTrainer else saved_update
        found[form] = {
            name.removesuffix(".pt"): load(folder / name) for name in os.listdir(folder) if CheckpointName.parse(name)
        }
        assert all(name in map(os.readlink, links(folder)) for name in hidden(folder))
    assert found[FolderTrainer] == found[FakeTrainer]


def links(folder) -> list[Path]:
    return [path for path in Path(folder).iterdir() if path.is_symlink()]


def test_without_hard_links_a_folder_that_a_link_names_is_kept(folder, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    cfg = config(folder, save_interval_updates=1, keep_interval_updates=1)
    trainer = FolderTrainer(cfg)
    save_folder_at(cfg, 1, 0.1, trainer=trainer)
    save_folder_at(cfg, 2, 0.2, trainer=trainer)
    assert content(folder) == {"checkpoint_1_2": 2, "checkpoint_last": 2, "checkpoint_best": 1}


# ---- temporary folders


def test_a_folder_that_a_living_process_writes_stays(folder):  # [P6]
    stale, live = folder / ".checkpoint_last.123.tmp", folder / ".checkpoint_1_10.124.tmp"
    others = [folder / "notes", folder / ".model.12.tmp", folder / "checkpoint.1.tmp", folder / ".checkpoint_x_1"]
    for path in (stale, live, *others):
        path.mkdir(parents=True)
    fd = os.open(live, os.O_RDONLY)
    assert checkpoint_utils.file_system.lock(fd)
    assert checkpoint_utils.load_checkpoint(config(folder), FolderTrainer(config(folder)))[0] is None
    os.close(fd)
    assert live.exists() and not stale.exists() and all(path.exists() for path in others)


# ---- going on


def test_the_same_command_goes_on_where_the_run_stood(folder):
    cfg = config(folder)
    save_folder_at(cfg, 7)
    trainer = FolderTrainer(cfg)
    extra_state, itr = checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.num_updates == 7 and itr.samples_in_epoch == 3
    assert trainer.calls[0][0] == str(folder / "checkpoint_last")


@pytest.mark.parametrize("forms", [(FakeTrainer, FolderTrainer), (FolderTrainer, FakeTrainer)])
def test_a_run_may_change_between_files_and_folders(folder, forms):  # [D5]
    cfg = config(folder, save_interval_updates=1, keep_interval_updates=2)
    for update, form in enumerate((*forms, *forms), 1):
        trainer = form(cfg)
        checkpoint_utils.load_checkpoint(cfg, trainer)
        assert trainer.num_updates == update - 1
        save_at(cfg, update, trainer=trainer)
    ending = "" if forms[1] is FolderTrainer else ".pt"
    other = "" if ending else ".pt"
    assert content(folder) == {f"checkpoint_1_3{other}": 3, f"checkpoint_1_4{ending}": 4, f"checkpoint_last{ending}": 4}


def test_of_two_lasts_the_one_with_more_updates_counts(folder):  # [D5]
    cfg = config(folder)
    for form, update, run in ((FolderTrainer, 9, "a"), (FakeTrainer, 10, "b")):  # two runs: neither removes the other's
        save_at(cfg, update, trainer=form(cfg, run))
    assert set(content(folder)) == {"checkpoint_last", "checkpoint_last.pt"}
    trainer = FolderTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.num_updates == 10


@pytest.mark.parametrize("damage", ["flip", "part", "metadata", "record", "dangling"])
def test_a_damaged_last_gives_way_to_the_newest_that_is_sound_and_is_kept_aside(folder, caplog, damage):  # [R3]
    cfg = config(folder, save_interval_updates=10)
    trainer = FolderTrainer(cfg)
    save_folder_at(cfg, 10, trainer=trainer)
    save_folder_at(cfg, 15, trainer=trainer)
    last = folder / os.readlink(folder / "checkpoint_last")
    if damage == "flip":
        flip(part(last))
    elif damage == "dangling":
        shutil.rmtree(last)
    else:
        os.unlink({"part": part(last), "metadata": last / ".metadata", "record": last / "fairtrain.pt"}[damage])
    again = FolderTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, again)
    assert again.num_updates == 10 and "DAMAGED CHECKPOINT PASSED OVER" in caplog.text
    kept = {"checkpoint_1_10", "damaged"}
    assert set(os.listdir(folder)) == kept


def test_damage_to_a_named_folder_is_kept_aside_with_its_link(folder):  # [R3]
    cfg = config(folder, save_interval_updates=10)
    trainer = FolderTrainer(cfg)
    save_folder_at(cfg, 10, trainer=trainer)
    save_folder_at(cfg, 20, trainer=trainer)
    flip(part(folder / "checkpoint_1_20"))
    again = FolderTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, again)
    assert again.num_updates == 10
    assert set(os.listdir(folder)) == {"checkpoint_1_10", "damaged"}


def test_a_new_restore_file_wins_once_and_what_lies_beyond_is_abandoned(tmp_path, folder):  # [R7]
    cfg = config(folder, save_interval_updates=10)
    trainer = FolderTrainer(cfg)
    for update, score in ((10, 0.5), (15, 0.4)):
        save_folder_at(cfg, update, score, trainer=trainer)
    elsewhere = tmp_path / "elsewhere"
    FolderTrainer(config(elsewhere), "other").train_to(12).save_checkpoint(elsewhere, {"train_iterator": None})
    wish = config(folder, save_interval_updates=10, restore_file=str(elsewhere))
    again = FolderTrainer(wish)
    checkpoint_utils.load_checkpoint(wish, again)
    assert again.num_updates == 12
    assert set(os.listdir(folder)) == {"checkpoint_1_10", "abandoned"}
    assert {name: saved_update(folder / "abandoned" / name) for name in os.listdir(folder / "abandoned")} in (
        {"checkpoint_last": 15},
        {"checkpoint_best": 15},
    )
    save_folder_at(wish, 13, trainer=again)
    third = FolderTrainer(wish)
    checkpoint_utils.load_checkpoint(wish, third)
    assert third.num_updates == 13


def test_a_folder_of_another_program_is_taken_where_it_was_asked_for(tmp_path, folder):  # [R6]
    import torch.distributed.checkpoint as dcp

    plain = tmp_path / "plain"
    dcp.save({"model": {"weight": torch.full((8,), 3.0)}, "optimizer": {"lr": 0.1}}, checkpoint_id=plain, no_dist=True)
    with pytest.raises(checkpoint_file.NotACheckpointError, match="model, optimizer.*restore_file.*finetune_from_model"):
        checkpoint_file.open_checkpoint(plain)
    for wish, load in (("restore_file", "load_checkpoint"), ("finetune_from_model", "load_model")):
        cfg = config(folder, **{wish: str(plain)})
        trainer, taken = FolderTrainer(cfg), []
        setattr(trainer, load, lambda path, taken=taken, **_: taken.append(path) or {})
        checkpoint_utils.load_checkpoint(cfg, trainer)
        assert taken == [str(plain)]


def test_a_plain_folder_without_checkpoint_says_so(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(checkpoint_file.NotACheckpointError, match="is a folder, but no checkpoint"):
        checkpoint_file.open_checkpoint(tmp_path / "photos")
    (tmp_path / "photos" / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointDamagedError, match="did not come to its end"):
        checkpoint_file.open_checkpoint(tmp_path / "photos")


def test_descriptors_and_hidden_folders_stay_level(folder):
    cfg = config(folder, save_interval_updates=2, keep_interval_updates=2)
    trainer, counts = FolderTrainer(cfg), []
    for update in range(1, 9):
        save_folder_at(cfg, update, trainer=trainer)
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(hidden(folder)) <= 1))
    assert len(set(counts[2:])) == 1
