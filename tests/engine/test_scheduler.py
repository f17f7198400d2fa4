"""The scheduler's own decisions, step by step, with real blocks and policies and no model."""

from __future__ import annotations

import pytest
from block_checks import assert_all_blocks_are_back
from model_free import ModelFree

from paged_backend.plugins.batches import Window
from paged_backend.plugins.fifo import Fifo
from paged_backend.plugins.priority import Priority
from paged_backend.policies import KeyedPolicy
from paged_backend.request.lockstep import Lockstep
from paged_backend.request.request import Request
from paged_backend.request.state import RequestState


class ByArrival(KeyedPolicy):
    """First come, first served, passing over those that do not fit."""

    def key(self, request):
        return request.order


class LeastFirst(ByArrival):
    """The shortest rest of a prompt gets the budget first."""

    def rank_prefills(self, prefilling, now):
        return sorted(prefilling, key=lambda request: request.num_uncomputed_tokens)


class NewestFirst(ByArrival):
    """The newest prompt gets the budget first, and the oldest request gives way."""

    def rank_prefills(self, prefilling, now):
        return prefilling[::-1]

    def victim(self, running, now):
        return running[0]


class SetsAside(ByArrival):
    """Whoever comes may take the place of the newest."""

    def preempts(self, candidate, running, now):
        return running[-1] if running else None


class Together(Lockstep):
    def process(self, requests, scores):
        return scores


def chunks(step) -> dict[int, int]:
    """How many prompt tokens the step computes of whom."""
    return {request.order: request.num_scheduled_tokens for request in step.prefills}


def planned(engine: ModelFree) -> tuple[list[int], dict[int, int]]:
    """Who decodes and whose prompt tokens are computed in the next step, which is taken."""
    step = engine.scheduler.schedule(engine.now)
    result = [request.order for request in step.decodes], chunks(step)
    engine.scheduler.commit(step, engine.now)
    for request in [*step.decodes, *(r for r in step.prefills if r.is_decoding)]:
        request.append_token(9)
    return result


def orders(requests) -> list[int]:
    return [request.order for request in requests]


def finish(engine: ModelFree) -> None:
    """Let everything end; nothing was reported and no block is lost."""
    engine.run()
    engine.assert_sound()
    assert_all_blocks_are_back(engine)


# The budget


def test_every_decode_goes_first_and_costs_nothing_of_the_prompts_budget():
    engine = ModelFree(Fifo(), max_num_seqs=3, budget=4)
    for _ in range(2):
        engine.add(2, 5)
    assert planned(engine) == ([], {0: 2, 1: 2})
    engine.add(9, 5)
    assert planned(engine) == ([0, 1], {2: 4})
    assert planned(engine) == ([0, 1], {2: 4})
    assert planned(engine) == ([0, 1], {2: 1})
    assert planned(engine) == ([0, 1, 2], {})


def test_a_prompt_is_cut_into_chunks_and_the_next_one_gets_what_is_left():
    engine = ModelFree(Fifo(), budget=6)
    for prompt in (8, 3, 9):
        engine.add(prompt, 2)
    assert [planned(engine) for _ in range(4)] == [
        ([], {0: 6}),
        ([], {0: 2, 1: 3, 2: 1}),
        ([0, 1], {2: 6}),
        ([0, 1], {2: 2}),
    ]


def test_only_decodes_and_prompts_that_are_complete_yield_a_token():
    engine = ModelFree(Fifo(), budget=6)
    engine.add(4, 3)
    engine.add(9, 3)
    step = engine.scheduler.schedule(0.0)
    assert chunks(step) == {0: 4, 1: 2}
    assert orders(step.sampling) == [0]
    assert orders(step.requests) == [0, 1]


def test_the_policy_ranks_prompts_also_one_that_has_not_begun():
    engine = ModelFree(LeastFirst(), budget=4)
    engine.add(20, 2)
    assert planned(engine) == ([], {0: 4})
    engine.add(3, 2)
    assert planned(engine) == ([], {1: 3, 0: 1})


