"""The laps of a step add up to its time."""

from __future__ import annotations

import pytest

from paged_backend.engine import stopwatch
from paged_backend.engine.stopwatch import Stopwatch


def test_each_lap_is_the_time_since_the_last_one_and_laps_of_a_name_add_up(monkeypatch):
    times = iter([10.0, 11.0, 13.5, 14.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(times))
    watch = Stopwatch()
    for name in ("forward", "sample", "forward"):
        watch.lap(name)
    assert watch.laps == pytest.approx({"forward": 1.5, "sample": 2.5})
