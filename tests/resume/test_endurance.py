"""A run with many saves and validations holds at its end what it held at its beginning."""

from __future__ import annotations

import pytest

from benchmarks.endurance import COUNTS, make_config, measure, measured_session
from tests.dist.harness import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks, asynchronous, folder", [(1, False, False), (2, True, False), (2, True, True)])
def test_memory_descriptors_threads_and_children_stay_level(tmp_path, ranks, asynchronous, folder):
    cfg = make_config(str(tmp_path), 1500, 10, asynchronous, folder)
    for rows in run_ranks(measured_session, ranks, cfg, 10, timeout=900):
        first, last = rows[300:600], rows[1200:]
        for name in COUNTS:
            assert measure(last, name) <= measure(first, name), name
        grown = measure(last, "memory") - measure(first, "memory")
        assert grown < 1 << 20, f"{grown / 900:.0f} bytes an update"