def test_a_prompt_that_waits_for_budget_is_ranked_with_those_that_compute():
    engine = ModelFree(Fifo(), budget=4)
    engine.add(6, 2)
    engine.add(6, 2)
    assert [planned(engine)[1] for _ in range(3)] == [{0: 4}, {0: 2, 1: 2}, {1: 4}]


def test_tokens_of_new_prompts_are_counted_once_cached_and_recomputed_ones_too():
    engine = ModelFree(Fifo(), budget=16)
    shared = [*range(1000, 1008)]
    engine.add([*shared, 1], 2)
    assert engine.scheduler.schedule(0.0).num_new_prompt_tokens == 9
    engine.run()
    again = engine.add([*shared, 2], 2)
    step = engine.scheduler.schedule(engine.now)
    assert (step.num_new_prompt_tokens, step.num_prefill_tokens) == (9, 1)
    again.output.metrics.first_scheduled_time = 0.0
    assert step.num_new_prompt_tokens == 0
    assert (engine.scheduler.num_prefix_hits, engine.scheduler.num_cached_tokens) == (1, 8)


# Who begins


@pytest.mark.parametrize(("policy", "expected"), [(Fifo(), [0, 1, 2]), (Priority(), [2, 0, 1])])
def test_requests_begin_in_the_policys_order(policy, expected):
    engine = ModelFree(policy, max_num_seqs=1)
    for priority in (5, 5, 1):
        engine.add(3, 2, priority=priority)
    finish(engine)
    assert engine.start_orders == expected


def test_no_more_begin_than_there_are_seats():
    engine = ModelFree(Fifo(), max_num_seqs=2)
    for _ in range(3):
        engine.add(2, 3)
    assert orders(engine.step().admitted) == [0, 1]
    assert (engine.scheduler.num_waiting, len(engine.scheduler.running)) == (1, 2)
    finish(engine)


def test_who_does_not_fit_is_passed_over_by_smaller_ones_and_each_passing_counts():
    engine = ModelFree(ByArrival(), num_blocks=12, budget=64)
    engine.add(16, 4)
    large, small, smaller = engine.add(30, 4), engine.add(4, 4), engine.add(3, 4)
    assert orders(engine.step().admitted) == [0, 2, 3]
    assert [request.overtaken for request in (large, small, smaller)] == [2, 0, 0]
    finish(engine)


@pytest.mark.parametrize(("lookahead", "admitted"), [(0, [0]), (1, [0]), (2, [0, 3])])
def test_no_more_are_passed_over_than_the_policy_looks_ahead(lookahead, admitted):
    policy = ByArrival()
    policy.lookahead = lookahead
    engine = ModelFree(policy, num_blocks=8, budget=64)
    engine.add(16, 4)
    for prompt in (20, 24, 4):
        engine.add(prompt, 4)
    assert orders(engine.step().admitted) == admitted
    finish(engine)


def test_blocks_that_half_computed_prompts_have_yet_to_take_are_promised_to_them():
    engine = ModelFree(Fifo(), num_blocks=8, budget=4)
    engine.add(24, 2)
    engine.step()
    assert engine.blocks.pools[0].num_available == 6
    second = engine.add(8, 2)
    engine.scheduler.max_num_batched_tokens = 16
    engine.step()
    assert second.is_waiting
    finish(engine)


def test_a_cached_beginning_is_not_computed_again():
    engine = ModelFree(Fifo(), budget=64)
    engine.add([*range(500, 510)], 2)
    engine.run()
    request = engine.add([*range(500, 512)], 2)
    assert chunks(engine.scheduler.schedule(engine.now)) == {1: 4}
    assert (request.num_cached_tokens, request.num_computed_tokens) == (8, 8)


# Samples of one request


def with_fork(engine: ModelFree, prompt: int, output: int) -> tuple[Request, Request]:
    parent = engine.add(prompt, output)
    fork = engine.add(list(parent.token_ids), output)
    engine.blocks.expect_no_more(fork)
    engine.policy.remove(fork)
    parent.forks = (fork,)
    return parent, fork


