"""A rank that stands still is named with its update, its phase and a stack; one that gets on slowly is left alone."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_utils.config import DistributedTrainingConfig
from distributed_utils.heartbeat import PHASES, Heartbeat, Progress, ProgressMeter, culprit, place_of
from distributed_utils.stack_dumps import stack_of_thread
from tests import faults
from tests.commands import ROOT

TIMEOUT_S = 3.0
MORE_S = 10.0  # to be found, told, and for all ranks to end


def text_of(rank: int, place: str) -> str:
    return rf"fairtrain: rank {rank}: stalled {place}: no progress for \d+ s\. .*heartbeat_timeout=6\."


# -------------------------------------------------------------------------------------- runs, several at the same time

SLOW_VALIDATION = {"dataset": {"valid_subset": "valid"}, "task": {"num_valid": 40}}
STANDSTILLS = {
    "stopped": dict(moment="forward", deed="stop"),
    "worker": dict(moment="dataset", deed="sleep", dataset={"num_workers": 2}),
    "forward": dict(moment="forward", deed="sleep", rank=0),
    # Longer than the heartbeat's limit, and than that of the process group.
    "slow validation": dict(moment="validation", deed="slow", count=1, **SLOW_VALIDATION),
    "slow disk": dict(task={"slow_disk": 1}, checkpoint={"save_interval_updates": 0}),
}
SHORT = {"timeout_s": 8.0, "heartbeat_timeout": TIMEOUT_S}


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    def one(name):
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        slow = {"distributed_training": SHORT} if name.startswith("slow") else {}
        return name, faults.run(folder, 2, **{**slow, **STANDSTILLS[name]})

    with ThreadPoolExecutor(3) as pool:
        return dict(pool.map(one, STANDSTILLS))


UNABLE_TO_LOG = ((0, "hold the interpreter", "forward"), (0, "stop", "saving"))


def check_named(story, rank: int, place: str, logged: bool = True) -> None:
    assert len(re.findall(text_of(rank, place), story.output)) == 1, story.output
    assert story.output.count("fairtrain: ") == 1 and len(story.of(1 - rank)) <= 1, story.output
    assert 1 in story.statuses and 0 not in story.statuses
    assert f"stalled {place}" in story.log or not logged
    assert story.seconds < faults.within(TIMEOUT_S + MORE_S)


def test_a_stopped_rank_is_named_by_its_neighbour_with_the_stack_that_it_was_stopped_at(stories):
    story = stories["stopped"]
    check_named(story, 1, "in update 3, phase forward")
    assert story.statuses == [1, -signal.SIGKILL]  # it hears nothing else
    assert "is stopped (state T, as by SIGSTOP)" in story.output
    assert re.search(
        r'compute_loss\n  File ".*faults\.py", line \d+ in _at\n  File ".*", line \d+ in <lambda>', story.output
    )


def test_a_stuck_data_worker_is_named_with_where_it_is_stuck(stories):
    story = stories["worker"]
    check_named(story, 1, "in update 3, phase data")
    assert re.search(r"child process data-worker-\d \(pid \d+\) is asleep", story.output)
    assert re.search(r'line \d+ in __getitem__\n  File ".*faults\.py", line \d+ in _at\n', story.output)


def test_a_rank_stuck_in_user_code_is_named_not_those_who_wait_for_it(stories):
    check_named(stories["forward"], 0, "in update 3, phase forward")
    assert "in compute_loss" in stories["forward"].output


@pytest.mark.parametrize("name", ["slow validation", "slow disk"])
def test_a_rank_that_gets_on_slowly_is_no_hang_however_long_the_others_wait(stories, name):
    assert stories[name].statuses == [0, 0], stories[name].output
    assert stories[name].output == ""
    assert (stories[name].folder / "run" / "checkpoints" / "checkpoint_last.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment, deed, place, more",
    [
        ("start-up", "sleep", "before update 1, phase start-up", {"count": 1}),
        ("dataset", "sleep", "in update 2, phase data", {}),
        ("collate", "compute", "in update 3, phase data", {}),
        ("dataset", "stop", "in update 2, phase data", {"dataset": {"num_workers": 1}}),
        ("forward", "hold the interpreter", "in update 3, phase forward", {}),
        ("backward", "sleep", "in update 3, phase backward", {}),
        ("optimizer", "sleep", "in update 3, phase optimizer", {}),
        ("validation", "compute", "after update 6, phase validation", {"dataset": {"valid_subset": "valid"}}),
        ("task", "sleep", "after update 6, phase task", {"dataset": {"valid_subset": "valid"}, "count": 1}),
        ("saving", "sleep", "after update 3, phase saving", {"count": 2}),  # the first asks how large it will be
        ("saving", "stop", "after update 3, phase saving", {"count": 2}),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_phase_has_its_name(tmp_path, moment, deed, place, more, rank):
    # The log is rank 0's, which writes it from the end of start-up on and while it is itself.
    logged = moment != "start-up" and (rank, deed, moment) not in UNABLE_TO_LOG
    check_named(faults.run(tmp_path, 2, moment, deed, rank=rank, **more), rank, place, logged)


@pytest.mark.slow
def test_a_rank_stuck_while_it_loads_is_named(tmp_path):
    assert faults.run(tmp_path, 2, optimization={"max_update": 3}).statuses == [0, 0]
    (tmp_path / "output").unlink()
    story = faults.run(tmp_path, 2, "loading", "sleep", count=1)
    check_named(story, 1, "before update 1, phase loading", logged=False)


# ------------------------------------------------------------------------------------------------------- the whole command

COMMAND = [
    "task._target_=tests.faults.Faulty",
    "task_name=faulty",
    "+task.moment=dataset",
    "+task.rank=0",
    "+task.count=9",
    "+task.num_samples=64",
    "common.cpu=true",
    "common.log_format=none",
    "dataset.batch_size=2",
    "dataset.valid_subset=null",
    "optimization.max_update=9",
    "checkpoint.save_interval_updates=1",
    "distributed_training.heartbeat_timeout=3",
    "run_dir=run",
]


def command(tmp_path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *launcher, "-m", "trainer", *COMMAND, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=faults.within(60),
    )


def test_one_process_stuck_in_its_data_ends_with_1_and_goes_on_when_started_again(tmp_path):
    ended = command(tmp_path, "+task.deed=sleep")
    assert ended.returncode == 1
    assert re.search(r"fairtrain: stalled in update 5, phase data: no progress for \d+ s", ended.stderr), ended.stderr
    assert "faults.py" in ended.stderr and "in __getitem__" in ended.stderr
    again = command(tmp_path, "+task.deed=none")
    assert again.returncode == 0, again.stderr
    assert "continue from run/checkpoints/checkpoint_last.pt (update 4" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.slow
def test_one_process_whose_interpreter_is_held_is_ended_too(tmp_path):
    ended = command(tmp_path, "+task.deed=hold the interpreter")
    assert ended.returncode == 1
    assert "sleep_holding_the_interpreter" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True], ids=["our launcher", "torchrun"])
@pytest.mark.parametrize("deed", ["stop", "sleep"])
def test_the_job_of_a_launcher_ends_and_says_it_once(tmp_path, torchrun, deed):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if torchrun else ()
    ended = command(
        tmp_path,
        f"+task.deed={deed}",
        "task.rank=1",
        "distributed_training.distributed_world_size=2",
        launcher=launcher,
    )
    assert ended.returncode == 1
    assert len(re.findall(r"fairtrain: rank 1: stalled in update 5, phase data", ended.stderr)) == 1, ended.stderr
    assert "was killed by" not in ended.stderr
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]


# ------------------------------------------------------------------------------------------------------------- who is to blame

ranks = st.lists(
    st.builds(Progress, st.integers(0, 3), st.integers(0, len(PHASES) - 1), st.floats(0, 20), st.booleans()), min_size=1
)


@given(ranks)
def test_the_one_to_blame_stands_still_and_only_one_who_waits_for_nobody_is_blamed_while_another_gets_on(progress):
    rank = culprit(progress, 10.0)
    stalled = [one for one in progress if one.stalled_s >= 10.0]
    if rank is None:
        assert all(one.is_waiting for one in stalled) and len(stalled) < len(progress)
        return
    assert progress[rank].stalled_s >= 10.0
    assert not progress[rank].is_waiting or (len(stalled) == len(progress) and all(one.is_waiting for one in progress))
    alike = [one for one in stalled if one.is_waiting == progress[rank].is_waiting]
    assert min((one.num_updates, one.phase) for one in alike) == (progress[rank].num_updates, progress[rank].phase)


def test_places_are_told_as_a_person_counts_updates():
    place = {phase: place_of((7, PHASES.index(phase))) for phase in PHASES}
    assert place["data"] == "in update 8, phase data" and place["saving"] == "after update 7, phase saving"
    assert place_of((0, PHASES.index("start-up"))) == "before update 1, phase start-up"


def test_where_there_are_no_beats_reading_writing_and_computing_count_as_progress(tmp_path):
    heartbeat = Heartbeat()
    heartbeat.enter("saving", 4)
    meter = ProgressMeter(heartbeat)
    meter.look()
    time.sleep(0.2)
    assert meter.look().stalled_s >= 0.2
    (tmp_path / "bytes").write_bytes(bytes(1000))
    assert meter.look().stalled_s == 0
    time.sleep(0.05)
    while time.process_time() - meter._cpu_s < 0.1:
        pass
    assert meter.look().stalled_s == 0
    heartbeat.enter("data")
    meter.look()
    time.sleep(0.05)
    (tmp_path / "bytes").write_bytes(bytes(1000))
    assert meter.look().stalled_s > 0  # what its log or its savers write is not the reading of a sample
    heartbeat.enter("data")
    assert meter.look().stalled_s == 0


def test_the_main_thread_is_found_in_a_dump_of_all():
    dump = (
        "Thread 0x00007f0000000001 (most recent call first):\n"
        '  File "a.py", line 1 in wait\n\n'
        "Current thread 0x00007f0000000002 (most recent call first):\n"
        '  File "b.py", line 2 in inner\n  File "b.py", line 3 in outer\n'
    )
    assert stack_of_thread(dump, 0x7F0000000002) == '  File "b.py", line 3 in outer\n  File "b.py", line 2 in inner'
    assert stack_of_thread(dump, 0x7F0000000001) == '  File "a.py", line 1 in wait'


@pytest.mark.parametrize(
    "values, words",
    [
        ({"heartbeat_timeout": 0}, "heartbeat_timeout=-1"),
        ({"heartbeat_timeout": -3}, "heartbeat_timeout=-1"),
        ({"heartbeat_timeout": 1800}, "timeout_s=3600"),
    ],
)
def test_limits_that_cannot_work_are_refused_with_what_to_type(values, words):
    (problem,) = DistributedTrainingConfig(**values).problems()
    assert words in problem
    assert DistributedTrainingConfig(heartbeat_timeout=600).problems() == []
