"""examples/own_task: each command of its README is run as it stands there, and a run killed by us continues exactly."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = REPOSITORY / "examples" / "own_task"
EXPECTED = {"task.hiden": 2, "timeout": None}  # status of the commands that contain it; None: killed, or done before that
TRAIN = [sys.executable, "-m", "trainer", "--config-dir", "conf", "task=my_task", "common.num_threads=1"]


@pytest.fixture
def folder(tmp_path):
    """A copy of the example, with `fairtrain` and `python` on the path, installed or not."""
    shutil.copytree(EXAMPLE, tmp_path / "own", ignore=shutil.ignore_patterns("outputs", "__pycache__", "multirun"))
    (tmp_path / "bin").mkdir()
    for name, command in (("fairtrain", "-m trainer"), ("python", "")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "own"


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }


def readme_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (EXAMPLE / "README.md").read_text(), flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def numbers(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [{**line, "wall": None} for line in lines if line["event"] in ("train", "valid")]


def test_every_command_of_the_readme_does_what_it_says(folder):
    said = {}
    for command in readme_commands():
        done = subprocess.run(command, shell=True, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300)
        said[command] = done.stdout + done.stderr
        status = next((status for words, status in EXPECTED.items() if words in command), 0)
        assert status is None or done.returncode == status, f"{command}\n{said[command]}"
    assert "Did you mean" in next(text for command, text in said.items() if "task.hiden" in command)
    assert "equal bit by bit: True" in said["python notebook_style.py"]
    assert numbers(folder / "outputs" / "my_task") == numbers(folder / "outputs" / "killed")
    last_valid = [line for line in numbers(folder / "outputs" / "my_task") if line["event"] == "valid"][-1]
    assert last_valid["accuracy"] > 0.95


@pytest.mark.parametrize("stop, status", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)])
def test_a_run_that_was_stopped_half_way_continues_to_the_same_numbers(folder, stop, status):
    whole = subprocess.run([*TRAIN, "run_dir=whole"], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300)
    assert whole.returncode == 0, whole.stderr
    command = [*TRAIN, "run_dir=parts"]
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for_lines(folder / "parts" / "log.jsonl", 250, process)
    process.send_signal(stop)
    message = process.communicate(timeout=120)[1].decode()
    assert process.returncode == status, message
    assert len(numbers(folder / "parts")) < len(numbers(folder / "whole")), "it was done before it could be stopped"
    again = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert numbers(folder / "parts") == numbers(folder / "whole")


def wait_for_lines(log: Path, wanted: int, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not log.exists() or log.read_bytes().count(b"\n") < wanted:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < end, "no progress"
        time.sleep(0.01)
