"""The benchmark of policies times what it says it times."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import bench_policies


@pytest.mark.parametrize("name", ["fifo", "starvation_aware"])
def test_every_step_has_its_seconds_of_policy_work(monkeypatch, name):
    monkeypatch.setattr(gc, "freeze", lambda: None)
    seconds, num_arrived, num_preempted = bench_policies.measure(name, {}, waiting=20, running=4, steps=150)
    assert len(seconds) == 150
    assert all(value > 0 for value in seconds)
    assert num_arrived > 0
    assert num_preempted >= 0


def test_a_slow_policy_shows(monkeypatch):
    ticks = iter(range(10**9))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(bench_policies, "thread_time", lambda: float(next(ticks)))
    seconds, _, _ = bench_policies.measure("fifo", {}, waiting=5, running=2, steps=4)
    # Each question takes a tick of this clock, and a step asks several.
    assert min(seconds) >= 2
