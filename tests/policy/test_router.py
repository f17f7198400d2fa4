"""A router checks every answer, tells policies what it knows, and names what they do wrong."""

from __future__ import annotations

import pytest

from paged_backend.policies import RoutingPolicy
from paged_backend.policy.policy_errors import PolicyErrors
from paged_backend.policy.router import Router
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams


def request(order: int, length: int = 8) -> Request:
    return Request(str(order), list(range(length)), SamplingParams(max_tokens=2), 0.0, order)


def router(policy: RoutingPolicy, num_blocks: int = 10) -> tuple[Router, PolicyErrors]:
    errors = PolicyErrors(times_answers=False)
    return Router(policy, 3, errors, block_size=4, num_blocks=num_blocks), errors


@pytest.mark.parametrize("answer", [-1, 3, True, None, "0", 1.0])
def test_an_impossible_answer_is_reported_and_replicas_taken_in_turn(answer: object) -> None:
    made, errors = router(type("Odd", (RoutingPolicy,), {"route": lambda *_: answer})())
    assert [made.route(request(n)) for n in range(4)] == [0, 1, 2, 0]
    assert list(errors.counts.values()) == [4]
    assert next(iter(errors.counts)).endswith("Odd.route")


def test_a_router_that_raises_harms_nobody() -> None:
    def fail(*_: object) -> int:
        raise ValueError("broken")

    made, errors = router(type("Broken", (RoutingPolicy,), {"route": fail, "on_finished": fail})())
    sent = [request(n) for n in range(2)]
    assert [made.route(one) for one in sent] == [0, 1]
    made.finished(sent[0])
    assert sorted(name.rpartition(".")[2] for name in errors.counts) == ["on_finished", "route"]


class Notes(RoutingPolicy):
    """Sends all to the second, and writes down what it was told."""

    asks_prefixes = True

    def __init__(self) -> None:
        self.told, self.ended = [], []

    def route(self, request, replicas):
        self.told.append([(r.num_waiting, r.num_outstanding_tokens, r.num_known_tokens) for r in replicas])
        self.view = request
        return 1

    def on_finished(self, request, replica):
        self.ended.append((request is self.view, replica))


def test_policies_are_told_loads_and_what_is_known_of_the_prompt() -> None:
    policy = Notes()
    made, errors = router(policy)
    sent = [request(n) for n in range(2)]
    for one in sent:
        made.route(one)
    assert policy.told == [[(0, 0, 0)] * 3, [(0, 0, 0), (1, 10, 8), (0, 0, 0)]]
    made.finished(sent[1])
    made.tell(1, 0, 1)
    made.route(request(2, length=4))
    assert policy.told[-1][1] == (0, 10, 4)
    assert policy.ended == [(True, 1)]
    assert not errors.counts


def test_nothing_is_known_without_a_prefix_cache_or_of_a_policy_that_does_not_ask() -> None:
    assert router(Notes(), num_blocks=0)[0].prefixes is None
    assert router(type("Plain", (RoutingPolicy,), {"route": lambda *_: 0})())[0].prefixes is None
