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
EXPECTED = {
    "task.hiden": 2,
    "timeout": None,
}  # status of the commands that contain it; None: killed, or done before that
TRAIN = [sys.executable, "-m", "trainer", "--config-dir", "conf", "task=my_task"]


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


def run(command: str | list[str], folder: Path, timeout: float = 600) -> tuple[int, str]:
    """(status, all that was said). In a session of its own, so that what a shell started ends with it at a timeout."""
    with subprocess.Popen(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said


def numbers(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [{**line, "wall": None} for line in lines if line["event"] in ("train", "valid")]


def test_every_command_of_the_readme_does_what_it_says(folder):
    said = {}
    for command in readme_commands():
        status, said[command] = run(command, folder)
        expected = next((expected for words, expected in EXPECTED.items() if words in command), 0)
        assert expected is None or status == expected, f"{command}\n{said[command]}"
    assert "Did you mean" in next(text for command, text in said.items() if "task.hiden" in command)
    assert "equal bit by bit: True" in said["python notebook_style.py"]
    assert numbers(folder / "outputs" / "my_task") == numbers(folder / "outputs" / "killed")
    last_valid = [line for line in numbers(folder / "outputs" / "my_task") if line["event"] == "valid"][-1]
    assert last_valid["accuracy"] > 0.95


def test_a_run_killed_and_then_stopped_continues_to_the_same_numbers(folder):
    done, said = run([*TRAIN, "run_dir=whole"], folder)
    assert done == 0, said
    stop_at_line(folder, 150, signal.SIGKILL, -signal.SIGKILL)
    stop_at_line(folder, 350, signal.SIGTERM, 75)
    assert len(numbers(folder / "parts")) < len(numbers(folder / "whole")), "it was done before it could be stopped"
    done, said = run([*TRAIN, "run_dir=parts"], folder)
    assert done == 0, said
    assert numbers(folder / "parts") == numbers(folder / "whole")


def stop_at_line(folder: Path, wanted: int, stop: signal.Signals, status: int, seconds: float = 600) -> None:
    """Run until the log has so many lines, then send the signal."""
    log = folder / "parts" / "log.jsonl"
    with open(folder / "said", "w+") as said:
        process = subprocess.Popen(
            [*TRAIN, "run_dir=parts"],
            cwd=folder,
            env=environment(folder),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        end = time.monotonic() + seconds
        while (
            (not log.exists() or log.read_bytes().count(b"\n") < wanted)
            and process.poll() is None
            and time.monotonic() < end
        ):
            time.sleep(0.01)
        process.send_signal(stop)
        assert process.wait(timeout=seconds) == status, (folder / "said").read_text()