def test_forks_have_their_seats_from_the_start_and_split_off_with_the_prompt():
    engine = ModelFree(Fifo(), max_num_seqs=3, budget=4)
    parent, fork = with_fork(engine, 6, 3)
    engine.add(2, 3)
    late = engine.add(2, 3)
    assert orders(engine.step().admitted) == [0]
    assert list(engine.scheduler.running) == [parent]
    step = engine.step()
    assert orders(step.admitted) == [2]
    assert late.is_waiting
    assert parent.forks == ()
    assert list(engine.scheduler.running) == [parent, step.admitted[0], fork]
    assert fork.num_output_tokens == parent.num_output_tokens == 1
    finish(engine)


def test_a_request_with_forks_begins_only_when_all_its_seats_are_free():
    engine = ModelFree(ByArrival(), max_num_seqs=2)
    engine.add(2, 3)
    parent, _ = with_fork(engine, 2, 3)
    later = engine.add(2, 3)
    assert orders(engine.step().admitted) == [0, later.order]
    assert parent.overtaken == 1
    finish(engine)


# Running out of memory


def test_the_newest_gives_up_its_blocks_keeps_its_tokens_and_comes_back_first():
    engine = ModelFree(Fifo(), num_blocks=6, max_num_seqs=2)
    first, second = engine.add(8, 12), engine.add(8, 12)
    while not (step := engine.step()).preempted:
        assert len(engine.scheduler.running) == 2
    ((victim, num_blocks),) = step.preempted
    assert victim is second
    assert num_blocks == 3
    assert (victim.is_waiting, victim.num_computed_tokens, victim.num_preemptions) == (True, 0, 1)
    assert victim.num_output_tokens > 0
    assert victim.seat is None
    assert orders(step.decodes) == [first.order]
    later = engine.add(8, 4)
    finish(engine)
    assert engine.start_orders[:4] == [0, 1, 1, later.order]
    metrics = [request.output.metrics.num_preemptions for request in (first, second, later)]
    assert engine.scheduler.num_preemptions == sum(metrics)
    assert metrics[:2] == [0, 1]


def test_nobody_begins_in_a_step_that_had_to_preempt():
    engine = ModelFree(ByArrival(), num_blocks=6, max_num_seqs=4)
    for _ in range(2):
        engine.add(8, 12)
    step = engine.step()
    while not step.preempted:
        small = engine.add(1, 1)
        step = engine.step()
    assert step.admitted == []
    assert small.is_waiting
    finish(engine)


def test_who_got_nothing_done_since_it_began_is_spared_if_others_can_pay():
    engine = ModelFree(Fifo(), max_num_seqs=3)
    for _ in range(3):
        engine.add(4, 9)
    engine.step()
    requests = list(engine.scheduler.running)
    assert engine.scheduler._victim(0.0) is requests[2]
    requests[2].tokens_since_admission = 0
    assert engine.scheduler._victim(0.0) is requests[1]
    # One alone must not pay for everybody each time.
    requests[1].tokens_since_admission = 0
    assert engine.scheduler._victim(0.0) is requests[2]


def test_when_no_prompt_finds_blocks_the_others_make_room_for_the_first_in_rank():
    engine = ModelFree(NewestFirst(), num_blocks=10, max_num_seqs=2, budget=8)
    for _ in range(2):
        engine.add(16, 2)
    assert [planned(engine) for _ in range(2)] == [([], {0: 8}), ([], {1: 8})]
    pool = engine.blocks.pools[0]
    taken = pool.allocate(pool.num_available)
    step = engine.scheduler.schedule(engine.now)
    assert [victim.order for victim, _ in step.preempted] == [0]
    assert chunks(step) == {1: 8}
    pool.release(taken, 0.0)
    finish(engine)


def test_recomputed_tokens_count_what_the_cache_no_longer_held():
    engine = ModelFree(Fifo(), num_blocks=64)
    request = engine.add(10, 4)
    step = engine.step()
    engine.scheduler.preempt(request, step, engine.now)
    assert (request.state, request.num_lost_tokens) == (RequestState.WAITING, 10)
    engine.step()
    # Two of its blocks were still cached.
    assert engine.scheduler.num_recomputed_tokens == 2
    finish(engine)


