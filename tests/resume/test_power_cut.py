"""A power cut at any call of a run: what is left on the disk is enough to go on from the last save that was announced."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

import checkpoint_utils
from checkpoint_utils.choosing import decide_what_to_load
from checkpoint_utils.retention import remove_stale_temporaries
from tests.commands import ROOT
from tests.dist.harness import run_ranks_to_any_end
from tests.power_cut import STRACE, ReplayedDisk, StraceReader, fingerprint, lay_out, recorded, recorded_session
from tests.resume.killing import COMMAND, LAYOUTS, Arrangement
from trainer.logs import _cut_log, read_log

QUICK = [Arrangement("one process")]
ALL = [
    Arrangement(layout, folder, asynchronous)
    for layout in LAYOUTS
    for folder, asynchronous in ((False, False), (True, False), (False, True), (True, True))
]


def where_it_goes_on(run_dir: Path) -> int:
    """The update that a start goes on from; damage that it finds by reading is passed over, as a load does."""
    save_dir = str(run_dir / "checkpoints")
    remove_stale_temporaries(save_dir)
    cfg = SimpleNamespace(save_dir=save_dir, restore_file="checkpoint_last.pt", finetune_from_model=None)
    known: dict[str, str] = {}
    while True:
        choice, _ = decide_what_to_load(cfg, known)
        if choice.source == "scratch":
            return 0
        problems = checkpoint_utils.verify_checkpoint(choice.path)
        if not problems:
            return checkpoint_utils.facts.read_facts(choice.path).num_updates
        known[choice.path] = problems[0]


def updates_in_log(run_dir: Path, num_updates: int) -> list[int]:
    """Of a log as a start leaves it that goes on from there."""
    path = run_dir / "log.jsonl"
    if not path.exists():
        return []
    _cut_log(path, num_updates)
    return [line["num_updates"] for line in read_log(path) if line["event"] == "train"]


def problems_after_cuts(calls: Iterable, root: Path, scratch: Path, every: int) -> tuple[int, list[str]]:
    """(number of states tried, what is wrong with some): a cut after each of the calls, of writes every `every`-th."""
    disk, rng, tried, announced, problems = ReplayedDisk(root), random.Random(0), set(), 0, []
    for number, (what, process, call) in enumerate(calls):
        disk.apply(what, process, call)
        if call.kind == "write" and call.path.endswith("log.jsonl"):
            told = re.findall(rb'"event": "checkpoint".*"num_updates": (\d+)', call.data)
            announced = max([announced, *map(int, told)])
        if call.kind == "write" and number % every:
            continue
        for tree in disk.states(rng):
            key = fingerprint(tree), announced
            if key in tried:
                continue
            tried.add(key)
            lay_out(tree, scratch)
            try:
                found = where_it_goes_on(scratch)
                if found < announced:
                    problems.append(
                        f"cut after call {number} ({call.kind} {call.path}): {found}, announced {announced}"
                    )
                elif found and updates_in_log(scratch, found) != list(range(1, found + 1)):
                    problems.append(f"cut after call {number} ({call.kind} {call.path}): log.jsonl lacks lines")
            except Exception as error:  # noqa: BLE001 whatever it is, a start would end by it
                problems.append(f"cut after call {number} ({call.kind} {call.path}): {type(error).__name__}: {error}")
            shutil.rmtree(scratch)
    return len(tried), problems


def survives(tmp_path: Path, arrangement: Arrangement, max_update: int, every: int) -> None:
    run_dir, trace = tmp_path / "run", tmp_path / "trace"
    run_dir.mkdir()
    cfg = arrangement.config(run_dir, max_update)
    for stop in ("3:0:0:SIGKILL", ":"):  # killed once, so that a start that cleans up and cuts the log is in it
        run_ranks_to_any_end(
            recorded_session, arrangement.world_size, cfg, str(trace), timeout=120, env={"TEST_STOP": stop}
        )
    num_states, problems = problems_after_cuts(recorded(trace), run_dir, tmp_path / "scratch", every)
    assert problems == [], "\n".join(problems[:20])
    assert num_states > 50


@pytest.mark.parametrize("arrangement", QUICK, ids=str)
def test_a_power_cut_never_loses_a_save_that_was_announced(tmp_path, arrangement):  # [P1] [P2]
    survives(tmp_path, arrangement, max_update=4, every=1000)


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ALL, ids=str)
def test_a_power_cut_in_every_arrangement(tmp_path, arrangement):  # [P1] [P2]
    survives(tmp_path, arrangement, max_update=7, every=20)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace here")
def test_a_power_cut_by_the_system_calls_of_a_real_command(tmp_path):  # [P1] [P2]
    """The same, with what the kernel was asked for in place of what Python was."""
    run_dir, trace = tmp_path / "run", tmp_path / "trace"
    run_dir.mkdir()
    command = [*STRACE, "-o", str(trace), *COMMAND, f"run_dir={run_dir}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    if "PTRACE" in ended.stderr:
        pytest.skip(f"nothing can be traced here: {ended.stderr[-300:]}")
    assert ended.returncode == 0, ended.stderr
    with open(trace) as lines:
        num_states, problems = problems_after_cuts(
            StraceReader(run_dir).calls(lines), run_dir, tmp_path / "scratch", 50
        )
    assert problems == [], "\n".join(problems[:20])
    assert num_states > 50
