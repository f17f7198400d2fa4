"""The benchmark of steps has all requests decode in each step that it counts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import bench_step


def test_every_counted_step_decodes_all_requests():
    steps = bench_step.measure(running=3, steps=5, vocab_size=64)
    assert [(step.num_decodes, step.num_prefill_tokens) for step in steps] == [(3, 0)] * 5


def test_the_laps_it_prints_are_numbers_of_a_step():
    (step,) = bench_step.measure(running=1, steps=1, vocab_size=64)
    assert all(getattr(step, f"{name}_s") >= 0 for name in bench_step.LAPS)
