"""Ranks start together, end together, and the exit status says how. The violence is real: signals, kills, errors."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import distributed_utils
from distributed_utils import DistributedTrainingConfig, PeerError
from trainer import cli, launch
from trainer.errors import ConfigError, NonFiniteError
from trainer.preemption import StopRequest

ROOT = Path(__file__).parent.parent
RANKS = 2
END_S = 10.0  # an error on one rank ends all within this time
START_S = 120.0  # three interpreters importing torch on a busy machine

SCRIPT = '''
import os, signal, sys, threading, time
import distributed_utils
from distributed_utils import DistributedTrainingConfig, get_rank
from trainer import launch
from trainer.errors import ConfigError
from trainer.preemption import StopRequest

mode, world_size = sys.argv[1], int(sys.argv[2])
STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
if mode == "late" and "RANK" in os.environ:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # as trainer.__main__ does for the ranks of a launcher
    os.write(1, f"started {os.environ['RANK']} {os.getpid()}\\n".encode())
    time.sleep(3 if os.environ["RANK"] == "1" else 0)
    os.write(1, f"joining {os.environ['RANK']}\\n".encode())

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write: lines of ranks do not mix

def main():
    rank = get_rank()
    say("started", rank, os.getpid())
    if mode == "argv":
        say("argv", sys.argv[3:])
    if mode.startswith("one "):
        distributed_utils.barrier()
        if rank == 1:
            say("failing")
            fail(mode.split()[1])
        if rank == 2:
            distributed_utils.barrier()  # one survivor waits for a peer, the other does not even notice
        time.sleep(60)
    if mode == "all raise":
        raise ConfigError("the folder is not there")
    if mode == "stop":
        with StopRequest() as request:
            say("ready", rank)
            while not request.stop_requested:
                if request.save_requested:
                    say("saved", rank)
                    request.clear_save()
                time.sleep(0.02)
        say("stopping", rank)
        time.sleep(float(sys.argv[3]) if rank == 0 else 0)
        say("stopped", rank)
        return 75
    return 0

def fail(how):
    if how == "raises":
        raise KeyError("item k")
    if how == "refuses":
        raise ConfigError("data.path is not there")
    os.kill(os.getpid(), signal.SIGKILL)

cfg = DistributedTrainingConfig(distributed_world_size=world_size)
say("launching", os.getpid())
launch.leave(launch.run(main, cfg, sys.argv[1:], command=[sys.executable, __file__]))
'''


class Job:
    """A running launch whose output is read as it comes."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.lines, self.stderr = process, [], ""
        self._new = threading.Condition()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_stdout, self._read_stderr)]
        for reader in self._readers:
            reader.start()

    def _read_stdout(self) -> None:
        for line in self.process.stdout:
            with self._new:
                self.lines.append(line.rstrip("\n"))
                self._new.notify_all()

    def _read_stderr(self) -> None:
        self.stderr = self.process.stderr.read()

    def count(self, word: str) -> int:
        return sum(line.split(" ")[0] == word for line in self.lines)

    def wait_for(self, word: str, count: int = 1, timeout: float = START_S) -> None:
        with self._new:
            assert self._new.wait_for(lambda: self.count(word) >= count, timeout), (word, self.lines)

    def rank_pids(self) -> list[int]:
        return [int(line.split()[2]) for line in self.lines if line.startswith("started")]

    def end(self, timeout: float = START_S) -> int:
        status = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(5)
        return status


