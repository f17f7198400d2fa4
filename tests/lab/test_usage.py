"""However many steps there are, a bounded number of moments stands for all of them."""

from __future__ import annotations

import itertools

from paged_backend.lab.usage import Usage


def test_a_few_moments_are_all_kept():
    usage = Usage(8)
    usage.record(0.5, 3, 1)
    usage.record(0.7, 4, 0)
    assert usage.moments == [(0.5, 3, 1), (0.7, 4, 0)]


def test_many_moments_stay_bounded_and_evenly_spaced():
    usage = Usage(8)
    for now in range(10_000):
        usage.record(float(now), now, 0)
    times = [now for now, _, _ in usage.moments]
    assert 256 <= len(times) < 1024
    assert len({later - earlier for earlier, later in itertools.pairwise(times)}) == 1


def test_the_first_moment_is_never_forgotten_and_the_last_is_near():
    usage = Usage(8)
    for now in range(5000):
        usage.record(float(now), 0, 0)
    assert usage.moments[0][0] == 0.0
    assert 5000 - usage.moments[-1][0] <= 16
