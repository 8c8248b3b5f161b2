"""Room for checkpoints: what is said at the start of a run, and what is found before a save."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
import torch

import checkpoint_utils
from checkpoint_file import ShardedTensor
from checkpoint_utils import CheckpointConfig, space
from checkpoint_utils.file_system import bytes_of
from checkpoint_utils.space import Room, bytes_of_state, check_room, most_at_once, say_room
from tests.resume.harness import config
from trainer.config import complete_config
from trainer.optim import moments_per_parameter
from trainer.train import main


def test_the_size_of_a_state_is_about_that_of_its_file(tmp_path):
    table = torch.zeros(300, 100)
    shard = ShardedTensor(torch.float32, torch.Size([10, 10]), (10, 1), ((0, torch.zeros(100)),))
    state = {"format_version": 1, "model": {"a": table, "tied": table, "view": table[:10]}, "s": shard, "n": [1, "two"]}
    nbytes = checkpoint_utils.publish_checkpoint(state, tmp_path / "checkpoint_last.pt")
    assert 0.9 < bytes_of_state(state) / nbytes < 1.2


@pytest.mark.parametrize(
    "name, expected", [("AdamW", (2, 3)), ("SGD", (0, 0)), ("Adagrad", (1, 2)), ("Adafactor", (2 / 64, 3))]
)
def test_moments_that_are_not_there_yet_are_known_by_trial(name, expected):
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(3, 3))], lr=0.1)
    assert moments_per_parameter(optimizer) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("name, as_folder", [("checkpoint_last.pt", False), ("checkpoint_last", True)])
def test_a_fresh_run_of_many_small_tensors_says_what_its_checkpoints_take(tmp_path, monkeypatch, name, as_folder):
    said = []
    monkeypatch.setattr(space, "human", lambda nbytes: said.append(nbytes) or str(nbytes))
    cfg = config(tmp_path, distributed_training={"use_sharded_state": as_folder}, optimization={"max_update": 1})
    assert main(complete_config(cfg)) == 0
    taken = bytes_of(str(tmp_path / "checkpoints" / name))
    assert 0.8 < said[0] / taken < 1.2, (said[0], taken)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, -1),  # a file for each epoch, all kept
        ({"save_interval": 0, "save_interval_updates": 5}, -1),
        ({"save_interval": 0, "save_interval_updates": 5, "keep_interval_updates": 2}, 5),
        ({"no_epoch_checkpoints": True}, 3),
        ({"no_epoch_checkpoints": True, "no_last_checkpoints": True, "keep_best_checkpoints": 3}, 5),
        ({"keep_last_epochs": 2}, 5),
    ],
)
def test_retention_says_how_many_are_there_at_once(settings, expected):
    assert most_at_once(CheckpointConfig(**settings)) == expected


def test_room_that_does_not_suffice_is_told_at_the_start(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    cfg = CheckpointConfig(save_dir=str(tmp_path / "not" / "made"), keep_last_epochs=2)
    state = {"model": {"w": torch.zeros(1 << 20)}}
    say_room(cfg, state, not_yet_there=8 << 20)
    assert "takes 12.0 MiB" in caplog.text and "at most 5 are there at once, 60.0 MiB" in caplog.text
    assert "NOT ENOUGH" not in caplog.text
    monkeypatch.setattr(space, "free_bytes", lambda folder: 59 << 20)
    say_room(cfg, state, not_yet_there=8 << 20)
    assert "NOT ENOUGH ROOM" in caplog.text and "room for 4 more" in caplog.text and "keep_last_epochs=N" in caplog.text


def test_a_mount_that_does_not_know_its_size_is_no_full_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0))
    check_room(str(tmp_path / "x.pt"), 1 << 40)
    assert "does not say" in str(Room(str(tmp_path), 10, None, 0, 3))


def test_a_save_that_cannot_fit_is_refused_before_a_byte_is_written(tmp_path, monkeypatch):  # [P5]
    path = tmp_path / "checkpoint_last.pt"
    checkpoint_utils.publish_checkpoint({"format_version": 1, "w": torch.zeros(1000)}, path)
    before = path.read_bytes()
    monkeypatch.setattr(space, "free_bytes", lambda folder: 4096)
    for publish, name in (
        (checkpoint_utils.publish_checkpoint, "checkpoint_last.pt"),
        (checkpoint_utils.publish_checkpoint_folder, "checkpoint_last"),
    ):
        with pytest.raises(checkpoint_utils.publishing.checkpoint_file.CheckpointWriteError) as caught:
            publish({"format_version": 1, "w": torch.zeros(2000)}, tmp_path / name)
        message = str(caught.value)
        assert "7.8 KiB are to be written, 4.0 KiB are free" in message and message.count("Make room") == 1, message
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["checkpoint_last.pt"]
