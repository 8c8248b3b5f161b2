"""Every way to be stopped: one save of one update on all ranks, status 75, and no trace of it at the end."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import pytest

from checkpoint_utils import verify_checkpoint
from tests.commands import start
from tests.dist.harness import run_ranks_to_any_end
from tests.resume.harness import _session, assert_same_run, config, load, read_log

END = 22
STOPPED_AT_START = 0


def make_config(run_dir, workers: int = 0, **checkpoint) -> dict:
    return config(
        run_dir,
        task={"_target_": "tests.resume.stopping.Stopping"},
        dataset={"batch_size": 4, "batch_size_valid": 4, "num_workers": workers, "validate_interval_updates": 5},
        checkpoint={"save_interval_updates": 3, "keep_interval_updates": 2, **checkpoint},
    )


def session(cfg: dict, ranks: int, signals: str = "") -> list:
    """Each rank's status; a start that is refused for a stop raises on all ranks what stands for 75."""
    outcomes = run_ranks_to_any_end(_session, ranks, cfg, timeout=120, env={"TEST_SIGNALS": signals or "|||"})
    refused = ["stopped by SIG" in outcome.error.splitlines()[-1] if outcome.error else False for outcome in outcomes]
    return [
        75 if no else outcome.value if outcome.finished else outcome.exitcode for no, outcome in zip(refused, outcomes)
    ]


def saved_at(run_dir) -> int:
    return load(run_dir)["optimizer_history"][-1]["num_updates"]


def assert_nothing_is_harmed(run_dir) -> None:
    folder = run_dir / "checkpoints"
    for name in os.listdir(folder):
        if name.endswith(".pt"):
            assert verify_checkpoint(folder / name) == [], name


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    """The runs that nobody stopped, by the number of ranks and the way of saving."""
    runs = {}

    def get(ranks: int, asynchronous: bool = False):
        key = (ranks, asynchronous)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp(f"through_{ranks}")
            cfg = make_config(runs[key], write_checkpoints_asynchronously=asynchronous)
            assert session(cfg, ranks) == [0] * ranks
        return runs[key]

    return get


# (the signals, the update that is saved for them); a session each, one after the other, of one run of two ranks
TABLE = [
    ("data|1|SIGTERM|self", STOPPED_AT_START),
    ("update 1.0|0|SIGUSR1|group", 1),
    ("update 3.0|*|SIGINT|group", 3),  # a Ctrl-C reaches everyone; a save is due there anyway
    ("load|*|SIGTERM|group", STOPPED_AT_START),
    ("write 6|1|SIGTERM,SIGUSR1,SIGTERM|self", 7),  # heard in the update after the save
    ("valid 10|1|SIGINT|self", 11),
    ("link 12|0|SIGTERM,SIGTERM|group", 13),
    ("update 14.0|*|SIGTERM,SIGINT,SIGUSR1|group", 14),
    ("rename 18|0|SIGUSR1|self", 19),
]


@pytest.mark.parametrize("table", [TABLE[::2], pytest.param(TABLE, marks=pytest.mark.slow)], ids=["half", "all"])
def test_two_ranks_stopped_in_every_way_save_once_and_leave_no_trace(tmp_path, through, table):
    cfg = make_config(tmp_path, workers=1)
    before = 0
    for signals, saved in table:
        assert session(cfg, 2, signals) == [75, 75], signals
        now = saved or before
        if now:
            assert saved_at(tmp_path) == now, signals
            assert [line["num_updates"] for line in read_log(tmp_path, "checkpoint")].count(now) == 1, signals
        else:
            assert not (tmp_path / "log.jsonl").exists() and not (tmp_path / "checkpoints").exists()
        assert [line["num_updates"] for line in read_log(tmp_path, "train")] == list(range(1, now + 1)) if now else True
        before = now
    assert session(cfg, 2, f"update {END}.0|1|SIGTERM|self") == [0, 0]  # the run was done
    assert_same_run(through(2), tmp_path)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "place", ["write 6", pytest.param("link 6", marks=slow), pytest.param("update 7.0", marks=slow)]
)
def test_a_second_interrupt_ends_at_once_and_harms_nothing(tmp_path, through, place):
    cfg = make_config(tmp_path, workers=1)
    assert session(cfg, 1, f"{place}|0|SIGINT,SIGINT|group") == [1]
    assert_nothing_is_harmed(tmp_path)
    assert saved_at(tmp_path) == (6 if place.startswith("update") else 5)  # 5 was the best so far
    assert session(cfg, 1) == [0]
    assert_same_run(through(1), tmp_path)