@pytest.mark.parametrize("seed", range(3))
def test_everything_ends_under_pressure_and_every_block_comes_back(seed):
    engine = ModelFree(ByArrival(), num_blocks=12, block_size=2, max_num_seqs=5, budget=5)
    for index in range(25):
        engine.add(1 + (7 * index + seed) % 11, 1 + (5 * index + seed) % 12)
    finish(engine)
    assert engine.scheduler.num_preemptions > 0
    assert sorted(orders(engine.ended)) == list(range(25))


# Setting aside


def test_a_policy_may_set_a_running_request_aside_for_a_better_one():
    engine = ModelFree(Priority(preempt=True), max_num_seqs=2)
    for priority in (3, 4):
        engine.add(4, 9, priority=priority)
    engine.step()
    urgent = engine.add(4, 2, priority=0)
    step = engine.step()
    assert [victim.order for victim, _ in step.preempted] == [1]
    assert step.admitted == [urgent]
    finish(engine)
    assert engine.start_orders == [0, 1, 2, 1]


def test_nobody_is_set_aside_for_one_who_would_not_fit_all_the_same():
    engine = ModelFree(Priority(preempt=True), num_blocks=10, max_num_seqs=3)
    engine.add(12, 9, priority=0)
    engine.add(4, 9, priority=5)
    engine.step()
    engine.add(30, 2, priority=2)
    assert engine.step().preempted == []
    finish(engine)


def test_who_was_set_aside_is_spared_until_it_got_something_done():
    engine = ModelFree(SetsAside(), max_num_seqs=1, budget=6)
    engine.add(8, 3)
    engine.step()
    engine.add(8, 3)
    # The first time nobody is spared, whatever it got done.
    assert [victim.order for victim, _ in engine.step().preempted] == [0]
    finish(engine)
    assert engine.scheduler.num_preemptions < 10
    assert max(request.num_preemptions for request in engine.ended) >= 1


# Holding back


def test_while_the_policy_holds_everybody_back_the_scheduler_says_until_when():
    engine = ModelFree(Window(batch=3, window_ms=1000))
    engine.add(4, 2)
    assert not engine.step(drain=False)
    assert engine.scheduler.held_until == 1.0
    engine.now = 1.0
    assert orders(engine.step(drain=False).admitted) == [0]
    assert engine.scheduler.held_until is None
    finish(engine)


def test_with_nothing_more_to_come_the_first_begins_at_once():
    engine = ModelFree(Window(batch=3, window_ms=1000))
    engine.add(4, 2)
    assert orders(engine.step(drain=True).admitted) == [0]
    assert engine.scheduler.held_until is None
    finish(engine)


def test_a_policy_that_offers_nobody_and_names_no_time_is_overruled_when_nothing_runs():
    class Nobody(ByArrival):
        def candidates(self, now):
            return iter(())

    engine = ModelFree(Nobody())
    for _ in range(2):
        engine.add(4, 3)
    assert orders(engine.step().admitted) == [0, 1]
    later = engine.add(4, 3)
    assert engine.step().admitted == []
    engine.run()
    assert later.is_finished
    assert {name.rpartition(".")[2] for name in engine.errors.counts} == {"next_wakeup"}
    assert_all_blocks_are_back(engine)


# In step


def test_members_of_a_lockstep_begin_one_behind_the_other():
    engine = ModelFree(Fifo(), max_num_seqs=3, budget=64)
    together = Together()
    requests = [engine.add(4, 2, lockstep=together if index in (1, 3) else None) for index in range(4)]
    together.members += [requests[1], requests[3]]
    assert orders(engine.step().admitted) == [0, 1, 3]
    finish(engine)


