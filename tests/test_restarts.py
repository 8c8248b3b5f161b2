"""torchrun starts ranks again, by itself: the run goes on from its newest checkpoint, at whatever size is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests import faults
from tests.commands import ROOT
from tests.test_heartbeat import COMMAND

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def agent(folder, *words: str, flags: tuple[str, ...]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.2", *flags, "-m", "trainer", *COMMAND]
        + [word for word in words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def updates(folder) -> list[int]:
    log = folder / "run" / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line)["num_updates"] for line in lines if '"train"' in line]


def end(process: subprocess.Popen) -> None:
    """Kill an agent and all below it, as the loss of its machine would."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_ranks_that_die_are_started_again_and_go_on_from_the_newest_checkpoint(tmp_path, rendezvous):
    port = free_port()
    where = {
        "static": ("--master-port", str(port)),
        "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"),
    }[rendezvous]
    # Each start makes three updates, then rank 1 is killed in the next; the last start has none to make behind them.
    words = ("task.moment=forward", "task.rank=1", "task.count=4", "+task.deed=kill", "optimization.max_update=9")
    process = agent(tmp_path, *words, flags=("--nproc-per-node", "2", "--max-restarts", "4", *where))
    output, _ = process.communicate(timeout=faults.within(120))
    assert process.returncode == 0, output
    assert updates(tmp_path) == list(range(1, 10))
    log = (tmp_path / "run" / "train.log").read_text()
    assert [f"(update {n}," in log for n in (3, 6)] == [True, True]


def test_a_node_that_is_gone_leaves_a_smaller_run_that_goes_on(tmp_path):
    flags = (
        "--nnodes=1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "5",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "job",
    )
    port = free_port()
    flags += ("--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "join_timeout=120,last_call_timeout=10")
    words = ("task.moment=forward", "task.count=1", "+task.deed=slow", "optimization.max_update=14")
    words += ("optimization.global_batch_size=4", "distributed_training.heartbeat_timeout=-1")
    stays = agent(tmp_path, *words, flags=flags)
    deadline = time.monotonic() + faults.within(90)
    while not is_listening(port):  # the first one has the store of the rendezvous, without which no other goes on
        assert time.monotonic() < deadline and stays.poll() is None, "it did not begin to listen"
        time.sleep(0.1)
    goes = agent(tmp_path, *words, flags=flags)
    try:
        while len(updates(tmp_path)) < 3:
            assert time.monotonic() < deadline and stays.poll() is None, "it did not begin to train"
            time.sleep(0.2)
        assert goes.poll() is None
        end(goes)
        output, _ = stays.communicate(timeout=faults.within(120))
    finally:
        for process in (stays, goes):
            if process.poll() is None:
                end(process)
        goes.communicate()
    assert stays.returncode == 0, output
    assert goes.returncode == -signal.SIGKILL
    assert updates(tmp_path) == list(range(1, 15))
    assert "ranks: saved 2, now 1" in (tmp_path / "run" / "train.log").read_text()