@pytest.mark.parametrize("wish", ["finetune_from_model", pytest.param("restore_file", marks=slow)])
def test_the_same_command_every_time_continues_the_run_whatever_it_began_from(tmp_path, through, wish):
    """Also when what it began from is gone, and when the run was killed before its first save."""
    source = tmp_path / "source.pt"
    os.link(through(1) / "checkpoints" / "checkpoint_last.pt", source)
    first = END + 1 if wish == "restore_file" else 1
    cfg = make_config(tmp_path / "run", **{wish: str(source)})
    cfg["optimization"]["max_update"] = first + 7
    assert session(cfg, 1, f"update {first}.0|0|SIGKILL|self") == [-signal.SIGKILL]
    assert session(cfg, 1, f"update {first}.0|0|SIGTERM|self") == [75]
    assert session(cfg, 1, f"update {first + 2}.0|0|SIGKILL|self") == [-signal.SIGKILL]
    source.unlink()
    assert session(cfg, 1, f"update {first + 3}.0|0|SIGTERM|self") == [75]
    assert session(cfg, 1) == [0]
    assert [line["num_updates"] for line in read_log(tmp_path / "run", "train")] == list(range(first, first + 8))
    own = [line["path"] for line in read_log(tmp_path / "run", "resume") if line["num_updates"] >= first]
    assert len(own) == 3 and all(path.startswith(str(tmp_path / "run")) for path in own)


# The launcher, as a person starts it

COMMAND = [
    "+task._target_=tests.resume.stopping.Stopping",
    "common.cpu=true",
    "common.num_threads=1",
    "dataset.batch_size=4",
    "dataset.num_workers=1",
    "optimization.lr=0.01",
    "distributed_training.distributed_world_size=2",
    "run_dir=run",
]


def wait_for_updates(run_dir, count: int) -> None:
    log, deadline = run_dir / "log.jsonl", time.monotonic() + 90
    while not log.exists() or log.read_text().count('"event": "train"') < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals",
    [[signal.SIGINT], [signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]],
    ids=lambda signals: "+".join(s.name for s in signals),
)
def test_what_the_launchers_group_is_told_all_ranks_do(tmp_path, signals):
    running = start(*COMMAND, "optimization.max_update=1000000", cwd=tmp_path)
    wait_for_updates(tmp_path / "run", 3)
    for signum in signals:
        os.killpg(running.process.pid, signum)
    finished = running.wait(90)
    assert finished.status == 75, finished.output
    last = saved_at(tmp_path / "run")
    assert [line["num_updates"] for line in read_log(tmp_path / "run", "checkpoint")].count(last) == 1
    assert [line["num_updates"] for line in read_log(tmp_path / "run", "train")] == list(range(1, last + 1))
    finished = start(*COMMAND, f"optimization.max_update={last + 2}", cwd=tmp_path).wait(90)
    assert finished.status == 0, finished.output
    assert saved_at(tmp_path / "run") == last + 2


# All of it

PLACES = [
    "build",
    "data",
    "load",
    "update 1.0",
    "update {}.1",
    "update {}.0",
    "valid 5",
    "valid 10",
    "state {}",
    "write {}",
    "rename {}",
    "link {}",
]
SIGNALS = ["SIGTERM", "SIGUSR1", "SIGINT", "SIGTERM,SIGTERM", "SIGINT,SIGTERM", "SIGUSR1,SIGINT"]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks, workers", [(1, 0), (1, 2), (2, 0), (3, 1)])
def test_any_sequence_of_stops_leaves_no_trace(tmp_path, through, ranks, workers, asynchronous):
    choose = random.Random(ranks * 10 + workers + asynchronous)
    cases = list(itertools.product(PLACES, SIGNALS, ["0", str(ranks - 1), "*"], ["self", "group"]))
    for number in range(4):
        run_dir = tmp_path / f"run{number}"
        cfg = make_config(run_dir, workers, write_checkpoints_asynchronously=asynchronous)
        for place, names, rank, how in choose.sample(cases, 6):
            signals = f"{place.format(choose.randrange(1, END))}|{rank}|{names}|{how}"
            status = session(cfg, ranks, signals)
            assert status in ([75] * ranks, [0] * ranks), (signals, status)
        assert session(cfg, ranks) == [0] * ranks
        assert_same_run(through(ranks, asynchronous), run_dir)