@pytest.fixture
def start(tmp_path):
    """Start the script in a mode, by our launcher or by torchrun; whatever is left of it is killed at the end."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    jobs = []

    def start(mode, *words, world_size=RANKS, torchrun=False, env=None):
        command = [sys.executable]
        if torchrun:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        inherited = {k: v for k, v in os.environ.items() if k not in distributed_utils.LAUNCH_VARIABLES}
        process = subprocess.Popen(
            [*command, str(script), mode, str(world_size), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
        )
        jobs.append(Job(process))
        return jobs[-1]

    yield start
    for job in jobs:
        for pid in [job.process.pid, *job.rank_pids()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        job.process.wait()


def wait_until_gone(pids, timeout):
    deadline = time.monotonic() + timeout
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, "ranks outlived their launcher"
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------- an error ends all ranks


BOTH = pytest.mark.parametrize("torchrun, world_size", [(False, 3), (True, 2)], ids=["our launcher", "torchrun"])


@BOTH
def test_an_exception_on_one_rank_ends_all_and_is_printed_once(start, torchrun, world_size):
    job = start("one raises", torchrun=torchrun, world_size=world_size)
    job.wait_for("failing")
    begin = time.monotonic()
    assert job.end() == 1
    assert time.monotonic() - begin < END_S
    wait_until_gone(job.rank_pids(), 1.0)
    assert job.stderr.count("fairtrain: rank 1: ") == job.stderr.count("KeyError: 'item k'") == 1
    for survivor in (0, 2):
        assert job.stderr.count(f"rank {survivor} ends") <= 1
    if not torchrun:  # which prints a report of its own
        assert job.stderr.count("Traceback") == 1 and len(job.stderr.splitlines()) < 15, job.stderr


@BOTH
def test_a_rank_killed_without_a_word_ends_all(start, torchrun, world_size):
    job = start("one dies", torchrun=torchrun, world_size=world_size)
    job.wait_for("failing")
    begin = time.monotonic()
    assert job.end() == 1
    assert time.monotonic() - begin < END_S
    wait_until_gone(job.rank_pids(), 1.0)
    assert torchrun or "rank 1 was killed by SIGKILL" in job.stderr
    assert torchrun or "Traceback" not in job.stderr, job.stderr  # survivors tell the cause, not what they noticed


def test_bad_input_found_by_one_rank_is_status_2_and_one_sentence(start):
    job = start("one refuses")
    assert job.end() == 2
    assert job.stderr.count("data.path is not there") == 1 and "Traceback" not in job.stderr


def test_the_same_error_on_all_ranks_is_printed_once(start):
    job = start("all raise")
    assert job.end() == 2
    assert job.stderr.count("the folder is not there") == 1


# -------------------------------------------------------------------------------------------------------------- signals


def test_a_stop_signal_reaches_every_rank_and_a_slow_save_is_waited_for(start):
    job = start("stop", "3")
    job.wait_for("ready", RANKS)
    job.process.send_signal(signal.SIGUSR2)
    job.wait_for("saved", RANKS)
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("stopping", RANKS)
    job.process.send_signal(signal.SIGTERM)  # a repeated request harms nothing
    assert job.end() == 75
    assert job.count("stopped") == RANKS
    assert job.count("started") == RANKS  # none was started again
    assert job.stderr == ""


@pytest.mark.slow
def test_a_save_may_take_longer_than_torch_would_wait(start):
    job = start("stop", "35")
    job.wait_for("ready", RANKS)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75
    assert job.count("stopped") == RANKS


def test_torchrun_passes_the_stop_on_and_all_ranks_finish_their_save(start):
    job = start("stop", "2", torchrun=True)
    job.wait_for("ready", RANKS)
    job.process.send_signal(signal.SIGTERM)
    job.end()
    assert job.count("stopped") == RANKS
    assert "fairtrain" not in job.stderr and " ends: " not in job.stderr


def test_a_signal_during_start_up_is_not_lost(start):
    job = start("stop", "0")
    job.wait_for("launching")
    time.sleep(0.3)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75
    assert job.count("started") <= RANKS


STOPPED = "fairtrain: stopped by SIGTERM before the first update; start me again\n"


@pytest.mark.parametrize("torchrun", [False, True], ids=["our launcher", "torchrun"])
def test_a_stop_while_the_ranks_gather_is_one_sentence_and_75(start, torchrun):
    job = start("late", torchrun=torchrun)
    job.wait_for("joining")
    job.process.send_signal(signal.SIGTERM)
    status = job.end()
    assert job.stderr.count(STOPPED) == job.stderr.count("fairtrain: ") == 1, job.stderr
    assert torchrun or (status == 75 and job.stderr == STOPPED)  # torchrun has its own status, and a traceback


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_while_the_ranks_gather_is_one_sentence_and_1(start, killed):
    job = start("late")
    job.wait_for("started", RANKS)
    job.wait_for("joining")
    pids = {int(line.split()[1]): int(line.split()[2]) for line in job.lines if line.startswith("started")}
    begin = time.monotonic()
    os.kill(pids[killed], signal.SIGKILL)
    assert job.end() == 1
    assert time.monotonic() - begin < END_S
    *survivors, last = job.stderr.splitlines()
    assert last == f"fairtrain: rank {killed} was killed by SIGKILL, perhaps for want of memory"
    # A survivor that sees the death before the launcher ends it may say so.
    assert all(re.fullmatch(rf"rank \d ends: rank {killed} failed \(ProcessDied\)", line) for line in survivors)


def test_a_second_interrupt_ends_everything_at_once(start):
    job = start("stop", "60")
    job.wait_for("ready", RANKS)
    job.process.send_signal(signal.SIGINT)
    job.wait_for("stopping", RANKS)
    begin = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 1
    assert time.monotonic() - begin < END_S
    wait_until_gone(job.rank_pids(), 1.0)


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_do_not_outlive_a_killed_launcher(start, torchrun):
    job = start("stop", "60", torchrun=torchrun)
    job.wait_for("ready", RANKS)
    job.process.kill()
    wait_until_gone(job.rank_pids(), END_S)


# ---------------------------------------------------------------------------------------------- what the ranks are told


def test_arguments_reach_the_ranks_as_typed(start):
    words = ["a=b c", "x=${oc.env:HOME}", "y=$$1", "z=${local_rank}", "run_dir='q'", 'k="v,w"']
    job = start("argv", *words)
    assert job.end() == 0
    assert [line for line in job.lines if line.startswith("argv")] == [f"argv {words}"] * RANKS
    assert job.count("started") == RANKS and job.stderr == ""


@pytest.mark.parametrize("world_size", [1, 2])
def test_variables_of_another_launch_do_not_change_the_run(start, world_size):
    left_over = {"RANK": "1", "MASTER_ADDR": "elsewhere", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}
    job = start("ok", world_size=world_size, env=left_over)
    assert job.end() == 0
    assert job.count("started") == world_size
    assert "RANK=1 MASTER_ADDR=elsewhere" in job.stderr  # and nothing is ignored in silence


# ---------------------------------------------------------------------------------------------------------- one process

ONE = DistributedTrainingConfig()


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    for name in distributed_utils.LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def failing(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize("status", [0, 75])
def test_one_rank_runs_here_without_a_process_group(status):
    def main():
        assert not torch.distributed.is_initialized()
        return status

    before = signal.getsignal(signal.SIGTERM)
    assert launch.run(main, ONE, []) == status
    assert signal.getsignal(signal.SIGTERM) == before


class OwnStatus(RuntimeError):
    is_user_error = True
    exit_status = 2


@pytest.mark.parametrize(
    "error, status, traceback",
    [
        (ConfigError("lr must be above 0"), 2, False),
        (NonFiniteError("loss", 7, 0), 1, False),
        (OwnStatus("the file is damaged"), 2, False),
        (PeerError(3, "KeyError", "k", 1), 1, False),
        (KeyError("item"), 1, True),
        (SystemExit(4), 4, False),
        (MemoryError("no more"), 1, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_error_is_told_once_and_has_its_status(capsys, error, status, traceback):
    assert launch.run(failing(error), ONE, []) == status
    stderr = capsys.readouterr().err
    assert ("Traceback" in stderr) == traceback
    assert isinstance(error, SystemExit) or stderr.count(str(error)) == 1


def test_contradictory_variables_are_status_2_in_seconds(monkeypatch, capsys):
    for name, value in [("RANK", "5"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "h")]:
        monkeypatch.setenv(name, value)
    assert launch.run(lambda: 0, ONE, []) == 2
    assert "RANK=5 WORLD_SIZE=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "launch_of, tells",
    [(None, True), ((0, "agent"), True), ((1, "agent"), False), ((0, "fairtrain-1"), False), ((1, "fairtrain-1"), False)],
)
def test_of_all_processes_of_a_launch_one_tells_what_all_know(monkeypatch, capsys, launch_of, tells):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launch_of is not None:
        rank, run_id = launch_of
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "h", "MASTER_PORT": 1}
        for name, value in {**place, "TORCHELASTIC_RUN_ID": run_id}.items():
            monkeypatch.setenv(name, str(value))
    cli._tell(["the config saved in x is the base"])
    assert capsys.readouterr().err == ("fairtrain: the config saved in x is the base\n" if tells else "")


def test_a_signal_between_two_points_of_a_sweep_is_seen_by_the_next():
    def main():
        with StopRequest() as request:
            return 75 if request.stop_requested else 0

    with StopRequest():
        assert launch.run(main, ONE, []) == 0
        signal.raise_signal(signal.SIGTERM)
        assert launch.run(main, ONE, []) == 75


@pytest.mark.parametrize(
    "exitcodes, status",
    [
        ({}, 0),
        ({0: 75, 1: 75}, 75),
        ({0: 75, 1: 1}, 1),
        ({0: 1, 1: 2}, 2),
        ({1: -9, 0: -15}, 1),
        ({1: 3}, 1),
    ],
)
def test_the_status_of_the_whole_follows_from_the_ranks(exitcodes, status):
    assert launch.status_of_ranks(exitcodes) == status


def test_threads_are_the_cores_shared_by_the_ranks_unless_given(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    before = torch.get_num_threads()
    try:
        assert launch.set_num_threads(0, 3) == 2 == torch.get_num_threads()
        assert launch.set_num_threads(0, 16) == 1
        assert launch.set_num_threads(5, 3) == 5 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_a_broken_connection_is_recognised_through_its_wrappings():
    try:
        try:
            raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer [127.0.0.1]:10145")
        except RuntimeError as error:
            raise ValueError("while saving") from error
    except ValueError as wrapped:
        assert launch.lost_a_peer(wrapped)
    assert not launch.lost_a_peer(ValueError("shapes differ"))
