"""A run whose optimizer state is shared out over ranks: stopped, continued, and taken up by other arrangements."""

from __future__ import annotations

import pytest

from tests.resume.harness import assert_same_run, config, first_difference, load, read_log, run_to_status

ZERO = {"zero_sharding": "os"}


@pytest.mark.parametrize("ranks, on_all_ranks", [(3, True), (4, False)])
def test_a_run_that_was_stopped_equals_the_one_that_was_not_and_the_one_without_zero(tmp_path, ranks, on_all_ranks):
    through, stopped, plain = (tmp_path / name for name in ("through", "stopped", "plain"))
    sections = {"checkpoint": {"load_checkpoint_on_all_dp_ranks": on_all_ranks}, "optimization": {"max_update": 9}}
    run_to_status(config(plain, **sections), 0, ranks)
    run_to_status(config(through, distributed_training=ZERO, **sections), 0, ranks)
    run_to_status(config(stopped, distributed_training=ZERO, **sections), 75, ranks, stop="5:0:1:SIGTERM")
    run_to_status(config(stopped, distributed_training=ZERO, **sections), 0, ranks)
    assert_same_run(through, stopped)
    assert first_difference(read_log(plain, "train"), read_log(through, "train")) is None
    one, other = load(plain), load(through)
    assert one.pop("cfg") != other.pop("cfg")
    assert first_difference(one, other) is None
