"""Workloads of the benchmarks: of the sizes that are promised, and the same for the same seed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
from workloads import draw, ragged


def sizes(work):
    return [(len(request["prompt"]), request["max_new_tokens"]) for request in work]


def test_ragged_requests_differ_and_stay_within_their_bounds():
    work = ragged(1000, seed=1)
    assert len(work) == 32
    assert len(set(sizes(work))) > 16
    assert all(16 <= size <= 256 for request in sizes(work) for size in request)
    assert all(100 <= token < 900 for request in work for token in request["prompt"])


def test_a_seed_draws_the_same_again_and_another_something_else():
    assert draw(1000, 1) == draw(1000, 1)
    assert draw(1000, 1) != draw(1000, 2)
    assert draw(1000, 1)["ragged"] == ragged(1000, 1)


def test_workloads_of_one_size_have_prompts_of_their_own():
    work = draw(1000, 1)
    assert sizes(work["single"]) == [(64, 128)]
    assert sizes(work["long"]) == [(4096, 64)]
    assert sizes(work["contexts"]) == [(2048, 32)] * 8
    assert len({tuple(request["prompt"]) for request in work["contexts"]}) == 8
