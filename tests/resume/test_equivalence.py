"""A run that was stopped and continued in new processes equals the run that never stopped, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.harness import assert_same_run, config, read_log, run_to_status

# With 53 samples and batches of 4: an epoch has ceil(53 / (4 * update_freq * ranks)) updates.
STOPS = ["mid_epoch", "mid_accumulation", "epoch_end", "after_validation"]


def make_config(run_dir: Path, ranks: int, workers: int, precision: str) -> dict:
    return config(
        run_dir,
        common={"seed": 7, "log_format": "none", "cpu": True, "num_threads": 1, "bf16": precision == "bf16"},
        dataset={
            "batch_size": 4,
            "batch_size_valid": 4,
            "num_workers": workers,
            "validate_interval_updates": 5,
        },
        optimization={"max_update": 12, "lr": 0.01, "clip_norm": 1.0, "update_freq": 2},
        checkpoint={"save_interval_updates": 4, "keep_interval_updates": 2, "keep_best_checkpoints": 2},
    )


def stop_for(kind: str, ranks: int) -> str:
    """TEST_STOP for a kind of point: the last rank gets the signal, all must agree."""
    updates_per_epoch = -(-53 // (4 * 2 * ranks))
    update, micro_batch = {
        "mid_epoch": (updates_per_epoch + 1, 0),
        "mid_accumulation": (updates_per_epoch + 1, 1),
        "epoch_end": (updates_per_epoch, 0),
        "after_validation": (5, 0),  # the validation of update 5 is owed when the run continues
    }[kind]
    return f"{update}:{micro_batch}:{ranks - 1}:SIGTERM"


@pytest.fixture(scope="session")
def through(tmp_path_factory):
    """The runs that never stopped, one for each arrangement that a test asks for."""
    runs: dict[tuple, Path] = {}

    def get(ranks: int, precision: str) -> Path:
        # Workers change nothing, so one run without workers is the reference for both.
        if (ranks, precision) not in runs:
            run_dir = tmp_path_factory.mktemp(f"through_{ranks}_{precision}")
            run_to_status(make_config(run_dir, ranks, 0, precision), 0, ranks)
            runs[ranks, precision] = run_dir
        return runs[ranks, precision]

    return get


def stopped(tmp_path, through, ranks: int, workers: int, kind: str, precision: str) -> None:
    cfg = make_config(tmp_path, ranks, workers, precision)
    run_to_status(cfg, 75, ranks, stop=stop_for(kind, ranks))
    run_to_status(cfg, 0, ranks)
    without_workers = through(ranks, precision)
    for event in ("train", "valid", "epoch"):
        assert read_log(tmp_path, event), event
    assert_same_run(without_workers, tmp_path)


@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_stopped_run_continues_bit_by_bit(tmp_path, through, ranks, kind):
    stopped(tmp_path, through, ranks, 2 if kind == "mid_epoch" else 0, kind, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_stopped_run_continues_bit_by_bit_in_every_arrangement(tmp_path, through, ranks, workers, kind, precision):
    stopped(tmp_path, through, ranks, workers, kind, precision)


def test_three_preemptions_in_one_epoch_leave_no_trace(tmp_path, through):
    cfg = make_config(tmp_path, 1, 2, "fp32")
    for update in (2, 3, 5):
        run_to_status(cfg, 75, 1, stop=f"{update}:0:0:SIGUSR1")
    run_to_status(cfg, 0, 1)
    assert_same_run(through(1, "fp32"), tmp_path)
