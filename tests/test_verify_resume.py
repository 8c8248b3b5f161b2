"""fairtrain-verify-resume finds out each reason for which a task does not continue exactly, and clears one that does."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from tests.commands import ROOT, fairtrain
from trainer.tools import verify_resume

TASK = "common.cpu=true common.num_threads=1 dataset.batch_size=4 dataset.valid_subset=null optimization.max_update=1".split()


def start(words: list[str], env: dict[str, str]) -> tuple[int, str]:
    """A session in a process forked from one that has imported torch."""
    with tempfile.TemporaryDirectory() as cwd:
        done = fairtrain(*words, cwd=Path(cwd), env=env, module="trainer.tools.traced")
    return done.status, done.output


def verify(capsys, name: str, *more: str, start=start) -> tuple[int, dict]:
    words = [f"task._target_=tests.broken_tasks.{name}", *TASK, *more, "-n", "3", "-m", "3", "--json"]
    status = verify_resume.main(words, start)
    told = capsys.readouterr()
    assert status != 2, told.err
    return status, json.loads(told.out)


def test_a_sound_task_is_exact_and_nothing_is_left_behind(capsys):
    status, found = verify(capsys, "Sound", "ema.store_ema=true")
    assert status == 0 and found["exact"] and found["warnings"] == []
    assert (
        "14 tensors after each" not in found["compared"][0]
        and found["compared"][0] == "the samples and numbers of 6 updates"
    )


@pytest.mark.parametrize(
    "name, cause, stage, said",
    [
        ("ForgetsCounter", "state not in task_state_dict", "numbers", "ForgetsCounter.difficulty is 3"),
        ("ForgetsBehindAttributes", "state not in task_state_dict", "numbers", "memory.losses"),
        ("OwnGenerator", "RNG not by position", "numbers", "OwnGenerator.generator is generator"),
        ("DatasetWithGenerator", "RNG not by position", "batch", "dataset('train').generator"),
        ("SpoilsWeights", "not restored", "start", "before the stop, both runs are equal"),
    ],
)
def test_what_a_resume_loses_is_named(capsys, name, cause, stage, said):
    status, found = verify(capsys, name)
    assert (status, found["cause"]) == (1, cause), found
    difference = found["first_difference"]
    assert (difference["update"], difference["stage"]) == (4, stage), found
    assert any(said in line for line in found["evidence"]), found


@pytest.mark.parametrize(
    "name, cause",
    [("RacingKernel", "nondeterministic kernels"), ("ReadsClock", "wall-clock"), ("FreshEntropy", "entropy")],
)
def test_what_differs_without_a_resume_is_told_apart_by_trials(capsys, name, cause):
    status, found = verify(capsys, name)
    assert (status, found["cause"]) == (1, cause), found
    assert found["first_difference"]["update"] == 1 and "not to blame" in found["evidence"][0]


def test_workers_that_remember_are_found_by_a_run_without_them(capsys):
    status, found = verify(capsys, "KnowsItsWorker", "dataset.num_workers=1")
    assert (status, found["cause"]) == (1, "workers"), found
    assert found["first_difference"]["stage"] == "batch"


def test_the_order_of_a_set_is_found_in_processes_of_their_own(capsys, monkeypatch):
    """The seed of hashes is set when a process starts, so these are no forks."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    status, found = verify(capsys, "OrderOfSet", start=verify_resume.start_process)
    assert (status, found["cause"]) == (1, "unordered sets"), found


def test_bad_input_is_told_before_and_a_failing_run_with_its_last_words(capsys):
    for words, said in (
        ([], "which task"),
        (["task=digits", "run_dir=x"], "run_dir"),
        (["task=digits", "-n", "0"], "-n and -m"),
        (["task._target_=tests.broken_tasks.Nothing", *TASK], "Nothing"),
    ):
        assert verify_resume.main(words, start) == 2
        assert said in capsys.readouterr().err


def test_it_says_so_in_words_and_keeps_the_runs_where_told(capsys, tmp_path):
    words = ["task._target_=tests.broken_tasks.OwnGenerator", *TASK, "--keep", str(tmp_path)]
    assert verify_resume.main(words, start) == 1
    told = capsys.readouterr().out
    assert (
        "first difference: update 5" in told and "likely cause:     RNG not by position" in told and "way out:" in told
    )
    (kept,) = os.listdir(tmp_path)
    assert (tmp_path / kept / "whole_0" / "run" / "checkpoints" / "checkpoint_last.pt").exists()
