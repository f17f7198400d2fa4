"""Logits of a lockstep's members wait for the last of them, and for nobody who is gone."""

from __future__ import annotations

import torch

from paged_backend.request.lockstep import Lockstep
from paged_backend.request.request import Request
from paged_backend.request.state import RequestState
from paged_backend.sampling.held_rows import HeldRows
from paged_backend.sampling_params import SamplingParams


class Together(Lockstep):
    def process(self, requests, scores):
        return scores


def make_request(order: int, lockstep: Lockstep | None = None) -> Request:
    """One whose tokens are all computed."""
    request = Request(str(order), [1, 2], SamplingParams(), 0.0, order, lockstep=lockstep)
    request.state, request.num_computed_tokens = RequestState.DECODE, 2
    if lockstep is not None:
        lockstep.members.append(request)
    return request


def rows_of(*requests: Request) -> torch.Tensor:
    """A row for each, which holds its order."""
    return torch.tensor([[float(request.order)] * 3 for request in requests])


def join(held: HeldRows, *requests: Request) -> list[int]:
    """The orders of whom tokens are chosen for now, each with its own row."""
    logits, chosen = held.join(rows_of(*requests) if requests else None, list(requests))
    assert (logits is None) == (not chosen)
    if logits is not None:
        assert logits.tolist() == rows_of(*chosen).tolist()
    return [request.order for request in chosen]


def test_rows_pass_as_they_are_while_nobody_is_in_a_lockstep():
    requests = [make_request(order) for order in range(3)]
    logits = rows_of(*requests)
    assert HeldRows().join(logits, requests) == (logits, requests)
    assert HeldRows().join(None, []) == (None, [])


def test_members_are_held_until_the_last_has_come_so_far_and_others_are_not():
    held, together = HeldRows(), Together()
    first, second, third = (make_request(order, together) for order in range(3))
    other = make_request(3)
    assert join(held, first, other) == [3]
    assert join(held, second, other) == [3]
    assert join(held) == []
    assert sorted(join(held, other, third)) == [0, 1, 2, 3]
    assert join(held, other) == [3]


def test_held_rows_are_copies_of_the_steps_logits():
    held, together = HeldRows(), Together()
    first, second = (make_request(order, together) for order in (5, 6))
    logits = rows_of(first)
    held.join(logits, [first])
    logits.zero_()
    assert join(held, second) == [5, 6]


def test_members_that_ended_are_not_waited_for():
    held, together = HeldRows(), Together()
    first, second = (make_request(order, together) for order in range(2))
    assert join(held, first) == []
    second.state = RequestState.FINISHED
    assert join(held) == [0]


def test_the_row_of_a_member_that_was_preempted_or_ended_is_forgotten():
    held, together = HeldRows(), Together()
    first, second, third = (make_request(order, together) for order in range(3))
    assert join(held, first, second) == []
    first.state, first.num_computed_tokens = RequestState.WAITING, 0
    second.state = RequestState.FINISHED
    assert join(held, third) == []
    first.state, first.num_computed_tokens = RequestState.DECODE, 2
    assert sorted(join(held, first)) == [0, 2]


def test_locksteps_are_let_go_one_by_one():
    held, one, two = HeldRows(), Together(), Together()
    members = [make_request(order, lockstep) for order, lockstep in enumerate((one, two, one, two))]
    assert join(held, members[0], members[1]) == []
    assert join(held, members[2]) == [0, 2]
    assert join(held, members[3]) == [1, 3]
