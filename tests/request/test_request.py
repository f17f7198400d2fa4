"""What a request counts of itself, and what it forgets."""

from __future__ import annotations

import gc
import weakref

from paged_backend.request.request import Request
from paged_backend.request.state import RequestState
from paged_backend.sampling_params import SamplingParams


class Marker:
    """Something to see go."""


def make(num_tokens: int = 3, **options) -> Request:
    return Request("a", list(range(num_tokens)), SamplingParams(max_tokens=5), 1.5, 0, **options)


def test_tokens_are_those_of_the_prompt_and_the_output():
    request = make()
    request.append_token(9)
    request.num_computed_tokens = 3
    assert request.token_ids == [0, 1, 2, 9]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_uncomputed_tokens) == (3, 1, 1)
    assert (request.num_tokens, request.max_num_tokens, request.tokens_since_admission) == (4, 8, 1)
    assert request.output.token_ids == [9]


def test_the_callers_list_is_left_alone():
    prompt = [1, 2]
    request = Request("a", prompt, SamplingParams(), 0.0, 0)
    request.append_token(3)
    assert prompt == [1, 2]


def test_the_last_token_is_replaced_in_the_output_and_in_what_is_fed():
    request = make()
    request.append_token(9)
    request.sampling_state = object()
    request.replace_last_token(7)
    assert (request.token_ids[-1], request.output.token_ids, request.output.new_token_ids) == (7, [7], [7])
    assert request.sampling_state is None


def test_a_request_is_held_when_it_decodes_with_nothing_left_to_feed():
    request = make()
    request.num_computed_tokens = 3
    assert not request.is_held
    request.state = RequestState.DECODE
    assert request.is_held
    request.append_token(1)
    assert not request.is_held


def test_states_are_told_apart_and_have_the_names_that_plugins_read():
    request = make()
    assert request.is_waiting
    request.state = RequestState.DECODE
    assert request.is_decoding
    request.state = RequestState.FINISHED
    assert request.is_finished
    assert [state.value for state in RequestState] == ["waiting", "prefill", "decode", "finished"]


def test_forks_take_seats_of_their_own():
    request = make()
    request.forks = (make(), make())
    assert request.num_seats == 3


def test_without_its_view_a_request_goes_with_its_last_reference():
    # A request takes no weak references; what it alone holds tells when it is gone.
    request = make(metadata=set())
    request.metadata.add(marker := Marker())
    alive = weakref.ref(marker)
    del marker
    assert request.view is request.view
    request.forget_view()
    gc.disable()
    try:
        del request
        assert alive() is None
    finally:
        gc.enable()


def test_a_request_describes_itself_in_a_line():
    assert repr(make()) == "Request('a', waiting, prompt=3, output=0, computed=0)"
