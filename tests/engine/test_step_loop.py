"""The order of a step: when it is planned, carried out and booked, and what failed in it."""

from __future__ import annotations

import pytest
from clock import Clock
from model_free import ModelFree

from paged_backend.engine.scheduler import ScheduledStep
from paged_backend.engine.step_loop import Executed, StepLoop
from paged_backend.engine.stopwatch import Stopwatch
from paged_backend.plugins.fifo import Fifo
from paged_backend.sampling.sampled import Sampled


@pytest.fixture
def engine() -> ModelFree:
    return ModelFree(Fifo())


def loop_of(engine: ModelFree, clock: Clock) -> StepLoop:
    return StepLoop(engine.scheduler, engine.requests, engine._recorder, clock)


def sevens(step: ScheduledStep, watch: Stopwatch) -> Executed:
    return Executed(step.sampling, Sampled([7] * len(step.sampling), [None] * len(step.sampling)))


def test_a_step_plans_executes_and_delivers(engine: ModelFree):
    request = engine.add(3, 1)
    stepped = loop_of(engine, Clock()).run(sevens, ())
    assert stepped.step.admitted == [request]
    assert [(output.token_ids, output.finish_reason) for output in stepped.outputs] == [([7], "length")]
    assert stepped.stats.num_finished == 1


def test_an_end_token_ends_a_request_that_had_room_for_more(engine: ModelFree):
    engine.add(3, 9)
    (output,) = loop_of(engine, Clock()).run(sevens, (7,)).outputs
    assert (output.token_ids, output.finish_reason) == ([7], "stop")


def test_the_clock_is_read_once_before_and_once_after(engine: ModelFree):
    clock = Clock(tick=1.0)
    request = engine.add(3, 1)
    loop_of(engine, clock).run(sevens, ())
    metrics = request.output.metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time, clock.now) == (1.0, 2.0, 2.0)


def test_a_request_past_its_time_ends_before_it_is_planned(engine: ModelFree):
    request = engine.add(3, 1, time_limit=1.0)
    clock = Clock()
    clock.now = 5.0
    stepped = loop_of(engine, clock).run(lambda step, watch: Executed([], None), ())
    assert not stepped.step
    assert request.output.finish_reason == "timeout"


def test_a_request_that_failed_ends_with_its_error_and_the_others_go_on(engine: ModelFree):
    bad, good = engine.add(3, 4), engine.add(3, 4)
    error = RuntimeError("no such kernel")

    def fails(step: ScheduledStep, watch: Stopwatch) -> Executed:
        step.prefills.remove(bad)
        return Executed([good], Sampled([7], [None]), {bad: error})

    loop_of(engine, Clock()).run(fails, ())
    assert bad.output.finish_reason == "error"
    assert (good.output.token_ids, good.output.finish_reason) == ([7], None)
    engine.blocks.check_integrity()
