"""A view shows all of a request and lets nobody change it."""

from __future__ import annotations

import pytest

from paged_backend.request.request import Request
from paged_backend.request.state import RequestState
from paged_backend.sampling_params import SamplingParams


def make_requests(count: int) -> list[Request]:
    return [Request(str(n), [1, 2, 3], SamplingParams(), float(n), n) for n in range(count)]


def test_view_shows_everything_and_changes_nothing():
    (request,) = make_requests(1)
    view = request.view
    assert view is request.view
    assert (view.order, view.num_tokens, view.is_waiting, view.finish_reason) == (0, 3, True, None)
    request.append_token(7)
    request.state = RequestState.DECODE
    assert view.token_ids == (1, 2, 3, 7)
    assert view.is_decoding
    with pytest.raises(AttributeError, match="read requests"):
        view.priority = 5
    with pytest.raises(AttributeError):
        view.token_ids.append(1)


def test_view_hands_out_no_params_that_can_be_changed():
    request = Request("0", [1], SamplingParams(logit_bias={3: 1.0}), 0.0, 0)
    request.view.params.logit_bias[3] = 99.0
    assert request.params.logit_bias == {3: 1.0}


def test_a_view_can_be_kept_in_sets_and_is_forgotten_with_its_request():
    requests = make_requests(2)
    views = {request.view for request in requests}
    assert requests[0].view in views
    old = requests[0].view
    requests[0].forget_view()
    assert requests[0].view is not old


def test_nothing_of_a_view_can_be_deleted_or_added():
    view = make_requests(1)[0].view
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del view.order
    with pytest.raises(AttributeError, match="cannot be set"):
        view.note = "mine"


def test_forks_are_seen_as_views():
    parent, fork = make_requests(2)
    assert parent.view.forks == ()
    parent.forks = (fork,)
    assert parent.view.forks == (fork.view,)


def test_a_view_tells_why_its_request_ended_and_reads_as_the_request_does():
    (request,) = make_requests(1)
    request.state, request.output.finish_reason = RequestState.FINISHED, "abort"
    assert (request.view.is_finished, request.view.finish_reason) == (True, "abort")
    assert repr(request.view) == repr(request)
