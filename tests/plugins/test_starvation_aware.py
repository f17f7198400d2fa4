"""starvation_aware: short requests first, and nobody is overtaken for ever."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_free import ModelFree

from paged_backend.errors import ConfigError
from paged_backend.plugins.starvation_aware import StarvationAware
from paged_backend.request.request import Request

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
    engine = ModelFree(StarvationAware(max_overtakes=max_overtakes), num_blocks=num_blocks)
    run(engine, arrivals)
    assert overtakes(engine) <= max_overtakes
    assert len(engine.ended) == len(arrivals)
    engine.assert_sound()


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.floats(0.0, 0.5))
def test_no_later_arrival_starts_before_one_that_waited_long_enough(arrivals, max_wait_s):
    engine = ModelFree(StarvationAware(max_wait_s=max_wait_s), num_blocks=30)
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


class WorkBook:
    """What the guarantee speaks of, counted from the outside: work computed, and each request's bound on it.

    Outputs are as long as ``max_tokens``, so what a request has left is known.
    """

    def __init__(self, engine: ModelFree, prompt_cost: float) -> None:
        self.engine, self.prompt_cost = engine, prompt_cost
        self.computed = self.largest_step = 0.0
        # Work that a request may see computed before its start, counted from the beginning of time.
        self.bounds: dict[Request, float] = {}
        self.due: dict[Request, float] = {}
        self.late: list[Request] = []

    def left(self, requests) -> float:
        return sum(
            self.prompt_cost * r.num_uncomputed_tokens + r.params.max_tokens - r.num_output_tokens for r in requests
        )

    def add(self, prompt: int, output: int) -> Request:
        policy = self.engine.policy.policy
        before = self.left(self.engine.policy.waiting)
        request = self.engine.add(prompt, output)
        self.due[request] = self.computed + (policy.stretch - 1) * before + policy.slack
        self.bounds[request] = self.computed + policy.stretch * before + policy.slack
        self._let_fall_due()
        return request

    def step(self) -> None:
        step = self.engine.step()
        for request in step.admitted:
            bound = self.bounds.pop(request, math.inf) + self.largest_step
            if self.due.pop(request, None) is None and self.computed > bound:
                self.late.append(request)
        victims = self.left(victim for victim, _ in step.preempted)
        self.bounds = {request: bound + victims for request, bound in self.bounds.items()}
        work = len(step.decodes) + self.prompt_cost * step.num_prefill_tokens
        self.largest_step = max(self.largest_step, work)
        self.computed += work
        self._let_fall_due()

    def _let_fall_due(self) -> None:
        running = self.left(self.engine.scheduler.running)
        for request in [request for request, due in self.due.items() if due <= self.computed]:
            del self.due[request]
            self.bounds[request] += running

    def run(self, arrivals) -> None:
        for gap, prompt, output in arrivals:
            for _ in range(gap):
                self.step()
            self.add(prompt, output)
        while self.engine.scheduler.has_work():
            self.step()


@settings(max_examples=150, deadline=None)
@given(ARRIVALS, st.sampled_from([1.0, 1.5, 3.0]), st.sampled_from([0, 10, 40]), st.sampled_from([0.1, 1.0]), st.data())
def test_no_more_work_is_computed_during_a_wait_than_the_bound_says(arrivals, stretch, slack, prompt_cost, data):
    policy = StarvationAware(stretch, slack, prompt_cost=prompt_cost)
    engine = ModelFree(policy, num_blocks=data.draw(st.sampled_from([20, 30, 400])))
    book = WorkBook(engine, prompt_cost)
    book.run(arrivals)
    assert not book.late
    assert len(engine.ended) == len(arrivals)
    engine.assert_sound()


class Unbounded(StarvationAware):
    """Forgets that somebody is due."""

    def _is_at_bound(self, earliest, now):
        return False


class PassesOver(StarvationAware):
    """Lets others start when the earliest, whose turn it is, does not fit."""

    def candidates(self, now):
        offered = set()
        for request in super().candidates(now):
            offered.add(request)
            yield request
        yield from [request for request in self._requests.values() if request not in offered]


@pytest.mark.parametrize(("policy", "is_late"), [(StarvationAware, False), (Unbounded, True), (PassesOver, True)])
def test_the_bound_breaks_when_its_rule_is_broken(policy, is_late):
    engine = ModelFree(policy(2.0, 10, prompt_cost=0.1), num_blocks=21, max_num_seqs=2)
    book = WorkBook(engine, 0.1)
    book.add(4, 8)
    long = book.add(77, 4)
    for _ in range(150):
        book.add(4, 6)
        book.step()
        book.step()
    while engine.scheduler.has_work():
        book.step()
    assert (long in book.late) == is_late


def test_a_prompt_token_weighs_what_it_costs_beside_an_output_token():
    def step_s(num_decodes: int, num_prefill_tokens: int) -> float:
        return 0.008 + 0.001 * num_decodes + 0.0001 * num_prefill_tokens

    engine = ModelFree(StarvationAware(), max_num_seqs=4, num_blocks=600, step_s=step_s)
    for n in range(60):
        engine.add(5 + n % 13, 10)
    engine.run()
    engine.starts.clear()
    for _ in range(4):
        engine.add(4, 10)
    engine.step()
    long_prompt, long_answer = engine.add(200, 4), engine.add(4, 30)
    engine.run()
    assert engine.start_orders[-2:] == [long_prompt.order, long_answer.order]


def test_without_a_bound_a_long_request_is_overtaken_for_as_long_as_short_ones_come():
    engine = ModelFree(StarvationAware(slack=1e9), max_num_seqs=1)
    engine.add(4, 4)
    long = engine.add(40, 4)
    for _ in range(100):
        engine.add(4, 2)
        engine.step()
        engine.step()
    assert long.is_waiting


def test_long_request_makes_progress_under_an_endless_stream_of_short_ones():
    engine = ModelFree(StarvationAware(max_overtakes=5), max_num_seqs=2, num_blocks=24)
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
    "options",
    [
        {"stretch": 0.9},
        {"slack": -1},
        {"max_overtakes": -1},
        {"max_wait_s": -1.0},
        {"prompt_cost": -0.1},
        {"predict": "magic"},
        {"victim": "me"},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        StarvationAware(**options)
