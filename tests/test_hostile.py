"""Files from anywhere: nothing in one is run, each is refused with a sentence, in bounded memory and time [F7]."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import checkpoint_file
import checkpoint_utils
from checkpoint_file import CheckpointError
from checkpoint_file.limits import RefusedBytes, check_nest, check_pickle
from tests.commands import fairtrain
from tests.dist.harness import run_ranks
from tests.hostile import archives, fuzz, pickles
from trainer.errors import ConfigError
from trainer.resume_folder import continued
from trainer.tasks.sample import main as sample

# What is harmless when somebody asks for whatever a file holds: plain data. None of it is a checkpoint of ours.
PLAIN = {"65535 entries", *(f"pickle: {name}" for name in ("control characters", "not a dict", "a list in itself", "a dict in itself"))}  # fmt: skip
SOUND = {"65535 entries"}  # the number of entries is not what a directory is read by


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[list[tuple[str, Path]], Path]:
    """(name, path) of every file and folder of the corpus, and the flag that would appear if anything were run."""
    folder = tmp_path_factory.mktemp("hostile")
    flag, found = folder / "flag", []
    for number, (name, data) in enumerate(archives.files(str(flag)).items()):
        path = folder / f"{number}.pt"
        path.write_bytes(data)
        found.append((name, path))
    sound = folder / "sound"
    sound.mkdir()
    state = {
        "format_version": 1,
        "run_id": "r",
        "model": {"a": torch.randn(300, 7), "b": torch.randn(4)},
        "extra_state": {},
    }
    checkpoint_file.write_checkpoint_folder(state, sound / "f")
    (folder / "folders").mkdir()
    found += archives.folders(sound / "f", folder / "folders", str(flag))
    return found, flag


def test_every_hostile_file_is_refused_with_a_sentence_in_bounded_memory(hostile):
    found, flag = hostile
    accepted, stories = set(), []
    for name, path in found:
        with fuzz.limited():
            problems = checkpoint_utils.verify_checkpoint(path)
            assert all("Traceback" not in problem for problem in problems)
            for enter in (checkpoint_utils.load_checkpoint_to_cpu, fuzz.open_as_own):
                try:
                    enter(path)
                    accepted.add((name, enter.__name__))
                except CheckpointError as error:
                    stories.append(str(error))
        assert not flag.exists(), name
    assert {name for name, enter in accepted if enter == "load_checkpoint_to_cpu"} == PLAIN
    assert {name for name, enter in accepted if enter == "open_as_own"} == SOUND
    assert [story for story in stories if len(story) > 5000 or not story.isprintable()] == []
    assert len(found) > 200 and not Path("/tmp/aetc").exists()


def _open_both_ways(paths: list[str]) -> list[tuple[str, str]]:
    """What each path is refused with by both ways of reading, one after the other, in one process group."""
    told = []
    for path in paths:
        stories = []
        for on_all_ranks in (True, False):
            try:
                with checkpoint_file.open_checkpoint(path, on_all_ranks=on_all_ranks) as reader:
                    reader.materialize(reader.skeleton)
                stories.append("")
            except CheckpointError as error:
                stories.append(f"{type(error).__name__}: {error.problem}")
        told.append(tuple(stories))
    return told


def test_all_ranks_refuse_alike_by_both_ways_of_reading(hostile):
    found, flag = hostile
    told = run_ranks(_open_both_ways, 2, [str(path) for _, path in found], timeout=300)
    assert told[0] == told[1] and not flag.exists()
    for (name, _), stories in zip(found, told[0]):
        assert stories[0] == stories[1], name
        assert bool(stories[0]) == (name not in SOUND), name


def test_a_hostile_file_that_was_asked_for_is_refused_before_anything_is_written(hostile, tmp_path, capsys):
    found, flag = hostile
    by_name = dict(found)
    path = by_name["pickle: os.system"]
    argv = ["+task._target_=tests.resume.task.Toy", "run_dir=run", "optimization.max_update=3", "dataset.batch_size=4"]
    result = fairtrain(*argv, "common.cpu=true", f"checkpoint.restore_file={path}", cwd=tmp_path)
    assert result.status == 2 and "os.system" in result.output and "Traceback" not in result.output, result.output
    assert not (tmp_path / "run").exists() and not flag.exists()
    for name, path in found:
        if name not in PLAIN:
            assert sample([str(path), "-o", str(tmp_path / "picture.png")]) == 2, name
    told = capsys.readouterr().err
    assert "Traceback" not in told and not flag.exists() and not (tmp_path / "picture.png").exists()


def test_what_torch_writes_passes_the_limits():
    check_nest({"a": [({"b": [1, 2]},)] * 50}, 100)
    with pytest.raises(RefusedBytes, match="hold each other"):
        nest: list = []
        for _ in range(60):
            nest = [nest, nest]
        check_nest(nest, 100)
    with pytest.raises(RefusedBytes, match="remembers more"):
        check_pickle(pickles.tricks()["a memo of 2**31"])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused_or_plain(tmp_path_factory, data, in_an_archive):
    path = tmp_path_factory.mktemp("any") / "f.pt"
    path.write_bytes(archives.archive(data) if in_an_archive else data)
    fuzz.read(path)


def test_mutations_of_a_real_file_are_refused_or_read(tmp_path):
    (tmp_path / "inner").mkdir()
    assert list(fuzz.faults(iter(range(400)), tmp_path / "inner")) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 40_000, 10_000))
def test_many_mutations_of_a_real_file_are_refused_or_read(tmp_path, first):
    (tmp_path / "inner").mkdir()
    assert list(fuzz.faults(iter(range(first, first + 10_000)), tmp_path / "inner")) == []


def test_the_fuzzer_is_a_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["fuzz", "--first", "5", "--count", "3", "--minutes", "1", "--keep", str(tmp_path / "kept")]
    )
    assert fuzz.main() == 0 and "3 mutations from number 5 on, 0 faults" in capsys.readouterr().out
    assert not os.path.exists(tmp_path / "kept")


@pytest.mark.parametrize("section, key", [("checkpoint", "save_dir"), ("common", "tensorboard_logdir")])
@pytest.mark.parametrize("place", ["/somewhere/else", "../../elsewhere", "~/.ssh"])
def test_a_config_from_a_checkpoint_does_not_choose_where_to_write(tmp_path, section, key, place):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    state = {"format_version": 1, "run_id": "r", "model": {}, "cfg": {"run_dir": str(run_dir), section: {key: place}}}
    checkpoint_file.write_checkpoint_file(state, run_dir / "checkpoints" / "checkpoint_last.pt")
    with pytest.raises(ConfigError, match=f"outside of .*type it: {section}.{key}="):
        continued(str(run_dir), OmegaConf.create(), [], [])
