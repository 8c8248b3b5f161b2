"""torchrun loses a node and restarts what is left with fewer ranks: the run goes on with the same global batches."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.resume.harness import read_log

ROOT = Path(__file__).resolve().parents[2]
NUM_UPDATES = 1500


def start_node(port: int, run_dir: Path, output: Path) -> subprocess.Popen:
    """An agent of torchrun with one rank; the first one to come holds the rendezvous."""
    # A dead node must be forgotten (2 s x 3) before the rest stops waiting for more nodes (last_call_timeout).
    elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
               "--rdzv-id=elastic", "--local-addr=127.0.0.1", "--max-restarts=3", "--shutdown-timeout=5",
               "--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=10,join_timeout=120"]  # fmt: skip
    training = ["-m", "trainer", "+task._target_=tests.resume.task.Toy", f"run_dir={run_dir}", "common.cpu=true",
                "common.num_threads=1", "common.log_format=simple", "dataset.batch_size=4", "optimization.lr=0.01",
                "optimization.global_batch_size=8", f"optimization.max_update={NUM_UPDATES}",
                "checkpoint.save_interval_updates=20", "checkpoint.keep_interval_updates=2"]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, *training]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    with open(output, "w") as file:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)


@pytest.mark.slow
def test_the_rest_of_the_nodes_goes_on_with_the_same_global_batches(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_dir, output = tmp_path / "run", tmp_path / "first.txt"
    first = start_node(port, run_dir, output)
    time.sleep(1.0)
    second = start_node(port, run_dir, tmp_path / "second.txt")
    try:
        deadline = time.monotonic() + 120
        while not (run_dir / "log.jsonl").exists() or len(read_log(run_dir, "train")) < 50:
            assert time.monotonic() < deadline and first.poll() is None, output.read_text()
            time.sleep(0.05)
        os.killpg(second.pid, signal.SIGKILL)
        assert first.wait(180) == 0, output.read_text()
    finally:
        for node in (first, second):
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    lines = read_log(run_dir, "train")
    assert [line["num_updates"] for line in lines] == list(range(1, NUM_UPDATES + 1))
    sizes = {line["epoch"]: [] for line in lines}
    for line in lines:
        sizes[line["epoch"]].append(line["sample_size"])
    *whole_epochs, _ = sizes.values()
    assert all(epoch == [8] * 6 + [5] for epoch in whole_epochs)  # 53 samples
    assert len(read_log(run_dir, "resume")) >= 1
    assert "ranks: saved 2, now 1" in output.read_text()
