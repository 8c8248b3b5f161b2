"""One rank fails, in any way: all ranks end within ten seconds, and the first cause is told once."""

import signal

import pytest

from tests import faults

END_S = 10.0

# moment, deed, further settings, words of the cause
FAILURES = {
    "dataset raises": ("dataset", "raise", {}, "KeyError: 'item k'"),
    "worker raises": ("dataset", "raise", {"dataset": {"num_workers": 1}}, "KeyError: 'item k'"),
    "worker killed": ("dataset", "kill", {"dataset": {"num_workers": 1}}, "was killed by SIGKILL"),
    "no memory": ("forward", "memory", {}, "MemoryError: no room for the batch"),
    "no device memory": ("backward", "torch memory", {}, "CUDA out of memory"),
    "leaves": ("forward", "exit", {}, "SystemExit"),
    "validation raises": (
        "validation",
        "raise",
        {"count": 1, "dataset": {"valid_subset": "valid"}},
        "KeyError: 'item k'",
    ),
    "save raises": ("saving", "raise", {"count": 1}, "KeyError: 'item k'"),
    "start-up raises": ("start-up", "raise", {"count": 1}, "KeyError: 'item k'"),
}
QUICK = ("worker killed", "no memory")


def check(story, cause: str, rank: int = 1) -> None:
    assert None not in story.statuses and 0 not in story.statuses, story
    told = [line for line in story.output.splitlines() if line.startswith("fairtrain: ")]
    assert len(told) == 1 and told[0].startswith(f"fairtrain: rank {rank}: "), story.output
    assert cause in story.output, story.output
    assert len(story.of(1 - rank)) <= 1 and not story.of(rank)
    assert story.seconds < faults.within(END_S)


def fail(tmp_path, name: str, rank: int) -> None:
    moment, deed, more, cause = FAILURES[name]
    check(faults.run(tmp_path, 2, moment, deed, rank=rank, **more), cause, rank)


@pytest.mark.parametrize("name", QUICK)
def test_the_first_cause_is_told_once_and_all_ranks_end(tmp_path, name):
    fail(tmp_path, name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAILURES)
def test_the_same_for_every_failure_on_every_rank(tmp_path, name, rank):
    fail(tmp_path, name, rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_by_its_neighbour(tmp_path, rank):
    story = faults.run(tmp_path, 2, "forward", "kill", rank=rank)
    assert story.statuses[rank] == -signal.SIGKILL and story.statuses[1 - rank] == 1
    assert story.output.splitlines() == [f"rank {1 - rank} ends: rank {rank} failed (ProcessDied)"]
    assert story.seconds < faults.within(END_S)
