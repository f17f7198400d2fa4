"""deadline: earliest first, a share for the rest, and no work for what is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_free import ModelFree

from paged_backend.errors import ConfigError
from paged_backend.plugins.deadline import Deadline
from paged_backend.plugins.fifo import Fifo
from paged_backend.plugins.service_time import StepCost

ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.none() | st.floats(0.01, 2.0),
        st.integers(1, 40),
        st.integers(1, 10),
    ),
    min_size=2,
    max_size=50,
)


def run(engine: ModelFree, arrivals) -> None:
    for gap, deadline_s, prompt, output in arrivals:
        for _ in range(gap):
            engine.step()
        engine.add(prompt, output, deadline=None if deadline_s is None else engine.now + deadline_s)
    engine.run()


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.sampled_from([0.0, 0.1, 0.5]), st.booleans())
def test_nobody_with_a_deadline_starts_before_a_waiting_request_with_an_earlier_one(arrivals, share, preempt):
    engine = ModelFree(Deadline(share=share, preempt=preempt), num_blocks=16)
    run(engine, arrivals)
    for started, waiting in engine.starts:
        if started.deadline is not None:
            assert all(request.deadline is None or request.deadline >= started.deadline for request in waiting)
    assert len(engine.ended) == len(arrivals)
    engine.assert_sound()


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.sampled_from([0.1, 0.25, 0.5]))
def test_requests_without_a_deadline_get_their_share_of_the_starts(arrivals, share):
    engine = ModelFree(Deadline(share=share), num_blocks=16)
    run(engine, arrivals)
    with_both_kinds: list[bool] = []
    runs = [with_both_kinds]
    for started, waiting in engine.starts:
        kinds = {request.deadline is None for request in [started, *waiting]}
        if len(kinds) < 2:
            with_both_kinds = []
            runs.append(with_both_kinds)
            continue
        with_both_kinds.append(started.deadline is None)
    for starts in runs:
        for first in range(len(starts)):
            for last in range(first + 1, len(starts) + 1):
                assert sum(starts[first:last]) >= int((last - first) * share + 1e-9)
    engine.assert_sound()


def test_of_equal_deadlines_the_longest_request_goes_first():
    engine = ModelFree(Deadline(cost=known_cost()), max_num_seqs=1)
    for output in (2, 20, 9):
        engine.add(4, output, deadline=5.0)
    engine.run()
    assert engine.start_orders == [1, 2, 0]


def known_cost(decode_step_s: float = 0.01, prompt_token_s: float = 0.001) -> StepCost:
    cost = StepCost()
    cost.observe(1, 0, decode_step_s)
    cost.observe(0, 1, prompt_token_s)
    return cost


@pytest.mark.parametrize(("policy", "in_time"), [(Deadline(), True), (Fifo(), False)])
def test_a_long_prompt_does_not_defeat_an_urgent_one(policy, in_time):
    engine = ModelFree(policy, num_blocks=2000, budget=64)
    engine.add(5000, 2, deadline=100.0)
    engine.step()
    urgent = engine.add(60, 2, deadline=engine.now + 0.05)
    engine.run()
    assert (urgent.output.metrics.finished_time <= urgent.deadline) == in_time


def test_a_half_computed_prompt_without_a_deadline_still_advances():
    engine = ModelFree(Deadline(share=0.25), budget=8, num_blocks=200)
    patient = engine.add(40, 2)
    engine.step()
    for _ in range(60):
        engine.add(8, 1, deadline=engine.now + 1.0)
        engine.step()
    assert patient.is_finished


def test_what_cannot_make_it_is_dropped_on_arrival_and_while_waiting():
    policy = Deadline(shed=True, cost=known_cost())
    engine = ModelFree(policy, max_num_seqs=1)
    running = engine.add(4, 40, deadline=10.0)
    engine.step()
    hopeless = engine.add(4, 50, deadline=engine.now + 0.2)
    patient = engine.add(4, 4, deadline=engine.now + 0.3)
    no_deadline = engine.add(4, 4)
    engine.step()
    assert hopeless.output.finish_reason == "timeout"
    assert not patient.is_finished
    engine.run()
    assert patient.output.finish_reason == "timeout"
    assert patient.output.metrics.finished_time < patient.deadline
    assert [r.output.finish_reason for r in (running, no_deadline)] == ["length", "length"]
    engine.assert_sound()


@settings(max_examples=50, deadline=None)
@given(ARRIVALS)
def test_shedding_never_starts_what_is_lost_and_loses_nobody(arrivals):
    policy = Deadline(shed=True, cost=known_cost())
    engine = ModelFree(policy, num_blocks=16)
    run(engine, arrivals)
    assert len(engine.ended) == len(arrivals)
    for request in engine.ended:
        if request.output.finish_reason == "timeout":
            assert request.deadline is not None
            assert request.num_preemptions > 0 or request.num_output_tokens == 0
    engine.assert_sound()


@pytest.mark.parametrize(("shed", "enough"), [(True, True), (False, False)])
def test_under_overload_shedding_keeps_those_it_admits_in_time(shed, enough):
    engine = ModelFree(Deadline(shed=shed), max_num_seqs=4, num_blocks=200)
    for n in range(400):
        engine.add(8, 10, deadline=engine.now + 0.5)
        if n % 2:
            engine.step()
    engine.run()
    done = [r for r in engine.ended if r.output.finish_reason == "length"]
    in_time = [r for r in done if r.output.metrics.finished_time <= r.deadline]
    assert (len(in_time) > 0.9 * len(done)) == enough
    assert len(in_time) > 60 or not shed


def test_an_urgent_request_takes_the_seat_of_one_that_has_time():
    engine = ModelFree(Deadline(preempt=True), max_num_seqs=1)
    engine.add(4, 60, deadline=100.0)
    engine.step()
    urgent = engine.add(4, 2, deadline=engine.now + 0.1)
    engine.run()
    assert urgent.output.metrics.finished_time <= urgent.deadline
    engine.assert_sound()


def set_aside(running: tuple, urgent: tuple, *others: tuple, steps: int = 3) -> bool:
    """Whether an urgent request takes the only seat; each is prompt, output and seconds to the deadline, or None."""
    engine = ModelFree(Deadline(preempt=True, cost=known_cost()), max_num_seqs=1, budget=64)
    for prompt, output, deadline_s in (running, *others):
        engine.add(prompt, output, deadline=None if deadline_s is None else engine.now + deadline_s)
    for _ in range(steps):
        engine.step()
    prompt, output, deadline_s = urgent
    engine.add(prompt, output, deadline=engine.now + deadline_s)
    preempted = bool(engine.step().preempted)
    engine.run()
    engine.assert_sound()
    return preempted


def test_a_seat_is_taken_only_from_whom_it_costs_nothing_and_only_by_whom_it_saves():
    urgent = (4, 4, 0.1)
    assert set_aside((4, 60, None), urgent)
    assert set_aside((4, 60, 9.0), urgent)
    # It would miss its deadline, or another one that waits.
    assert not set_aside((4, 60, 0.65), urgent)
    assert not set_aside((4, 60, 9.0), urgent, (4, 60, 8.0))
    # The urgent one has time until the seat is free, or is lost anyway.
    assert not set_aside((4, 60, None), (4, 4, 0.9))
    assert not set_aside((4, 60, None), (4, 40, 0.1))


def test_nobody_is_set_aside_whose_tokens_take_longer_to_compute_again_than_the_urgent_one_needs():
    def preemptions(prompt: int) -> int:
        engine = ModelFree(
            Deadline(preempt=True), max_num_seqs=1, budget=64, step_s=lambda d, p: 0.01 + 0.001 * p, num_blocks=400
        )
        for length in (1, 60, 30, 9, 45):
            engine.add(length, 3)
            engine.run()
        engine.add(prompt, 90)
        for _ in range(20):
            engine.step()
        engine.add(4, 4, deadline=engine.now + 0.3)
        engine.run()
        return engine.scheduler.num_preemptions

    assert preemptions(10) == 1
    assert preemptions(300) == 0


def test_what_a_request_needs_is_told_from_the_running_batch_and_alone_from_an_idle_machine():
    def step_s(num_decodes: int, num_prefill_tokens: int) -> float:
        return 0.002 + 0.002 * num_decodes

    policy = Deadline(shed=True)
    engine = ModelFree(policy, max_num_seqs=9, budget=64, num_blocks=400, step_s=step_s)
    for n in range(60):
        engine.add(4, 10 + n % 7)
    for _ in range(40):
        engine.step()
    assert policy.latest_starts.cost.decode_step_s == pytest.approx(0.02, rel=0.1)
    lost = engine.add(4, 50, deadline=engine.now + 0.6)
    engine.run()
    made = engine.add(4, 50, deadline=engine.now + 0.6)
    engine.run()
    assert lost.output.finish_reason == "timeout"
    assert made.output.finish_reason == "length"


@pytest.mark.parametrize(("share", "num_starts"), [(0.1, 10), (1 / 3, 3), (0.7, 10)])
def test_a_share_is_not_rounded_away(share, num_starts):
    engine = ModelFree(Deadline(share=share), max_num_seqs=1)
    patient = [engine.add(1, 1).order for _ in range(num_starts)]
    for _ in range(num_starts):
        engine.add(1, 1, deadline=1e6)
    engine.run()
    assert len(set(engine.start_orders[:num_starts]) & set(patient)) == round(num_starts * share)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_share_is_from_0_to_1(share):
    with pytest.raises(ConfigError):
        Deadline(share=share)
