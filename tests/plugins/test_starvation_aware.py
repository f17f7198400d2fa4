"""starvation_aware: short requests first, and nobody is overtaken for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_free import ModelFree

from paged_backend.errors import ConfigError
from paged_backend.plugins.starvation_aware import StarvationAware

ARRIVALS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 12)), min_size=2, max_size=60)


def overtakes(engine: ModelFree) -> int:
    """The most later arrivals that started during any one wait."""
    counts: Counter = Counter()
    most = 0
    for started, waiting in engine.starts:
        del counts[started]
        for request in waiting:
            if request.order < started.order:
                counts[request] += 1
                most = max(most, counts[request])
    return most


def run(engine: ModelFree, arrivals) -> None:
    for gap, prompt, output in arrivals:
        for _ in range(gap):
            engine.step()
        engine.add(prompt, output)
    engine.run()


@settings(max_examples=150, deadline=None)
@given(ARRIVALS, st.integers(0, 6), st.integers(20, 60))
def test_nobody_is_overtaken_more_often_than_allowed(arrivals, max_overtakes, num_blocks):
    engine = ModelFree(StarvationAware(max_overtakes, max_wait_s=1e9), num_blocks=num_blocks)
    run(engine, arrivals)
    assert overtakes(engine) <= max_overtakes
    assert len(engine.ended) == len(arrivals)
    engine.assert_sound()


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.floats(0.0, 0.5))
def test_no_later_arrival_starts_before_one_that_waited_long_enough(arrivals, max_wait_s):
    engine = ModelFree(StarvationAware(10_000, max_wait_s), num_blocks=30)
    times = []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda now, **options: (
        times.append((now, len(engine.starts))) or schedule(now, **options)
    )
    run(engine, arrivals)
    moments = dict.fromkeys(range(len(engine.starts)), 0.0)
    for (now, first), (_, last) in zip(times, [*times[1:], (0.0, len(engine.starts))], strict=True):
        moments.update(dict.fromkeys(range(first, last), now))
    for index, (started, waiting) in enumerate(engine.starts):
        for request in waiting:
            if request.order < started.order:
                assert moments[index] - request.arrival_time < max_wait_s
    engine.assert_sound()


def test_without_a_bound_a_long_request_is_overtaken_for_as_long_as_short_ones_come():
    engine = ModelFree(StarvationAware(10**9, max_wait_s=1e9), max_num_seqs=1)
    engine.add(4, 4)
    long = engine.add(40, 4)
    for _ in range(100):
        engine.add(4, 2)
        engine.step()
        engine.step()
    assert long.is_waiting


def test_long_request_makes_progress_under_an_endless_stream_of_short_ones():
    engine = ModelFree(StarvationAware(max_overtakes=5, max_wait_s=1e9), max_num_seqs=2, num_blocks=24)
    engine.add(4, 4)
    long = engine.add(80, 8)
    for _ in range(100):
        engine.add(4, 2)
        engine.step()
        engine.step()
    assert long.is_finished
    assert overtakes(engine) <= 5
    engine.assert_sound()


def test_the_request_nearest_to_finishing_goes_first():
    engine = ModelFree(StarvationAware(), max_num_seqs=1)
    for prompt, output in [(8, 8), (30, 2), (2, 3), (4, 20)]:
        engine.add(prompt, output)
    engine.run()
    assert engine.start_orders == [2, 0, 3, 1]


def test_predicted_lengths_decide_when_max_tokens_says_nothing():
    engine = ModelFree(StarvationAware(predict="quantile"), max_num_seqs=1)
    for client, output in [("chatty", 30), ("terse", 2), ("chatty", 30), ("terse", 2)]:
        engine.add(4, output, max_tokens=50, client_id=client)
        engine.run()
    engine.starts.clear()
    blocker = engine.add(4, 4)
    engine.step()
    chatty = engine.add(4, 30, max_tokens=50, client_id="chatty")
    terse = engine.add(4, 2, max_tokens=50, client_id="terse")
    engine.run()
    assert engine.start_orders == [blocker.order, terse.order, chatty.order]


def test_ten_thousand_can_wait_and_be_aborted_in_any_order():
    engine = ModelFree(StarvationAware(max_overtakes=3), max_num_seqs=1)
    requests = [engine.add(1 + n % 7, 1) for n in range(2000)]
    for request in requests[::2]:
        engine.abort(request)
    engine.run()
    assert overtakes(engine) <= 3
    assert len(engine.ended) == 2000
    engine.assert_sound()


@pytest.mark.parametrize(
    "options", [{"max_overtakes": -1}, {"max_wait_s": -1.0}, {"predict": "magic"}, {"victim": "me"}]
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        StarvationAware(**options)
