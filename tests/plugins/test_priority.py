"""priority: urgent classes first, with preemption and aging on request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_free import ModelFree

from paged_backend.errors import ConfigError
from paged_backend.plugins import priority
from paged_backend.plugins.priority import Priority

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(-1, 2), st.integers(1, 40), st.integers(1, 10)), min_size=2, max_size=50
)


def run(engine: ModelFree, arrivals) -> None:
    for gap, urgency, prompt, output in arrivals:
        for _ in range(gap):
            engine.step()
        engine.add(prompt, output, priority=urgency)
    engine.run()


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.booleans())
def test_nobody_starts_while_a_more_urgent_or_an_earlier_equal_request_waits(arrivals, preempt):
    engine = ModelFree(Priority(preempt=preempt), num_blocks=16)
    run(engine, arrivals)
    for started, waiting in engine.starts:
        assert all((request.priority, request.order) > (started.priority, started.order) for request in waiting)
    assert len(engine.ended) == len(arrivals)
    engine.assert_sound()


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.sampled_from([0.02, 0.1]))
def test_with_aging_nobody_is_overtaken_by_those_that_come_late_enough(arrivals, aging_s):
    engine = ModelFree(Priority(aging_s=aging_s), num_blocks=16)
    run(engine, arrivals)
    for started, waiting in engine.starts:
        for request in waiting:
            classes = request.priority - started.priority
            assert started.arrival_time - request.arrival_time <= max(0, classes) * aging_s + 1e-9
    engine.assert_sound()


def full_of_background_work(**options) -> ModelFree:
    engine = ModelFree(Priority(**options), max_num_seqs=2, num_blocks=64)
    for _ in range(2):
        engine.add(4, 60, priority=5)
    engine.step()
    engine.step()
    return engine


def test_an_urgent_request_takes_the_seat_of_background_work_at_once():
    engine = full_of_background_work(preempt=True)
    urgent = engine.add(4, 2, priority=0)
    step = engine.step()
    assert step.admitted == [urgent]
    assert [request.order for request, _ in step.preempted] == [1]
    assert urgent.num_output_tokens == 1
    engine.run()
    assert len(engine.ended) == 3
    engine.assert_sound()


def test_without_preemption_it_waits_for_a_seat():
    engine = full_of_background_work()
    urgent = engine.add(4, 2, priority=0)
    assert not engine.step().admitted
    assert urgent.is_waiting


def test_nobody_is_set_aside_whose_tokens_cost_more_than_the_wait_until_somebody_ends():
    engine = full_of_background_work(preempt=True)
    for _ in range(54):
        engine.step()
    engine.add(4, 2, priority=0)
    assert not engine.step().preempted
    engine.run()
    engine.assert_sound()


def test_nobody_is_set_aside_where_many_as_urgent_wait_for_what_is_computed_again():
    engine = full_of_background_work(preempt=True)
    for _ in range(100):
        engine.add(4, 2, priority=0)
    assert not engine.step().preempted


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.sampled_from([0.0, 0.2, 1.0]))
def test_those_set_aside_stay_within_their_share_of_the_prompts_that_began(arrivals, recompute):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priority, "BURST", 30)
        # Memory for everybody, so that only urgent requests set anybody aside.
        engine = ModelFree(Priority(preempt=True, recompute=recompute), num_blocks=400, max_num_seqs=3)
        lost, begun, plan = 0, [], engine.scheduler.schedule

        def planned(now, **options):
            nonlocal lost
            allowed = 30 + recompute * sum(request.num_prompt_tokens for request in begun)
            step = plan(now, **options)
            lost += sum(request.num_lost_tokens for request, _ in step.preempted)
            assert lost <= allowed
            begun.extend(request for request in step.admitted if not request.num_preemptions)
            return step

        engine.scheduler.schedule = planned
        run(engine, arrivals)
    engine.assert_sound()


def test_nobody_is_set_aside_beyond_the_share_though_it_would_pay(monkeypatch):
    monkeypatch.setattr(priority, "BURST", 0)
    engine = full_of_background_work(preempt=True, recompute=0.5)
    engine.add(4, 2, priority=0)
    assert not engine.step().preempted
    engine = full_of_background_work(preempt=True, recompute=1.0)
    engine.add(4, 2, priority=0)
    assert engine.step().preempted


def test_what_was_set_aside_in_this_step_and_before_counts(monkeypatch):
    monkeypatch.setattr(priority, "BURST", 10)
    engine = full_of_background_work(preempt=True, recompute=0.0)
    for _ in range(2):
        engine.add(4, 2, priority=0)
    assert len(engine.step().preempted) == 1
    for _ in range(6):
        assert not engine.step().preempted
        engine.add(4, 2, priority=0)


def test_who_has_aged_beyond_an_urgent_request_is_not_set_aside_for_it():
    engine = ModelFree(Priority(preempt=True, aging_s=0.05), max_num_seqs=1)
    engine.add(4, 60, priority=1)
    for _ in range(8):
        engine.step()
    late = engine.add(4, 2, priority=0)
    assert not engine.step().preempted
    engine.run()
    assert late.is_finished
    engine.assert_sound()


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.sampled_from([None, 0.05, 0.5]))
def test_who_is_set_aside_comes_behind_the_one_it_was_set_aside_for(arrivals, aging_s):
    policy = Priority(preempt=True, aging_s=aging_s)
    engine = ModelFree(policy, num_blocks=24, max_num_seqs=2)
    answer = policy.preempts

    def preempts(candidate, running, now):
        victim = answer(candidate, running, now)
        assert victim is None or policy.key(victim) > policy.key(candidate)
        return victim

    policy.preempts = preempts
    run(engine, arrivals)
    engine.assert_sound()


def test_aged_classes_decide_who_pays_when_memory_runs_out():
    engine = ModelFree(Priority(aging_s=0.05), num_blocks=10, block_size=2, max_num_seqs=3)
    background = engine.add(4, 14, priority=1)
    for _ in range(2):
        engine.step()
    engine.now += 0.5
    urgent = engine.add(4, 12, priority=0)
    engine.run()
    assert urgent.num_preemptions > 0
    assert background.num_preemptions == 0
    engine.assert_sound()


def test_equals_do_not_preempt_each_other():
    engine = full_of_background_work(preempt=True)
    engine.add(4, 2, priority=5)
    assert not engine.step().preempted


def test_nobody_is_set_aside_for_a_request_that_would_still_not_fit():
    engine = ModelFree(Priority(preempt=True), max_num_seqs=3, num_blocks=20, block_size=4)
    engine.add(32, 8, priority=0)
    engine.add(4, 20, priority=9)
    for _ in range(4):
        engine.step()
    engine.add(60, 4, priority=5)
    for _ in range(3):
        assert not engine.step().preempted
    engine.run()
    engine.assert_sound()


def test_an_urgent_prompt_gets_the_token_budget_before_a_half_computed_one():
    engine = ModelFree(Priority(), budget=8, num_blocks=64)
    slow = engine.add(80, 2, priority=5)
    engine.step()
    urgent = engine.add(6, 2, priority=0)
    engine.step()
    assert urgent.num_output_tokens == 1
    assert 0 < slow.num_computed_tokens < 80
    engine.run()
    engine.assert_sound()


def test_the_least_urgent_pays_when_memory_runs_out():
    engine = ModelFree(Priority(), num_blocks=10, block_size=2, max_num_seqs=3)
    background = engine.add(4, 14, priority=5)
    urgent = engine.add(4, 14, priority=0)
    engine.run()
    assert background.num_preemptions > 0
    assert urgent.num_preemptions == 0
    engine.assert_sound()


def test_a_preempted_request_resumes_before_later_arrivals_of_its_class():
    engine = ModelFree(Priority(), num_blocks=10, block_size=2, max_num_seqs=3)
    for _ in range(2):
        engine.add(4, 14)
    for _ in range(3):
        engine.step()
    later = engine.add(4, 2)
    engine.run()
    resumed = engine.start_orders.index(1, engine.start_orders.index(1) + 1)
    assert resumed < engine.start_orders.index(later.order)


def test_aging_must_be_positive():
    with pytest.raises(ConfigError):
        Priority(aging_s=0)
