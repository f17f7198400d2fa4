"""Traffic is drawn as long and as often as it says, the same each time."""

from __future__ import annotations

import statistics

import pytest

from paged_backend.errors import ConfigError
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.traffic import Traffic, arriving


def lengths(traffic: Traffic) -> list[int]:
    return [len(request.prompt) + request.output_length for request in traffic.draw()]


@pytest.mark.parametrize("kind", ["uniform", "heavy", "short"])
def test_lengths_are_within_bounds_and_have_a_prompt_and_an_answer(kind):
    traffic = Traffic(500, kind, 8, 200)
    assert all(8 <= length <= 200 for length in lengths(traffic))
    assert all(len(request.prompt) and request.output_length for request in traffic.draw())


def test_uniform_lengths_reach_both_ends_and_lie_in_the_middle_on_average():
    drawn = lengths(Traffic(3000, "uniform", 10, 50))
    assert (min(drawn), max(drawn)) == (10, 50)
    assert statistics.mean(drawn) == pytest.approx(30, abs=1)


def test_heavy_lengths_have_their_median_at_the_geometric_mean():
    drawn = lengths(Traffic(3000, "heavy", 10, 1000))
    assert statistics.median(drawn) == pytest.approx(100, rel=0.1)
    assert statistics.mean(drawn) > 1.3 * statistics.median(drawn)


def test_seven_in_ten_of_mostly_short_traffic_are_short():
    traffic = Traffic(2000, "short", 16, 800)
    short = [request for request in traffic.draw() if traffic.is_short(request)]
    assert len(short) / 2000 == pytest.approx(0.7, abs=0.03)
    assert all(length <= 100 or length >= 400 for length in lengths(traffic))


def test_lengths_of_a_trace_come_in_turn_and_shrink_to_the_longest():
    trace = [TraceRequest(0.0, range(10), 5), TraceRequest(1.0, range(300), 100)]
    drawn = Traffic(3, "trace", 4, 40, trace=trace).draw()
    assert [(len(request.prompt), request.output_length) for request in drawn] == [(10, 5), (30, 10), (10, 5)]


def test_the_same_seed_draws_the_same_lengths_for_every_vocabulary():
    one, other = (Traffic(20, seed=3).draw(size) for size in (100, 50000))
    assert [len(request.prompt) for request in one] == [len(request.prompt) for request in other]
    assert max(max(request.prompt) for request in one) < 100
    assert lengths(Traffic(20, seed=3)) != lengths(Traffic(20, seed=4))


def test_scaled_traffic_is_shorter_and_never_too_short_to_have_a_prompt_and_an_answer():
    assert (Traffic().scaled(0.25).shortest, Traffic().scaled(0.25).longest) == (16, 256)
    assert Traffic().scaled(1e-6).shortest == 4


def test_requests_arrive_at_the_rate_on_average():
    requests = Traffic(2000, "uniform", 4, 8).draw()
    for arrivals in ("poisson", "bursts"):
        times = [request.arrival for request in arriving(requests, arrivals, 5.0)]
        assert times[0] == 0.0
        assert times == sorted(times)
        assert 2000 / times[-1] == pytest.approx(5.0, rel=0.15)


def test_bursts_come_eight_at_once():
    times = [request.arrival for request in arriving(Traffic(20).draw(), "bursts", 1.0)]
    assert len(set(times)) == 3
    assert times.count(times[0]) == 8


def test_arrivals_of_a_trace_keep_their_pace_at_another_rate():
    trace = [TraceRequest(time, range(4), 4) for time in (0.0, 3.0, 4.0)]
    times = [request.arrival for request in arriving(Traffic(3).draw(), "trace", 1.5, trace=trace)]
    assert times == pytest.approx([0.0, 1.5, 2.0])


def test_at_once_nobody_is_late():
    assert {request.arrival for request in arriving(Traffic(5).draw(), "at-once", 0.0)} == {0.0}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Traffic(0), "num_requests"),
        (lambda: Traffic(lengths="long"), "choose from uniform, heavy, short, trace"),
        (lambda: Traffic(lengths="trace"), "needs a trace"),
        (lambda: Traffic(shortest=100, longest=50), "longest"),
        (lambda: Traffic().scaled(0), "scale"),
        (lambda: arriving(Traffic(2).draw(), "slowly", 1.0), "choose from poisson"),
        (lambda: arriving(Traffic(2).draw(), "poisson", 0.0), "rate"),
        (lambda: arriving(Traffic(2).draw(), "trace", 1.0), "at least 2 requests"),
    ],
)
def test_what_cannot_be_drawn_is_told(make, told):
    with pytest.raises(ConfigError, match=told):
        make()