def test_nobody_else_begins_before_the_last_member_of_a_lockstep_runs():
    engine = ModelFree(ByArrival(), max_num_seqs=3, budget=64)
    together = Together()
    engine.add(4, 4)
    engine.add(4, 2)
    members = [engine.add(4, 3, lockstep=together) for _ in range(2)]
    together.members += members
    other = engine.add(4, 2)
    assert orders(engine.step().admitted) == [0, 1, 2]
    assert (members[1].is_waiting, other.is_waiting) == (True, True)
    engine.step()
    assert orders(engine.step().admitted) == [3]
    finish(engine)


def test_a_second_lockstep_waits_until_the_first_is_over_and_single_requests_do_not():
    engine = ModelFree(ByArrival(), max_num_seqs=4, budget=64)
    locksteps = [Together(), Together()]
    for lockstep in locksteps:
        lockstep.members += [engine.add(4, 3, lockstep=lockstep) for _ in range(2)]
    single = engine.add(4, 2)
    assert orders(engine.step().admitted) == [0, 1, single.order]
    finish(engine)
    assert engine.start_orders == [0, 1, single.order, 2, 3]


def test_who_is_held_for_its_lockstep_is_not_fed():
    engine = ModelFree(Fifo())
    held, other = engine.add(4, 3), engine.add(4, 3)
    engine.step()
    # Its last token is computed, and the next one not chosen.
    held.num_computed_tokens = held.num_tokens
    assert held.is_held
    assert orders(engine.scheduler.schedule(engine.now).decodes) == [other.order]


# Steps that fail


def test_a_step_that_is_never_carried_out_is_planned_again():
    engine = ModelFree(Fifo(), budget=6)
    engine.add(4, 2)
    engine.add(8, 2)
    first = engine.scheduler.schedule(0.0)
    expected = chunks(first)
    again = engine.scheduler.schedule(0.0)
    assert chunks(again) == expected == {0: 4, 1: 2}
    assert again.admitted == []
    engine.blocks.check_integrity()
    finish(engine)


def test_after_a_restart_all_wait_by_arrival_and_no_block_is_held():
    engine = ModelFree(Fifo(), max_num_seqs=2, budget=8)
    for _ in range(3):
        engine.add(4, 4)
    engine.step()
    engine.step()
    engine.scheduler.restart(engine.now)
    assert not engine.scheduler.running
    assert orders(engine.scheduler.policy.waiting) == [0, 1, 2]
    assert [request.num_computed_tokens for request in engine.scheduler.policy.waiting] == [0, 0, 0]
    assert [request.num_output_tokens for request in engine.scheduler.policy.waiting] == [2, 2, 0]
    assert engine.blocks.pools[0].num_free == engine.blocks.pools[0].num_blocks
    finish(engine)
    assert sorted(orders(engine.ended)) == [0, 1, 2]


# Ending


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_request_can_end_in_every_state_and_gives_everything_back(num_steps):
    engine = ModelFree(Fifo(), budget=4)
    request = engine.add(8, 9)
    for _ in range(num_steps):
        engine.step()
    engine.abort(request)
    assert (request.state, request.output.finish_reason) == (RequestState.FINISHED, "abort")
    assert request.output.metrics.finished_time == engine.now
    assert not engine.scheduler.has_work()
    assert_all_blocks_are_back(engine)


def test_the_policy_hears_of_steps_tokens_and_ends():
    heard = []

    class Listener(ByArrival):
        def on_step(self, num_decodes, num_prefill_tokens, seconds):
            heard.append(("step", num_decodes, num_prefill_tokens, round(seconds, 6)))

        def on_tokens(self, request, num_tokens, now):
            heard.append(("tokens", request.order, num_tokens, request.num_uncomputed_tokens))

        def on_finished(self, request, now):
            heard.append(("finished", request.order, now))

    engine = ModelFree(Listener(), budget=4, step_s=lambda num_decodes, num_prefill_tokens: 0.5)
    engine.add(6, 2)
    engine.run()
    assert heard == [
        ("step", 0, 4, 0.5),
        ("tokens", 0, 4, 2),
        ("step", 0, 2, 0.5),
        ("tokens", 0, 2, 0),
        ("step", 1, 0, 0.5),
        ("tokens", 0, 1, 0),
        ("finished", 0, 1.5),
    ]
