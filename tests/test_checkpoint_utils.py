"""Properties of the checkpoints of a run. Numbers in brackets are the invariants of docs/checkpoint.md."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint_file
import checkpoint_utils
from checkpoint_file import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from checkpoint_utils import (
    BestScore,
    CheckpointConfig,
    CheckpointName,
    CheckpointWishError,
    Choice,
    FileFacts,
    NoUsableCheckpointError,
    checkpoint_names,
    choose,
    resets_to_apply,
    stale_checkpoints,
)
from checkpoint_utils.loading import say


class FakeIterator:
    def __init__(self, epoch: int = 1, per_epoch: int = 10) -> None:
        self.epoch, self.samples_in_epoch, self.per_epoch = epoch, 0, per_epoch

    def end_of_epoch(self) -> bool:
        return self.samples_in_epoch >= self.per_epoch

    def finish_epoch(self) -> None:
        self.epoch, self.samples_in_epoch = self.epoch + 1, 0

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.samples_in_epoch = state["epoch"], state["samples_in_epoch"]


class FakeTrainer:
    """The public methods of a Trainer that checkpoints need; its model is one tensor that tells the update."""

    data_parallel_process_group = None

    def __init__(self, cfg, run_id: str = "run") -> None:
        self.checkpoint_cfg, self.run_id = cfg, run_id
        self.best = BestScore(cfg.maximize_best_checkpoint_metric)
        self.weight = torch.zeros(8)
        self.num_updates = 0
        self.calls: list = []

    def get_num_updates(self) -> int:
        return self.num_updates

    def get_train_iterator(self, epoch: int) -> FakeIterator:
        return FakeIterator(epoch)

    def train_to(self, num_updates: int) -> "FakeTrainer":
        self.num_updates = num_updates
        self.weight.fill_(num_updates)
        return self

    def save_checkpoint(self, filename, extra_state) -> int:
        state = {
            "format_version": 1,
            "run_id": self.run_id,
            "cfg": {"checkpoint": dict(vars(self.checkpoint_cfg))},
            "model": {"weight": self.weight},
            "optimizer_history": [{"num_updates": self.num_updates}],
            "extra_state": {**extra_state, "patience": self.best.state_dict()},
        }
        return self.publish(state, filename, self.data_parallel_process_group)

    publish = staticmethod(checkpoint_utils.publish_checkpoint)

    def load_checkpoint(self, filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters) -> dict:
        self.calls.append((filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters))
        with checkpoint_file.open_checkpoint(filename, self.data_parallel_process_group, False) as reader:
            reader.copy([(reader.skeleton["model"]["weight"], self.weight)])
            self.num_updates = reader.skeleton["optimizer_history"][-1]["num_updates"]
            self.run_id = reader.skeleton["run_id"]
            extra_state = reader.materialize(reader.skeleton["extra_state"])
        if not reset_meters:
            self.best.load_state_dict(extra_state["patience"])
        return extra_state

    def load_model(self, filename) -> None:
        with checkpoint_file.open_checkpoint(filename) as reader:
            reader.copy([(reader.skeleton["model"]["weight"], self.weight)])


def config(folder, **values):
    cfg = types.SimpleNamespace(**{**vars(CheckpointConfig()), "save_dir": str(folder), **values})
    return cfg


def save_at(cfg, num_updates: int, val_loss=None, epoch=1, samples=3, trainer=None, **options):
    trainer = (trainer or FakeTrainer(cfg)).train_to(num_updates)
    itr = FakeIterator(epoch)
    itr.samples_in_epoch = samples
    return checkpoint_utils.save_checkpoint(cfg, trainer, itr, val_loss, **options)


def saved_update(path) -> int:
    state = torch.load(path, weights_only=True)
    assert set(state["model"]["weight"].tolist()) == {float(state["optimizer_history"][-1]["num_updates"])}
    return state["optimizer_history"][-1]["num_updates"]


def folder_content(folder) -> dict[str, int]:
    return {name: saved_update(os.path.join(folder, name)) for name in sorted(os.listdir(folder)) if name.endswith(".pt")}


def flip(path) -> None:
    """Change one bit of a tensor, in a copy of its own."""
    raw = bytearray(Path(path).read_bytes())
    raw[raw.index(b"data/0") + 70] ^= 1
    os.unlink(path)
    Path(path).write_bytes(raw)
    assert checkpoint_utils.verify_checkpoint(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "checkpoints"


# ---- names

names = st.one_of(
    st.sampled_from([CheckpointName("last"), CheckpointName("best")]),
    st.builds(lambda e: CheckpointName("epoch", epoch=e), st.integers(1, 10**6)),
    st.builds(lambda e, u: CheckpointName("update", epoch=e, num_updates=u), st.integers(1, 999), st.integers(1, 10**9)),
    st.builds(
        CheckpointName.ranked, st.text(min_size=1, max_size=8), st.floats(allow_nan=False, allow_infinity=False)
    ),
)


@settings(deadline=None)
@given(names)
def test_every_name_is_read_as_it_was_written(name):
    assert CheckpointName.parse(str(name)) == name
    assert checkpoint_utils.names.is_temporary_name(checkpoint_utils.names.temporary_name(str(name)))


@settings(deadline=None)
@given(st.text(max_size=30))
def test_no_other_text_is_a_name(text):
    parsed = CheckpointName.parse(text)
    assert parsed is None or str(parsed) == text
    for odd in ("checkpoint01.pt", "checkpoint_1_2_3.pt", "my_checkpoint_last.pt", "checkpoint_last.pt.damaged", "model.pt"):
        assert CheckpointName.parse(odd) is None


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_different_scores_have_different_names(a, b):
    assert (str(CheckpointName.ranked("loss", a)) == str(CheckpointName.ranked("loss", b))) == (a == b)


@settings(max_examples=30, deadline=None)
@given(names)
def test_no_name_needs_quotes_in_an_override(name):
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    override = parser.parse_override(f"checkpoint.restore_file=runs/a/checkpoints/{name}")
    assert override.value() == f"runs/a/checkpoints/{name}"


# ---- best score


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(), st.integers(0, 3).map(float))), st.booleans())
def test_the_best_score_is_that_of_a_plain_loop(scores, maximize):
    best = BestScore(maximize)
    expected, at, waits = None, None, 0
    for update, score in enumerate(scores, 1):
        is_score = score is not None and score == score and abs(score) != float("inf")
        improved = is_score and (expected is None or (score > expected if maximize else score < expected))
        if improved:
            expected, at, waits = score, update, 0
        elif is_score:
            waits += 1
        for _ in range(2):  # told twice, counted once
            assert best.update(score, update) == improved
        again = BestScore(maximize)
        again.load_state_dict(best.state_dict())
        assert vars(again) == vars(best)
        assert (best.best, best.best_num_updates, best.runs_without_improvement) == (expected, at, waits)
        assert best.out_of_patience(2) == (waits >= 2) and not best.out_of_patience(-1) and not best.out_of_patience(0)


# ---- which names a save has


def test_each_multiple_of_the_interval_has_its_file_also_at_an_epochs_end():  # [N1]
    cfg = config("x", save_interval_updates=5)
    assert checkpoint_names(cfg, 1, 10, False) == ["checkpoint_1_10.pt", "checkpoint_last.pt"]
    assert checkpoint_names(cfg, 1, 10, True) == ["checkpoint_1_10.pt", "checkpoint1.pt", "checkpoint_last.pt"]
    assert checkpoint_names(cfg, 1, 10, True, stopping=True)[0] == "checkpoint_1_10.pt"
    assert checkpoint_names(cfg, 1, 11, False, stopping=True) == ["checkpoint_last.pt"]
    assert checkpoint_names(cfg, 1, 0, False, stopping=True) == ["checkpoint_last.pt"]


def test_the_flags_that_leave_names_out():
    for values, expected in [
        ({"no_save": True}, []),
        ({"no_epoch_checkpoints": True}, ["checkpoint_best.pt", "checkpoint_last.pt"]),
        ({"no_last_checkpoints": True}, ["checkpoint2.pt", "checkpoint_best.pt"]),
        ({"save_interval": 3}, ["checkpoint_best.pt", "checkpoint_last.pt"]),
        ({"save_interval": 0}, ["checkpoint_best.pt", "checkpoint_last.pt"]),
        ({"keep_last_epochs": 0}, ["checkpoint_best.pt", "checkpoint_last.pt"]),
        ({"keep_best_checkpoints": -1}, ["checkpoint2.pt", "checkpoint.best_loss_0.5.pt", "checkpoint_best.pt", "checkpoint_last.pt"]),
    ]:
        assert checkpoint_names(config("x", **values), 2, 20, True, True, 0.5) == expected, values


def test_a_stop_is_saved_even_without_last_checkpoints():  # [N2]
    cfg = config("x", no_last_checkpoints=True)
    assert checkpoint_names(cfg, 3, 17, False, stopping=True) == ["checkpoint_3_17.pt"]
    assert checkpoint_names(cfg, 3, 17, False, stopping=False) == []


@pytest.mark.parametrize("score", [None, float("nan"), float("inf")])
def test_without_a_fresh_score_nothing_is_named_best(score):  # [N3]
    cfg = config("x", keep_best_checkpoints=-1)
    assert checkpoint_names(cfg, 1, 10, True, False, score) == ["checkpoint1.pt", "checkpoint_last.pt"]


# ---- retention, against a plain model

schedules = st.lists(
    st.tuples(st.integers(1, 7), st.sampled_from([None, 0.5, 0.25, 1.0, 2.0, float("nan"), -3.0, 1e-9])),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(
    schedules,
    st.fixed_dictionaries(
        {
            "save_interval": st.integers(0, 2),
            "save_interval_updates": st.sampled_from([0, 3, 5]),
            "keep_interval_updates": st.integers(-1, 3),
            "keep_last_epochs": st.integers(-1, 2),
            "keep_best_checkpoints": st.integers(-1, 3),
            "maximize_best_checkpoint_metric": st.booleans(),
            "no_last_checkpoints": st.booleans(),
        }
    ),
)
def test_names_and_retention_follow_the_plain_rules(steps, values):  # [N1] [N3] [N4]
    """Ten updates make an epoch. The reference keeps every save for ever and derives what must be there."""
    cfg = config("x", **values)
    best, there, update = BestScore(cfg.maximize_best_checkpoint_metric), {}, 0
    interval_saves, epoch_saves, ranked, best_at = [], [], {}, None
    sign = -1 if cfg.maximize_best_checkpoint_metric else 1
    for step, score in steps:
        update += step
        epoch, end = (update - 1) // 10 + 1, update % 10 == 0
        improved = best.update(score, update)
        present = [n.value for n in map(CheckpointName.parse, there) if n.kind == "ranked"]
        written = checkpoint_names(cfg, epoch, update, end, improved, score, present)
        there.update(dict.fromkeys(written, update))
        real = score is not None and score == score
        for name in stale_checkpoints(there, cfg, real):
            if name not in written:
                del there[name]
        if cfg.save_interval_updates and update % cfg.save_interval_updates == 0:
            interval_saves.append((f"checkpoint_{epoch}_{update}.pt", update))
        if end and cfg.save_interval and epoch % cfg.save_interval == 0:
            epoch_saves.append((f"checkpoint{epoch}.pt", update))
        if real:
            ranked.setdefault(score, update)
            best_at = ranked[min(ranked, key=lambda s: sign * s)]

        def newest(saves, keep):
            return saves if keep < 0 else saves[len(saves) - min(keep, len(saves)) :]

        ordered = [(f"checkpoint.best_loss_{s!r}.pt", ranked[s]) for s in sorted(ranked, key=lambda s: -sign * s)]
        expected = dict(newest(interval_saves, cfg.keep_interval_updates) + newest(epoch_saves, cfg.keep_last_epochs))
        expected.update(newest(ordered, cfg.keep_best_checkpoints))
        expected.update({"checkpoint_best.pt": best_at} if best_at else {})
        expected.update({} if cfg.no_last_checkpoints else {"checkpoint_last.pt": update})
        assert there == expected


def test_numbers_decide_what_is_newest_not_text_or_time(folder):  # [N4]
    cfg = config(folder, save_interval_updates=1, keep_interval_updates=2)
    for update in (100, 9, 10):  # written in this order: 9 is the newest file, and the largest text
        save_at(cfg, update)
    assert [n for n in os.listdir(folder) if "_1_" in n] and "checkpoint_1_100.pt" in os.listdir(folder)
    assert "checkpoint_1_9.pt" not in os.listdir(folder)


def test_retention_deletes_only_what_this_run_wrote(folder):  # [N5]
    cfg = config(folder, save_interval_updates=1, keep_interval_updates=1, keep_last_epochs=1)
    folder.mkdir()
    other = FakeTrainer(cfg, run_id="other run").train_to(7)
    other.save_checkpoint(folder / "checkpoint_1_7.pt", {})
    (folder / "checkpoint_1_8.pt").write_text("notes")
    (folder / "mine.pt").write_text("mine")
    (folder / "checkpoint1.pt.bak").write_text("mine")
    strangers = set(os.listdir(folder))
    for update in range(20, 30):
        save_at(cfg, update, epoch=update, samples=10)
    assert strangers <= set(os.listdir(folder))
    assert set(os.listdir(folder)) - strangers == {"checkpoint_29_29.pt", "checkpoint29.pt", "checkpoint_last.pt"}


def test_a_file_that_cannot_be_deleted_does_not_end_the_run(folder, monkeypatch, caplog):
    cfg = config(folder, save_interval_updates=1, keep_interval_updates=1)
    save_at(cfg, 1)
    original = os.unlink

    def refuse(path, *args, **kwargs):
        if str(path).endswith("checkpoint_1_1.pt"):
            raise PermissionError(13, "Permission denied")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    save_at(cfg, 2)
    assert "cannot be deleted" in caplog.text and folder_content(folder)["checkpoint_last.pt"] == 2


# ---- publishing


def test_one_content_is_written_once_and_linked(folder):  # [P4]
    cfg = config(folder, save_interval_updates=5, keep_best_checkpoints=2)
    saved = save_at(cfg, 10, 0.5, epoch=2, samples=0)  # the start of epoch 2 is the end of epoch 1
    names = ["checkpoint_1_10.pt", "checkpoint1.pt", "checkpoint.best_loss_0.5.pt", "checkpoint_best.pt", "checkpoint_last.pt"]
    assert saved.paths == [os.path.join(folder, name) for name in names]
    assert len({os.stat(path).st_ino for path in saved.paths}) == 1
    assert sorted(os.listdir(folder)) == sorted(names)
    assert saved.bytes == os.path.getsize(saved.paths[0]) and saved.blocked_s > 0


def test_where_links_fail_there_is_a_copy_and_one_note(folder, monkeypatch, caplog):
    checkpoint_utils.file_system.notice.cache_clear()
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(95, "Operation not supported")))
    cfg = config(folder, save_interval_updates=1)
    save_at(cfg, 1)
    save_at(cfg, 2, 0.5)
    assert folder_content(folder) == {
        "checkpoint_1_1.pt": 1, "checkpoint_1_2.pt": 2, "checkpoint_best.pt": 2, "checkpoint_last.pt": 2
    }  # fmt: skip
    assert caplog.text.count("no hard links") == 1


def test_a_mount_that_does_not_sync_folders_is_tolerated_with_one_notice(folder, monkeypatch, caplog):
    checkpoint_utils.file_system.notice.cache_clear()
    original = os.fsync

    def fsync(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(22, "Invalid argument")
        return original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    folder.mkdir()
    cfg = config(folder)
    save_at(cfg, 1)
    save_at(cfg, 2)
    assert folder_content(folder) == {"checkpoint_last.pt": 2}
    assert caplog.text.count("does not sync folders") == 1


def test_a_save_never_writes_into_the_file_that_has_the_name(folder):  # [P1]
    cfg = config(folder)
    save_at(cfg, 1)
    os.link(folder / "checkpoint_last.pt", folder / "old.pt")
    FakeTrainer(cfg).train_to(2).save_checkpoint(folder / "checkpoint_last.pt", {})
    assert folder_content(folder) == {"checkpoint_last.pt": 2, "old.pt": 1}


def test_a_refused_value_leaves_all_as_it_was(folder):
    cfg = config(folder)
    save_at(cfg, 1)
    with pytest.raises(checkpoint_file.UnsavableValueError, match=r"\['extra_state'\]\['x'\]") as caught:
        FakeTrainer(cfg).save_checkpoint(folder / "checkpoint_last.pt", {"x": {1, 2}})
    assert caught.value.path.endswith("checkpoint_last.pt")
    assert folder_content(folder) == {"checkpoint_last.pt": 1}
    assert os.listdir(folder) == ["checkpoint_last.pt"]


def test_only_our_own_abandoned_temporaries_are_removed(folder):  # [P6]
    folder.mkdir()
    stale, live = folder / ".checkpoint_last.pt.123.tmp", folder / ".checkpoint_best.pt.124.tmp"
    others = [folder / "notes.tmp", folder / ".checkpoint_last.pt.tmp", folder / ".model.pt.12.tmp", folder / "checkpoint.pt.1.tmp"]
    for path in (stale, *others):
        path.write_text("x")
    with checkpoint_utils.file_system.held(str(live)):
        assert checkpoint_utils.load_checkpoint(config(folder), FakeTrainer(config(folder)))[0] is None
        assert live.exists() and not stale.exists() and all(path.exists() for path in others)


def test_memory_descriptors_and_threads_stay_level(folder):
    cfg = config(folder, save_interval_updates=1, keep_interval_updates=2)
    trainer, counts = FakeTrainer(cfg), []
    for update in range(1, 9):
        save_at(cfg, update, trainer=trainer)
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    assert len(set(counts[2:])) == 1


# ---- choosing


def facts(update: int, problem: str | None = None, path: str | None = None, **saved) -> FileFacts:
    return FileFacts(path or f"/d/checkpoint_1_{update}.pt", problem, update, "run", saved)


def test_the_order_of_preference():  # [R1]
    plain, wish, tune = config("/d"), config("/d", restore_file="/a.pt"), config("/d", finetune_from_model="/b.pt")
    assert choose(plain, None, []) == Choice("scratch")
    assert choose(tune, None, []) == Choice("finetune_from_model", "/b.pt", asked_for=True)
    assert choose(wish, None, []) == Choice("restore_file", "/a.pt", asked_for=True)
    for cfg in (plain, tune):
        assert choose(cfg, facts(5), []) == Choice("own", "/d/checkpoint_1_5.pt")
        assert choose(cfg, None, [facts(9), facts(10)]).path == "/d/checkpoint_1_10.pt"
    assert choose(wish, facts(5, restore_file="/a.pt"), []) == Choice("own", "/d/checkpoint_1_5.pt")
    assert choose(wish, facts(5), []) == Choice("restore_file", "/a.pt", asked_for=True, new_wish=True)
    assert choose(wish, facts(5, restore_file="/other.pt"), []).new_wish
    assert choose(plain, facts(5, restore_file="/a.pt"), []).source == "own"


def test_a_damaged_last_gives_way_to_the_newest_that_is_sound():  # [R3]
    choice = choose(config("/d"), facts(-1, "torn"), [facts(3), facts(10), facts(11, "bits"), facts(9)])
    assert choice.path == "/d/checkpoint_1_10.pt"
    assert choice.passed_over == (("/d/checkpoint_1_-1.pt", "torn"), ("/d/checkpoint_1_11.pt", "bits"))


@pytest.mark.parametrize("values", [{}, {"restore_file": "/a.pt"}, {"finetune_from_model": "/b.pt"}])
def test_when_all_are_damaged_there_is_no_fresh_start(values):  # [R4]
    for last, others in [(facts(5, "torn"), []), (facts(5, "torn"), [facts(3, "bits")]), (None, [facts(3, "bits")])]:
        with pytest.raises(NoUsableCheckpointError, match="none of the run's own") as caught:
            choose(config("/d", **values), last, others)
        assert caught.value.exit_status == 2


def test_two_wishes_are_refused():
    cfg = config("/d", restore_file="/a.pt", finetune_from_model="/b.pt")
    with pytest.raises(CheckpointWishError, match="both set"):
        choose(cfg, facts(5), [])
    assert "both set" in CheckpointConfig(restore_file="/a.pt", finetune_from_model="/b").problems()[0]


@pytest.mark.parametrize("bits", itertools.product([False, True], repeat=4))
def test_each_reset_flag_is_applied_once_per_run(bits):  # [R5]
    flags = dict(zip(checkpoint_utils.RESET_FLAGS, bits))
    cfg = config("/d", **flags)
    for source in ("own", "restore_file"):
        assert resets_to_apply(cfg, Choice(source), {}) == (flags, [])
    done = [flag for flag, on in flags.items() if on]
    assert resets_to_apply(cfg, Choice("own"), flags) == (dict.fromkeys(flags, False), done)
    assert resets_to_apply(cfg, Choice("restore_file"), flags) == (flags, [])
    assert resets_to_apply(config("/d"), Choice("own"), flags) == (dict.fromkeys(flags, False), [])


def test_impossible_values_are_named_with_their_section():
    assert CheckpointConfig().problems() == []
    problems = CheckpointConfig(save_interval=-1, patience=-2, keep_last_epochs=-5, best_checkpoint_metric="").problems()
    assert len(problems) == 4 and all("checkpoint." in problem for problem in problems)


# ---- loading


def test_a_fresh_start_has_no_extra_state(folder):
    trainer = FakeTrainer(config(folder))
    extra_state, itr = checkpoint_utils.load_checkpoint(config(folder), trainer)
    assert extra_state is None and itr.state_dict() == {"epoch": 1, "samples_in_epoch": 0} and not trainer.calls


def test_the_same_command_goes_on_where_the_run_stood(folder, tmp_path):
    cfg = config(folder, optimizer_overrides={"lr": 1})
    trainer = FakeTrainer(cfg)
    save_at(cfg, 23, 0.5, epoch=3, samples=7, trainer=trainer)
    again = FakeTrainer(cfg, run_id="unset")
    extra_state, itr = checkpoint_utils.load_checkpoint(cfg, again)
    assert itr.state_dict() == {"epoch": 3, "samples_in_epoch": 7}
    assert again.run_id == "run" and again.num_updates == 23 and again.weight.unique().tolist() == [23.0]
    assert vars(again.best) == vars(trainer.best)
    assert extra_state["val_loss"] == 0.5 and extra_state["best"] == 0.5
    assert again.calls == [(str(folder / "checkpoint_last.pt"), False, False, {"lr": 1}, False)]


@pytest.mark.parametrize("bits", itertools.product([False, True], repeat=4))
def test_reset_flags_reach_the_trainer_and_the_iterator(folder, bits):  # [R5]
    save_at(config(folder), 23, 0.5, epoch=3, samples=7)
    flags = dict(zip(checkpoint_utils.RESET_FLAGS, bits))
    cfg = config(folder, **flags)
    trainer = FakeTrainer(cfg)
    _, itr = checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.calls[0][1:3] == (flags["reset_optimizer"], flags["reset_lr_scheduler"])
    assert trainer.calls[0][4] == flags["reset_meters"]
    assert itr.epoch == (1 if flags["reset_dataloader"] else 3)
    save_at(cfg, 24, trainer=trainer, epoch=2, samples=2)
    trainer = FakeTrainer(cfg)
    _, itr = checkpoint_utils.load_checkpoint(cfg, trainer)
    assert not any(trainer.calls[0][i] for i in (1, 2, 4)) and itr.epoch == 2


def test_another_metric_forgets_the_best_score(folder, caplog):
    save_at(config(folder), 23, 0.5)
    cfg = config(folder, best_checkpoint_metric="accuracy", maximize_best_checkpoint_metric=True)
    trainer = FakeTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.best.best is None and "start anew" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [flip, lambda p: Path(p).write_bytes(b""), lambda p: Path(p).write_text("oops"), lambda p: os.truncate(p, 900)],
    ids=["flipped bit", "empty", "text", "truncated"],
)
def test_a_damaged_last_is_passed_over_loudly_and_kept_aside(folder, caplog, damage, monkeypatch):  # [R3]
    cfg = config(folder, save_interval_updates=1)
    for update in (9, 10, 11):
        save_at(cfg, update)
    shutil.copy(folder / "checkpoint_1_9.pt", folder / "x")
    os.unlink(folder / "checkpoint_last.pt")
    shutil.copy(folder / "checkpoint_1_11.pt", folder / "checkpoint_last.pt")
    damage(folder / "checkpoint_last.pt")
    flip(folder / "checkpoint_1_11.pt")
    broken = (folder / "checkpoint_last.pt").read_bytes()
    trainer = FakeTrainer(cfg)
    with monkeypatch.context() as as_rank_1:
        as_rank_1.setattr("distributed_utils.is_master", lambda: False)
        say(Choice("own", "p", passed_over=(("q", "damaged"),)), cfg)
        assert not caplog.text  # rank 0 tells it
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.num_updates == 10 and trainer.weight.unique().tolist() == [10.0]
    assert "DAMAGED" in caplog.text and "GOING BACK" in caplog.text
    assert (folder / "damaged" / "checkpoint_last.pt").read_bytes() == broken
    assert (folder / "damaged" / "checkpoint_1_11.pt").exists()
    assert not (folder / "checkpoint_last.pt").exists()
    assert checkpoint_utils.load_checkpoint(cfg, FakeTrainer(cfg))[0] is not None  # and again


def test_all_damaged_is_an_error_that_moves_nothing(folder):  # [R4]
    cfg = config(folder, save_interval_updates=1)
    save_at(cfg, 9)
    os.unlink(folder / "checkpoint_last.pt")
    shutil.copy(folder / "checkpoint_1_9.pt", folder / "checkpoint_last.pt")
    flip(folder / "checkpoint_last.pt")
    flip(folder / "checkpoint_1_9.pt")
    before = sorted(os.listdir(folder))
    with pytest.raises(NoUsableCheckpointError, match="checkpoint_1_9.pt"):
        checkpoint_utils.load_checkpoint(cfg, FakeTrainer(cfg))
    assert sorted(os.listdir(folder)) == before


def test_without_a_last_the_newest_by_updates_is_taken(folder):
    cfg = config(folder, save_interval_updates=1, no_last_checkpoints=True)
    for update in (100, 9, 10):
        save_at(cfg, update)
    trainer = FakeTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.num_updates == 100


@pytest.mark.parametrize("key", ["restore_file", "finetune_from_model"])
@pytest.mark.parametrize(
    "make, kind",
    [
        (lambda p: None, CheckpointNotFoundError),
        (lambda p: p.mkdir(), CheckpointError),
        (lambda p: p.write_text("text"), CheckpointError),
        (lambda p: p.write_bytes(b""), CheckpointDamagedError),
        (lambda p: (save_at(config(p.parent), 3), os.rename(p.parent / "checkpoint_last.pt", p), flip(p)), CheckpointDamagedError),
    ],
    ids=["missing", "folder", "text", "empty", "flipped"],
)
def test_a_path_that_was_asked_for_is_used_or_an_error(tmp_path, folder, key, make, kind):  # [R6]
    asked = tmp_path / "pre" / "asked.pt"
    asked.parent.mkdir()
    make(asked)
    cfg = config(folder, **{key: str(asked)})
    with pytest.raises(kind, match=f"checkpoint.{key}=") as caught:
        checkpoint_utils.load_checkpoint(cfg, FakeTrainer(cfg))
    assert str(asked) in str(caught.value) and caught.value.exit_status == 2


def test_finetuning_takes_parameters_only_and_only_at_the_start(tmp_path, folder):
    save_at(config(tmp_path / "pre"), 40)
    cfg = config(folder, finetune_from_model=str(tmp_path / "pre" / "checkpoint_last.pt"), reset_optimizer=True)
    trainer = FakeTrainer(cfg)
    extra_state, itr = checkpoint_utils.load_checkpoint(cfg, trainer)
    assert extra_state is None and itr.epoch == 1 and trainer.num_updates == 0 and not trainer.calls
    assert trainer.weight.unique().tolist() == [40.0]
    save_at(cfg, 1, trainer=trainer)
    again = FakeTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, again)
    assert again.num_updates == 1


def test_a_new_restore_file_wins_once_and_what_lies_beyond_is_abandoned(tmp_path, folder, caplog):  # [R7]
    save_at(config(tmp_path / "pre"), 12)
    plain = config(folder, save_interval_updates=5)
    for update in (10, 15, 20):
        save_at(plain, update, 1 / update)
    cfg = config(folder, save_interval_updates=5, restore_file=str(tmp_path / "pre" / "checkpoint_last.pt"))
    trainer = FakeTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.num_updates == 12 and "NEW RESTORE_FILE" in caplog.text
    assert folder_content(folder) == {"checkpoint_1_10.pt": 10}
    moved = {"checkpoint_1_15.pt": 15, "checkpoint_1_20.pt": 20, "checkpoint_best.pt": 20, "checkpoint_last.pt": 20}
    assert folder_content(folder / "abandoned") == moved
    again = FakeTrainer(cfg)  # killed before its first save: the wish is still new
    checkpoint_utils.load_checkpoint(cfg, again)
    assert again.num_updates == 12
    save_at(cfg, 13, trainer=again)
    last = FakeTrainer(cfg)
    shutil.rmtree(tmp_path / "pre")
    checkpoint_utils.load_checkpoint(cfg, last)  # fulfilled: the run's own goes on, whatever became of the file
    assert last.num_updates == 13


def test_going_back_to_an_older_checkpoint_of_the_run_keeps_that_file(folder):  # [R7]
    plain = config(folder, save_interval_updates=5)
    for update in (10, 15, 20):
        save_at(plain, update)
    for wish in (str(folder / "checkpoint_1_15.pt"), "checkpoint_1_15.pt"):
        cfg = config(folder, save_interval_updates=5, restore_file=wish)
        trainer = FakeTrainer(cfg)
        checkpoint_utils.load_checkpoint(cfg, trainer)
        assert trainer.num_updates == 15
        assert folder_content(folder) == {"checkpoint_1_10.pt": 10, "checkpoint_1_15.pt": 15}


def test_the_runs_own_last_asked_for_by_name_is_no_new_wish(folder):
    plain = config(folder)
    save_at(plain, 10)
    cfg = config(folder, restore_file=str(folder / "." / "checkpoint_last.pt"), reset_optimizer=True)
    trainer = FakeTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.calls[0][1] is True
    save_at(cfg, 11, trainer=trainer)
    trainer = FakeTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.calls[0][1] is False and folder_content(folder) == {"checkpoint_last.pt": 11}
    flip(folder / "checkpoint_last.pt")
    with pytest.raises(CheckpointDamagedError, match="restore_file"):
        checkpoint_utils.load_checkpoint(cfg, FakeTrainer(cfg))


def test_a_load_that_fails_moves_nothing(tmp_path, folder):
    save_at(config(tmp_path / "pre"), 12)
    save_at(config(folder), 20)
    cfg = config(folder, restore_file=str(tmp_path / "pre" / "checkpoint_last.pt"))
    trainer = FakeTrainer(cfg)
    trainer.weight = torch.zeros(3)
    with pytest.raises(AssertionError):
        checkpoint_utils.load_checkpoint(cfg, trainer)
    assert folder_content(folder) == {"checkpoint_last.pt": 20}


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = config("~/run")
    save_at(cfg, 3)
    assert folder_content(tmp_path / "run") == {"checkpoint_last.pt": 3}
    trainer = FakeTrainer(cfg)
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.num_updates == 3
    assert checkpoint_utils.verify_checkpoint("~/run/checkpoint_last.pt") == []
    assert checkpoint_utils.load_checkpoint_to_cpu("~/run/checkpoint_last.pt")["run_id"] == "run"


def test_a_save_directly_after_a_load_equals_what_was_loaded(folder):
    cfg = config(folder)
    save_at(cfg, 10, 0.5)
    before = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    trainer = FakeTrainer(cfg)
    _, itr = checkpoint_utils.load_checkpoint(cfg, trainer)
    checkpoint_utils.save_checkpoint(cfg, trainer, itr, 0.5)
    after = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    assert torch.equal(before["model"].pop("weight"), after["model"].pop("weight")) and before == after


def test_no_save_writes_nothing(folder):
    assert save_at(config(folder, no_save=True), 1, stopping=True) is None
    assert not folder.exists()


def test_checkpoint_paths_are_the_newest_first(folder):
    cfg = config(folder, save_interval_updates=1)
    for update in (9, 100, 10):
        save_at(cfg, update, epoch=update, samples=10)
    (folder / "notes.txt").write_text("x")
    found = [os.path.basename(path) for path in checkpoint_utils.checkpoint_paths(folder)]
    assert found[:3] == ["checkpoint_100_100.pt", "checkpoint_10_10.pt", "checkpoint_9_9.pt"]
    assert found[3:6] == ["checkpoint100.pt", "checkpoint10.pt", "checkpoint9.pt"] and found[6:] == ["checkpoint_last.pt"]
    by_pattern = checkpoint_utils.checkpoint_paths(folder, pattern=r"checkpoint(\d+)\.pt")
    assert [os.path.basename(path) for path in by_pattern] == found[3:6]
    assert checkpoint_utils.checkpoint_paths(folder / "none") == []


def test_importing_has_no_effect_and_stays_light():
    root = str(Path(checkpoint_utils.__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); import checkpoint_utils; print([m for m in sys.modules if m.split('.')[0] in ('trainer', 'hydra', 'omegaconf')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert logging.getLogger("checkpoint_utils").handlers == []


def test_a_large_file_that_is_replaced_is_freed_by_a_thread_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_utils.file_system, "LARGE_FILE_BYTES", 1)
    before = len(os.listdir("/proc/self/fd"))
    for update in range(1, 4):
        save_at(config(tmp_path, save_interval_updates=1, keep_interval_updates=1), update)
    for thread in threading.enumerate():
        if thread.name == "freeing a file":
            thread.join()
    assert len(os.listdir("/proc/self/fd")) == before
    assert folder_content(tmp_path) == {"checkpoint_1_3.pt": 3, "checkpoint_last.pt": 3}
