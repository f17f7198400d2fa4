"""PolicyGuard checks answers one by one; tests/plugins/test_hostile.py shows what that comes to in an engine."""

from __future__ import annotations

from contextlib import closing

import pytest

from paged_backend.plugins.fifo import Fifo
from paged_backend.policies import SchedulingPolicy
from paged_backend.policy.policy_guard import MAX_HOLD_S, PolicyGuard
from paged_backend.request.request import Request
from paged_backend.request.state import RequestState
from paged_backend.sampling_params import SamplingParams


def make_requests(count: int) -> list[Request]:
    return [Request(str(n), [1, 2, 3], SamplingParams(), float(n), n) for n in range(count)]


def guard_of(policy: SchedulingPolicy, requests=()) -> tuple[PolicyGuard, list[tuple[str, object]]]:
    errors: list[tuple[str, object]] = []
    guard = PolicyGuard(policy, lambda policy, method, error: errors.append((method, error)))
    for request in requests:
        guard.add(request, request.arrival_time)
    return guard, errors


def hostile(**methods) -> Fifo:
    return type("Hostile", (Fifo,), methods)()


def test_sound_answers_pass_as_they_are():
    requests = make_requests(4)
    guard, errors = guard_of(hostile(candidates=lambda self, now: [r.view for r in reversed(requests)]), requests)
    assert list(guard.candidates(0.0)) == requests[::-1]
    assert guard.waiting == requests
    assert errors == []


def test_sound_candidates_before_a_lie_keep_their_place():
    requests = make_requests(4)
    stranger = make_requests(9)[8]
    answer = [requests[2].view, stranger.view, requests[3].view]
    guard, errors = guard_of(hostile(candidates=lambda self, now: answer), requests)
    assert [r.order for r in guard.candidates(0.0)] == [2, 0, 1, 3]
    assert errors[0][0] == "candidates"
    assert "does not wait" in errors[0][1]


def test_requests_a_policy_failed_to_take_in_go_first():
    requests = make_requests(3)

    def add(self, request, now):
        if request.order == 2:
            raise ValueError("no")
        Fifo.add(self, request, now)

    guard, errors = guard_of(hostile(add=add), requests)
    assert [r.order for r in guard.candidates(0.0)] == [2, 0, 1]
    guard.remove(requests[2])
    assert [method for method, _ in errors] == ["add"]


def test_requests_held_back_on_purpose_are_not_forced():
    requests = make_requests(3)
    guard, errors = guard_of(hostile(candidates=lambda self, now: [requests[1].view]), requests)
    assert list(guard.candidates(0.0)) == [requests[1]]
    assert errors == []


def test_policy_is_closed_when_the_engine_has_enough():
    closed = []

    def candidates(self, now):
        try:
            yield from Fifo.candidates(self, now)
        finally:
            closed.append(now)

    requests = make_requests(3)
    guard, _ = guard_of(hostile(candidates=candidates), requests)
    with closing(guard.candidates(5.0)) as some:
        next(some)
    assert closed == [5.0]


@pytest.mark.parametrize("kept", [slice(2, None), slice(0)], ids=["two", "none"])
def test_a_ranking_that_leaves_prefills_out_is_reported_and_not_followed(kept):
    requests = make_requests(4)
    guard, errors = guard_of(hostile(rank_prefills=lambda self, some, now: some[kept]))
    assert guard.rank_prefills(requests, 0.0) == requests
    ((method, error),) = errors
    assert method == "rank_prefills"
    assert "not an order of the 4 requests it was given" in error


@pytest.mark.parametrize("count", [-1, 2, 4, "3", None])
def test_a_wrong_count_is_reported_though_all_are_offered_and_they_keep_their_order(count):
    requests = make_requests(3)
    policy = hostile(candidates=lambda self, now: [r.view for r in reversed(requests)], __len__=lambda self: count)
    guard, errors = guard_of(policy, requests)
    assert list(guard.candidates(0.0)) == requests[::-1]
    assert [(method, error.split(",")[1]) for method, error in errors] == [
        ("__len__", " but 3 requests that it was given wait")
    ]


def test_policy_that_does_not_rank_or_listen_is_not_asked():
    guard, errors = guard_of(Fifo())
    assert not guard.ranks_prefills
    assert not guard.can_preempt
    guard.on_tokens([(request, 1) for request in make_requests(3)], 0.0)
    guard.on_step(1, 2, 0.5)
    assert guard.doomed(0.0) == []
    assert errors == []


def test_methods_set_on_the_object_are_asked_too():
    policy, heard = Fifo(), []
    policy.on_finished = lambda request, now: heard.append(request.order)
    guard, _ = guard_of(policy)
    guard.on_finished(make_requests(1)[0], 0.0)
    assert heard == [0]


@pytest.mark.parametrize("next_wakeup", [lambda now: now + MAX_HOLD_S, lambda now: now + 31, lambda now: 120.0])
def test_policy_that_never_lets_anybody_go_is_waited_for_once_and_never_again(next_wakeup):
    requests = make_requests(3)
    guard, errors = guard_of(hostile(next_wakeup=lambda self, now: next_wakeup(now)), requests)
    now = 100.0
    while (until := guard.hold_until(now)) is not None:
        assert until <= 100.0 + MAX_HOLD_S
        now = until
    assert [method for method, _ in errors] == ["next_wakeup"]
    assert "held everybody back from 100.0 on" in errors[0][1]
    assert "it is waited for no more" in errors[0][1]
    admit(guard, requests[0])
    assert guard.hold_until(500.0) is None
    assert len(errors) == 1


def test_policy_that_breaks_down_while_it_holds_back_is_not_waited_for_again():
    def next_wakeup(self, now):
        if now > 100.0:
            raise ValueError("broken")
        return now + 50.0

    requests = make_requests(2)
    guard, errors = guard_of(hostile(next_wakeup=next_wakeup), requests)
    assert guard.hold_until(100.0) == 150.0
    assert guard.hold_until(150.0) is None
    admit(guard, requests[0])
    assert guard.hold_until(50.0) is None
    assert [method for method, _ in errors] == ["next_wakeup"]


def admit(guard: PolicyGuard, request: Request) -> None:
    request.state = RequestState.PREFILL
    guard.remove(request)


def test_hold_begins_anew_once_somebody_was_let_go():
    requests = make_requests(2)
    guard, errors = guard_of(hostile(next_wakeup=lambda self, now: now + MAX_HOLD_S), requests)
    guard.hold_until(100.0)
    admit(guard, requests[0])
    assert guard.hold_until(500.0) == 500.0 + MAX_HOLD_S
    assert errors == []


def test_hold_goes_on_for_those_who_wait_when_another_gives_up():
    requests = make_requests(2)
    guard, errors = guard_of(hostile(next_wakeup=lambda self, now: now + 31), requests)
    guard.hold_until(100.0)
    guard.remove(requests[0])
    assert guard.hold_until(131.0) is None
    assert errors[0][0] == "next_wakeup"


def test_hold_of_a_queue_that_emptied_is_over():
    requests = make_requests(2)
    guard, errors = guard_of(hostile(next_wakeup=lambda self, now: now + MAX_HOLD_S), requests[:1])
    guard.hold_until(100.0)
    guard.remove(requests[0])
    guard.add(requests[1], 500.0)
    assert guard.hold_until(500.0) == 500.0 + MAX_HOLD_S
    assert errors == []
