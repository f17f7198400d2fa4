"""static and window: requests that start together and end before others join."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_free import ModelFree

from paged_backend.errors import ConfigError
from paged_backend.plugins.batches import Static, Window

ARRIVALS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=40)


def run(engine: ModelFree, arrivals, drain: bool = True) -> list[set[int]]:
    """Returns who ran at each step."""
    running = []

    def step() -> None:
        running.append({request.order for request in engine.step(drain=drain).requests})

    for gap, prompt, output in arrivals:
        for _ in range(gap):
            step()
        engine.add(prompt, output)
    while engine.scheduler.has_work():
        step()
        assert len(running) < 10_000
    return running


def batches_of(running: list[set[int]], batch: int) -> None:
    """Who runs at once belongs together: nobody runs beside one who was not there from the start of the batch."""
    groups: list[set[int]] = []
    for step in running:
        if groups and step & groups[-1]:
            groups[-1] |= step
        elif step:
            groups.append(set(step))
    assert all(len(group) <= batch for group in groups)
    assert sum(map(len, groups)) == len(set().union(*groups))


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.integers(1, 6), st.integers(10, 60))
def test_batches_never_mix(arrivals, batch, num_blocks):
    engine = ModelFree(Static(batch), num_blocks=num_blocks, max_num_seqs=6)
    batches_of(run(engine, arrivals), batch)
    assert len(engine.ended) == len(arrivals)
    engine.assert_sound()


def test_partly_filled_batch_starts_when_the_last_one_is_over():
    engine = ModelFree(Static(4), max_num_seqs=8)
    for _ in range(6):
        engine.add(4, 5)
    running = run(engine, [])
    assert running[0] == {0, 1, 2, 3}
    assert running[-1] == {4, 5}


def test_samples_of_one_request_keep_the_batch_open_until_the_last_is_over():
    engine = ModelFree(Static(1), max_num_seqs=4)
    parent = engine.add(4, 2)
    fork = engine.add(4, 6)
    engine.blocks.expect_no_more(fork)
    engine.policy.remove(fork)
    fork.token_ids = list(parent.token_ids)
    parent.forks = (fork,)
    later = engine.add(4, 2)
    for _ in range(4):
        engine.step()
    assert parent.is_finished
    assert not fork.is_finished
    assert later.is_waiting
    engine.run()
    engine.assert_sound()


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.integers(1, 6), st.floats(0.0, 0.1))
def test_window_ends_the_wait_of_a_partly_filled_batch(arrivals, batch, window_s):
    engine = ModelFree(Window(batch, 1000 * window_s), num_blocks=40, max_num_seqs=6)
    batches_of(run(engine, arrivals, drain=False), batch)
    assert len(engine.ended) == len(arrivals)
    engine.assert_sound()


def test_window_holds_back_until_the_batch_is_full_or_time_is_up():
    engine = ModelFree(Window(2, window_ms=50))
    engine.add(4, 2)
    assert not engine.step()
    assert engine.scheduler.held_until == pytest.approx(0.05)
    engine.add(4, 2)
    assert len(engine.step().admitted) == 2
    assert engine.scheduler.held_until is None
    engine.run()
    lonely = engine.add(4, 2)
    start = engine.now
    while lonely.is_waiting:
        engine.step()
    assert 0.05 <= engine.starts[-1][0].last_scheduled_time - start < 0.07
    engine.run()
    engine.assert_sound()


def test_window_is_not_waited_for_when_nothing_more_can_come():
    engine = ModelFree(Window(8, window_ms=60_000))
    request = engine.add(4, 1)
    engine.step(drain=True)
    assert request.is_finished
    engine.assert_sound()


@pytest.mark.parametrize(
    "policy", [lambda: Static(0), lambda: Static(True), lambda: Window(2, -1), lambda: Window(2, 1e9)]
)
def test_options_that_make_no_sense_are_refused(policy):
    with pytest.raises(ConfigError):
        policy()
