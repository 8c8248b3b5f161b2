"""What becomes of updates that are not finite, and of ranks that drift apart: named, never saved, and exact."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.resume.harness import assert_same_run, config, load, read_log, run_to_status, session

SHARDING = {
    "whole": {},
    "zero": {"zero_sharding": "os"},
    "fully_sharded": {"ddp_backend": "fully_sharded"},
}


def faulty(
    run_dir: Path, bad: list[str], action: str = "stop", sharding: str = "whole", ranks: int = 1, **common
) -> dict:
    """53 samples an epoch, 8 an update, whatever the ranks: seven updates, the last of them of five samples."""
    return config(
        run_dir,
        task={"_target_": "tests.resume.faulty.Faulty", "bad": bad},
        common={"on_nonfinite": action, **common},
        dataset={"batch_size": 4},
        optimization={"max_update": 14, "update_freq": {1: 2, 2: 1}[ranks]},
        checkpoint={"save_interval_updates": 4},
        distributed_training=SHARDING[sharding],
    )


def all_finite(nest) -> bool:
    if isinstance(nest, dict):
        return all(map(all_finite, nest.values()))
    if isinstance(nest, (list, tuple)):
        return all(map(all_finite, nest))
    return not isinstance(nest, torch.Tensor) or bool(torch.isfinite(nest).all())


def through_and_stopped(tmp_path: Path, ranks: int, stops: list[str], **settings) -> Path:
    """The folder of a run that was never stopped, after it was compared with one that was."""
    run_to_status(faulty(tmp_path / "through", ranks=ranks, **settings), 0, ranks)
    cfg = faulty(tmp_path / "stopped", ranks=ranks, **settings)
    for stop in stops:
        run_to_status(cfg, 75, ranks, stop)
    run_to_status(cfg, 0, ranks)
    assert_same_run(tmp_path / "through", tmp_path / "stopped")
    events = [
        [
            {k: v for k, v in line.items() if k not in ("path", "wall")}
            for line in read_log(tmp_path / name, "nonfinite", "rollback")
        ]
        for name in ("through", "stopped")
    ]
    assert events[0] == events[1]
    return tmp_path / "through"


SKIPS = [
    ("whole", 1, "input"),
    pytest.param("zero", 2, "gradient", marks=pytest.mark.slow),
    ("fully_sharded", 2, "input"),
]


@pytest.mark.parametrize("sharding, ranks, kind", SKIPS)
def test_a_skipped_update_changes_nothing_but_the_position_and_a_resume_in_the_middle_is_exact(
    tmp_path, sharding, ranks, kind
):
    # The update after four is left out, then one at the end of the first epoch; the stop comes between the two.
    run_dir = through_and_stopped(
        tmp_path, ranks, ["6:0:0:SIGTERM"], bad=[f"1:40:{kind}", f"1:53:{kind}"], action="skip", sharding=sharding
    )
    state = load(run_dir)
    assert all_finite(state) and state["extra_state"]["nonfinite"]["count"] == 2
    events = read_log(run_dir, "nonfinite")
    assert [(e["num_updates"], e["count"], e["rank"]) for e in events] == [(4, 1, ranks - 1), (5, 2, ranks - 1)]
    assert [e["what"] for e in events] == ["the loss (nan)" if kind == "input" else "the gradient of scale"] * 2
    assert [line["num_updates"] for line in read_log(run_dir, "train")] == list(range(1, 15))
    assert state["extra_state"]["train_iterator"]["epoch"] == 3  # 14 updates and two that were left out


ROLLBACKS = [
    pytest.param("whole", 1, "input", marks=pytest.mark.slow),
    ("zero", 2, "parameter"),
    pytest.param("fully_sharded", 2, "parameter", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("sharding, ranks, kind", ROLLBACKS)
def test_a_rollback_goes_on_behind_the_bad_data_and_a_resume_in_the_middle_is_exact(tmp_path, sharding, ranks, kind):
    # Checkpoints after 4, 7 (an epoch's end), 8, 12 updates. Bad is the sixth, and the third of the second epoch.
    run_dir = through_and_stopped(
        tmp_path,
        ranks,
        ["5:0:0:SIGTERM", "6:0:0:SIGTERM"],
        bad=[f"1:48:{kind}", f"2:24:{kind}"],
        action="rollback",
        sharding=sharding,
    )
    state = load(run_dir)
    assert all_finite(state) and state["extra_state"]["nonfinite"]["count"] == 2
    first, second = read_log(run_dir, "rollback")
    assert (first["num_updates"], first["count"], second["count"]) == (4, 1, 2)
    losses = read_log(run_dir, "train")
    assert [line["num_updates"] for line in losses] == list(range(1, 15)) and all(
        math.isfinite(e["loss"]) for e in losses
    )


def test_the_limit_ends_the_run_and_the_checkpoint_stays_healthy(tmp_path):
    for action in ("skip", "rollback"):
        cfg = faulty(tmp_path / action, ["1:40:input", "1:48:input"], action, max_nonfinite=1)
        error = session(cfg)[0].error
        assert "NonFiniteError" in error and "common.max_nonfinite=1" in error and "common.max_nonfinite=3" in error
        assert all_finite(load(tmp_path / action))
        run_to_status(faulty(tmp_path / action, ["1:40:input", "1:48:input"], action, max_nonfinite=3), 0)


def test_what_cannot_be_mended_ends_the_run_by_name(tmp_path):
    error = session(faulty(tmp_path / "a", ["1:40:parameter"], "skip"))[0].error
    assert "parameter first.weight" not in error and "parameter scale is not finite (update 6, rank 0)" in error, error
    assert "common.on_nonfinite=rollback" in error and all_finite(load(tmp_path / "a"))
    error = session(faulty(tmp_path / "b", ["1:24:input"], "rollback"))[0].error
    assert "There is no checkpoint of this run yet" in error and "the loss (nan)" in error
    assert not list((tmp_path / "b").rglob("*.pt"))


def test_a_parameter_that_is_bad_at_a_stop_is_not_saved_and_the_next_start_goes_back(tmp_path):
    run_to_status(faulty(tmp_path / "through", ["1:40:parameter"], "rollback"), 0)
    cfg = faulty(tmp_path / "stopped", ["1:40:parameter"], "rollback")
    run_to_status(cfg, 75, stop="5:0:0:SIGTERM")
    assert load(tmp_path / "stopped")["optimizer_history"][-1]["num_updates"] == 4
    run_to_status(cfg, 0)
    assert_same_run(tmp_path / "through", tmp_path / "stopped")


def test_ranks_that_drift_apart_are_found_at_the_next_comparison(tmp_path):
    cfg = faulty(tmp_path, ["1:16:drift"], ranks=2, check_replicas_every=3)
    for outcome in session(cfg, 2):
        assert "drifted apart at update 3: parameter head.weight of rank 1" in outcome.error, outcome.error
    assert not list(tmp_path.rglob("*.pt"))
