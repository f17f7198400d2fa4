"""How requests end: aborted, late or failed, each by itself, with its tokens and its moments."""

from __future__ import annotations

import pytest
from block_checks import assert_all_blocks_are_back
from clock import Clock
from model_free import ModelFree
from oracle import draw_prompts
from ragged_prompts import GREEDY

from paged_backend import Engine, SamplingParams
from paged_backend.engine.request_table import RequestTable
from paged_backend.errors import (
    RequestRefused,
)
from paged_backend.plugins.fifo import Fifo
from paged_backend.policy.plugin_manager import PluginManager
from paged_backend.policy.policy_errors import PolicyErrors
from paged_backend.request.request import Request
from paged_backend.sampling.sampled import Sampled


def test_metrics_follow_the_injected_clock(llama):
    clock = Clock()
    engine = Engine(llama, clock=clock)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    output = None
    for second in (1.0, 2.0, 3.0):
        clock.now = second
        (output,) = engine.step()
    metrics = output.metrics
    times = (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time)
    assert times == (0.0, 1.0, 1.0, 3.0)


def test_aborted_request_ends_with_its_tokens_and_others_go_on(llama, prompts, expected):
    engine = Engine(llama)
    doomed = engine.add_request(prompts[0], GREEDY)
    kept = engine.add_request(prompts[1], GREEDY)
    for _ in range(4):
        engine.step()
    assert engine.abort(doomed)
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs[doomed].finish_reason == "abort"
    assert outputs[doomed].token_ids == expected[0][:4]
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    assert outputs[kept].token_ids == expected[1]
    assert not engine.abort(doomed)
    assert_all_blocks_are_back(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_request_can_be_aborted_in_any_state(llama, num_steps):
    engine = Engine(llama, max_num_batched_tokens=16)
    request_id = engine.add_request(draw_prompts([30])[0], GREEDY)
    for _ in range(num_steps):
        engine.step()
    engine.abort(request_id)
    assert [output.finish_reason for output in engine.step()] == ["abort"]
    assert not engine.has_unfinished_requests()
    assert_all_blocks_are_back(engine)


def test_request_past_its_timeout_ends_wherever_it_is(llama, prompts):
    clock = Clock()
    engine = Engine(llama, clock=clock, max_num_seqs=1)
    running = engine.add_request(prompts[0], GREEDY, timeout_s=5)
    waiting = engine.add_request(prompts[1], GREEDY, timeout_s=2)
    engine.step()
    clock.now = 2.0
    assert {o.request_id: o.finish_reason for o in engine.step()} == {running: None, waiting: "timeout"}
    clock.now = 6.0
    assert {o.request_id: o.finish_reason for o in engine.step()} == {running: "timeout"}
    assert_all_blocks_are_back(engine)


def test_failing_stop_condition_fails_its_request_alone(llama, prompts, expected):
    def broken(request):
        raise ValueError("no")

    engine = Engine(llama)
    bad = engine.add_request(prompts[0], GREEDY, stop_condition=broken)
    good = engine.add_request(prompts[1], GREEDY)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    assert outputs[bad].finish_reason == "error"
    assert isinstance(outputs[bad].error, ValueError)
    assert outputs[good].token_ids == expected[1]


def test_duplicate_request_id_is_refused_while_the_first_is_unfinished(llama):
    engine = Engine(llama)
    engine.add_request([5], GREEDY, request_id="a")
    with pytest.raises(RequestRefused, match="'a' is taken"):
        engine.add_request([6], GREEDY, request_id="a")
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.add_request([6], GREEDY, request_id="a") == "a"


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_aborting_a_request_ends_all_its_samples(llama, num_steps):
    engine = Engine(llama, max_num_batched_tokens=16)
    request_id = engine.add_request(
        draw_prompts([20])[0], SamplingParams(max_tokens=9, n=3, temperature=1.0, ignore_eos=True)
    )
    for _ in range(num_steps):
        engine.step()
    engine.abort(request_id)
    assert [output.finish_reason for output in engine.step()] == ["abort"] * 3
    assert not engine.has_unfinished_requests()
    assert_all_blocks_are_back(engine)


# Without a model


def table_of(engine: ModelFree, clock: Clock) -> RequestTable:
    return RequestTable(engine.scheduler, clock, PluginManager(load_entry_points=False), PolicyErrors())


def add(table: RequestTable, engine: ModelFree, num_forks: int = 0, **options) -> Request:
    """A waiting request with forks, known to the table."""
    request = engine.add(4, 9, **options)
    request.request_id = request.output.request_id = f"r{request.order}"
    forks = []
    for index in range(1, num_forks + 1):
        fork = engine.add(list(request.token_ids), 9, **options)
        engine.blocks.expect_no_more(fork)
        engine.policy.remove(fork)
        fork.request_id = fork.output.request_id = request.request_id
        fork.output.index = index
        forks.append(fork)
    request.forks = tuple(forks)
    table.add(request)
    return request


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> ModelFree:
    return ModelFree(Fifo())


@pytest.fixture
def table(engine, clock) -> RequestTable:
    return table_of(engine, clock)


def test_a_request_is_known_by_its_id_until_its_last_sample_ended(table, engine):
    request = add(table, engine, num_forks=1)
    fork = request.forks[0]
    assert (len(table), list(table), table.samples("r0")) == (1, [request, fork], [request, fork])
    with pytest.raises(RequestRefused, match="'r0' is taken"):
        table.check_free("r0")
    request.forks = ()
    table.end(request, "stop")
    assert ("r0" in table, list(table)) == (True, [fork])
    table.end(fork, "length")
    assert ("r0" in table, len(table), table.samples("r0")) == (False, 0, [])
    table.check_free("r0")
    assert [output.finish_reason for output in table.take_ended()] == ["stop", "length"]
    assert not table.has_ended


def test_aborting_ends_forks_that_never_split_and_says_whether_there_was_anything(table, engine):
    add(table, engine, num_forks=2)
    assert table.abort("r0")
    assert not table.abort("r0")
    assert [(output.index, output.finish_reason) for output in table.take_ended()] == [(n, "abort") for n in range(3)]
    assert_all_blocks_are_back(engine)


def test_a_failure_is_told_to_every_sample(table, engine):
    error = RuntimeError("no")
    table.fail(add(table, engine, num_forks=1), error)
    assert [(output.finish_reason, output.error) for output in table.take_ended()] == [("error", error)] * 2


def test_a_time_limit_ends_who_is_past_it_and_no_other(table, engine):
    late, later = add(table, engine, time_limit=2.0), add(table, engine, time_limit=3.0)
    endless = add(table, engine)
    assert table.next_time_limit == 2.0
    table.expire(1.9)
    assert not table.has_ended
    table.expire(2.0)
    assert (late.output.finish_reason, later.is_finished, endless.is_finished) == ("timeout", False, False)
    assert table.next_time_limit == 3.0
    table.expire(9.0)
    assert (later.output.finish_reason, endless.is_finished, table.next_time_limit) == ("timeout", False, None)


def test_a_limit_of_the_queue_ends_who_has_not_begun(table, engine):
    begun = add(table, engine, queue_limit=1.0)
    engine.step()
    waiting = add(table, engine, queue_limit=1.0)
    table.expire(1.0)
    assert (begun.is_finished, waiting.output.finish_reason) == (False, "timeout")


def test_limits_of_requests_that_ended_early_do_not_pile_up(table, engine):
    for _ in range(500):
        table.end(add(table, engine, time_limit=1000.0), "stop")
    assert len(table._time_limits) < 110
    table.expire(1000.0)
    assert {output.finish_reason for output in table.take_ended()} == {"stop"}


def test_outputs_that_could_not_be_handed_out_come_first_the_next_time(table, engine):
    first, running, second = (add(table, engine) for _ in range(3))
    table.end(first, "stop")
    taken = table.take_ended()
    table.end(second, "stop")
    table.give_back([*taken, running.output])
    assert [output.request_id for output in table.take_ended()] == ["r0", "r2"]


def test_each_row_gets_its_own_token_or_its_own_error(table, engine):
    requests = [add(table, engine) for _ in range(3)]
    step = engine.scheduler.schedule(0.0)
    error = ValueError("mine")
    going_on = table.deliver(step, requests, Sampled([7, error, 1], [None, None, {1: -0.5}]), 4.0, {1})
    assert [(output.request_id, output.new_token_ids) for output in going_on] == [("r0", [7])]
    assert [(output.request_id, output.finish_reason) for output in table.take_ended()] == [
        ("r1", "error"),
        ("r2", "stop"),
    ]
    assert (requests[1].output.token_ids, requests[1].output.error) == ([], error)
    assert (requests[2].output.new_token_ids, requests[2].output.logprobs) == ([1], [{1: -0.5}])
    assert [request.output.metrics.first_token_time for request in requests] == [4.0, None, 4.0]


def test_a_stop_condition_is_asked_when_all_rows_have_their_tokens(table, engine):
    seen = []
    requests = [add(table, engine, stop_condition=lambda request: seen.append([r.num_output_tokens for r in requests]))]
    requests.append(add(table, engine))
    table.deliver(engine.scheduler.schedule(0.0), requests, Sampled([5, 6], [None, None]), 0.0, ())
    assert seen == [[1, 1]]


def test_what_the_policy_gives_up_ends_with_timeout(clock):
    class GivesUp(Fifo):
        def doomed(self, now):
            return [request for request in self.candidates(now) if request.order == 1]

    engine = ModelFree(GivesUp())
    table = table_of(engine, clock)
    kept, lost = add(table, engine), add(table, engine)
    table.expire(0.0)
    assert (kept.is_finished, lost.output.finish_reason) == (False, "timeout")
