"""Two starts, one folder: one lives, wherever they are. Real processes, killed and stopped for real."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.commands import start
from tests.resume.elsewhere import be_another_host, be_quick
from tests.resume.harness import load, read_log
from trainer import lease
from trainer.errors import FolderLostError
from trainer.lease import HeldError, Lease, Owner, jobs_of
from trainer.run_folder import folder_of_checkpoints

PERIOD = 2.5


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("BEAT_S", "PERIOD_S", "PATIENCE"):
        monkeypatch.setattr(lease, name, getattr(lease, name))
    be_quick(PERIOD)
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


class Process:
    """A process that takes the folder and does as it is told. host: None for this one."""

    def __init__(self, folder, host=None, env=None) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_obey, args=(theirs, folder, host, env or {}), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, timeout: float = 30):
        assert self._pipe.poll(timeout), "it says nothing"
        return self._pipe.recv()

    def ask(self, word: str):
        self._pipe.send(word)
        return self.hear()

    def kill(self, signum=signal.SIGKILL) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, signum)
        if signum == signal.SIGKILL:
            self.process.join()


def _obey(pipe, folder, host, env) -> None:
    os.environ.update(env)
    be_quick(PERIOD)
    if host is not None:
        be_another_host(host)
    mine = Lease(folder)
    try:
        mine.take()
        pipe.send("taken")
        while True:
            word = pipe.recv()
            try:
                {"check": mine.check, "check surely": lambda: mine.check(surely=True), "close": mine.close}[word]()
                pipe.send("fine")
            except FolderLostError as error:
                pipe.send(str(error))
    except HeldError as error:
        pipe.send(f"refused: {error}")


@pytest.fixture
def process(tmp_path):
    made = []

    def make(*args, **kwargs):
        made.append(Process(tmp_path, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def test_the_second_is_refused_while_the_first_lives_on_another_host(process):
    first = process("a")
    assert first.hear() == "taken"
    for host in ("b", None):
        assert process(host).hear() == f"refused: pid {first.process.pid} on {os.uname().nodename}"
    assert first.ask("check surely") == "fine"


def test_another_host_takes_over_after_a_period_without_a_beat_and_not_before(process):
    first = process("a")
    assert first.hear() == "taken"
    first.kill()
    begun = time.monotonic()
    second = process("b")
    assert second.hear() == "taken" and time.monotonic() - begun > PERIOD
    assert second.ask("check surely") == "fine"


def test_a_start_that_has_let_go_is_followed_at_once(process, monkeypatch):
    monkeypatch.setattr(lease, "PERIOD_S", 3600.0)
    first = process("a")
    assert first.hear() == "taken" and first.ask("close") == "fine"
    assert process("b").hear() == "taken"


def test_a_dead_one_of_this_host_is_followed_at_once_with_and_without_locks(tmp_path, process, monkeypatch):
    for host in (None, "a"):
        first = process(host)
        assert first.hear() == "taken"
        first.kill()
        monkeypatch.setattr(lease, "PERIOD_S", 3600.0)
        if host is not None:
            monkeypatch.setattr(lease, "_boot_id", lambda: host)
            monkeypatch.setattr(lease, "_try_lock", lambda *_: None)
        mine = Lease(tmp_path)
        mine.take()
        mine.close()


def test_the_former_owner_wakes_up_and_does_not_write(tmp_path, process):
    first = process("a")
    assert first.hear() == "taken"
    first.kill(signal.SIGSTOP)
    second = process("b")
    assert second.hear() == "taken"
    first.kill(signal.SIGCONT)
    said = first.ask("check")  # which reads nothing, unless it stood still
    assert "taken over by another start" in said and f"pid {second.process.pid}" in said
    assert first.ask("close") == "fine"
    time.sleep(0.3)  # some beats
    assert second.ask("check surely") == "fine"
    assert Owner.from_bytes((tmp_path / ".lock").read_bytes()).pid == second.process.pid


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"])
def test_a_member_of_the_same_job_takes_over_at_once(process, monkeypatch, name):
    monkeypatch.setattr(lease, "PERIOD_S", 3600.0)
    first = process("a", env={name: "4711"})
    assert first.hear() == "taken"
    second = process("b", env={name: "4711"})
    assert second.hear() == "taken"
    assert "taken over" in first.ask("check surely")
    assert process("c", env={name: "4712"}).hear().startswith("refused")


def test_a_launch_without_a_name_is_nobodys_job():
    assert jobs_of({"TORCHELASTIC_RUN_ID": "none"}) == jobs_of({}) == ()


@pytest.mark.parametrize("there_was_one", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_many_that_start_at_once_one_takes_the_folder(process, there_was_one):
    if there_was_one:
        first = process("a")
        assert first.hear() == "taken"
        first.kill()
    starts = [process(f"host {i}") for i in range(5)]
    said = [one.hear() for one in starts]
    assert said.count("taken") == 1 and all(word == "taken" or word.startswith("refused") for word in said), said
    assert starts[said.index("taken")].ask("check surely") == "fine"


def test_a_claim_that_a_killed_start_left_is_removed(tmp_path):
    (tmp_path / ".lock.claim").write_text("")
    mine = Lease(tmp_path)
    mine.take()
    mine.close()
    assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize("content", [b"", b"123 host\n", b"\0" * 1024, b"{}", b'{"pid": 1, "jobs": 3}', b"x" * 5000])
def test_what_cannot_be_read_is_nobodys(tmp_path, content):
    (tmp_path / ".lock").write_bytes(content)
    mine = Lease(tmp_path)
    mine.take()
    assert Owner.from_bytes((tmp_path / ".lock").read_bytes()).pid == os.getpid()
    assert (tmp_path / ".lock").stat().st_size == 1024
    mine.close()


def test_a_run_stands_its_folder_deleted(tmp_path):
    mine = Lease(tmp_path)
    mine.take()
    (tmp_path / ".lock").unlink()
    with pytest.raises(FolderLostError, match="gone"):
        mine.check(surely=True)
    mine.close()


def test_beats_grow_and_threads_and_descriptors_do_not(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        mine = Lease(tmp_path)
        mine.take()
        deadline = time.monotonic() + 20
        while Owner.from_bytes((tmp_path / ".lock").read_bytes()).beat < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        mine.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "-u", "true"], capture_output=True).returncode != 0,
    reason="needs a namespace with a hostname of its own",
)
def test_another_hostname_is_another_host(tmp_path):
    """The lock reaches there, as on one machine, and decides nothing by itself; the beat does."""
    code = (
        "import sys; from pathlib import Path; from trainer import lease\n"
        "lease.BEAT_S, lease.PERIOD_S, lease.PATIENCE = 0.1, 3600.0, 0.5\n"
        "try:\n    lease.Lease(Path(sys.argv[1])).take(); print('taken')\nexcept lease.HeldError as e:\n    print(e)\n"
    )
    command = [
        "unshare",
        "-u",
        "sh",
        "-c",
        'hostname elsewhere && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        code,
        str(tmp_path),
    ]
    mine = Lease(tmp_path)
    mine.take()
    output = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert output.stdout == f"pid {os.getpid()} on {os.uname().nodename}\n", output.stderr
    mine.close()
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "taken\n"


# Whole runs

COMMAND = [
    "+task._target_=tests.resume.elsewhere.Toy",
    "common.cpu=true",
    "common.num_threads=1",
    "dataset.batch_size=4",
    "optimization.lr=0.01",
    "run_dir=run",
]


@pytest.mark.slow
@pytest.mark.parametrize("held, save_dir", [("shared", "shared"), ("other", "other/checkpoints")])
def test_two_runs_with_folders_of_their_own_do_not_share_one_of_checkpoints(tmp_path, held, save_dir):
    (tmp_path / held).mkdir()
    mine = Lease(tmp_path / held)
    mine.take()
    override = f"checkpoint.save_dir={save_dir}"
    refused = start(*COMMAND, "optimization.max_update=5", override, cwd=tmp_path, env={"TEST_HOST": "b"}).wait(60)
    assert refused.status == 2 and "checkpoint.save_dir" in refused.output and "alive" in refused.output, refused.output
    assert not (tmp_path / "run").exists() and os.listdir(tmp_path / held) == [".lock"]
    mine.close()


@pytest.mark.parametrize(
    "save_dir, locks, held",
    [
        ("run/checkpoints", [], None),
        ("run/checkpoints", ["run/checkpoints"], "run/checkpoints"),  # another run was told to save there
        ("other/checkpoints", ["other"], "other"),
        ("other/checkpoints", ["other", "other/checkpoints"], "other/checkpoints"),
        ("elsewhere", [], "elsewhere"),
    ],
)
def test_a_folder_of_checkpoints_is_held_by_whoever_else_may_write_to_it(tmp_path, save_dir, locks, held):
    for folder in locks:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / ".lock").touch()
    found = folder_of_checkpoints(tmp_path / save_dir, tmp_path / "run")
    assert found == (tmp_path / held if held else None)


def test_a_run_that_stood_still_is_taken_over_and_ends_without_writing(tmp_path):
    env = {"TEST_HOST": "a", "TEST_STOP": "20:0:0:SIGSTOP"}  # within an update: update 14, the epoch's end, is saved
    first = start(*COMMAND, "optimization.max_update=1000000", cwd=tmp_path, env=env)
    log, deadline = tmp_path / "run" / "log.jsonl", time.monotonic() + 90
    while psutil.Process(first.process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, first.output()
        time.sleep(0.05)
    saved = load(tmp_path / "run")["optimizer_history"][-1]["num_updates"]
    second = start(*COMMAND, f"optimization.max_update={saved + 3}", cwd=tmp_path, env={"TEST_HOST": "b"}).wait(90)
    assert second.status == 0, second.output
    names = sorted(os.listdir(tmp_path / "run" / "checkpoints"))
    text = log.read_text()
    first.kill(signal.SIGCONT)
    ended = first.wait(60)
    assert ended.status == 1 and "was taken over by another start" in ended.output and "Traceback" not in ended.output
    assert log.read_text() == text and sorted(os.listdir(tmp_path / "run" / "checkpoints")) == names
    assert load(tmp_path / "run")["optimizer_history"][-1]["num_updates"] == saved + 3
    assert [line["num_updates"] for line in read_log(tmp_path / "run", "train")] == list(range(1, saved + 4))
    assert json.loads((tmp_path / "run" / ".lock").read_text())["has_left"] is True
