"""What is kept between a request's tokens follows from the tokens, so that losing it loses nothing."""

from __future__ import annotations

import pytest
from sampling_checks import EOS, MIXED, generate, make_requests
from stop_checks import make_request, run
from tiny_tokenizers import byte_level_bpe

from paged_backend.sampling.sampler import Sampler
from paged_backend.sampling.sampling_state import SamplingState
from paged_backend.sampling.stopping import finish_reason


def test_a_lost_sampling_state_loses_no_stop_text() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode("one two STOP three", add_special_tokens=False)
    request = make_request(tokenizer, stop="STOP")
    for token in ids:
        request.append_token(token)
        request.sampling_state = None
        if finish_reason(request, token, ()) is not None:
            break
    assert request.output.text == "one two "


def test_a_request_without_stop_texts_decodes_nothing() -> None:
    request = make_request(max_tokens=100)
    request.output.decode = lambda token_ids: pytest.fail("decoded")
    assert set(run(request, [5] * 99)) == {None}
    assert request.sampling_state is None


def test_a_request_that_lost_its_sampling_state_goes_on_as_before() -> None:
    first, second = make_requests(MIXED), make_requests(MIXED)
    generate(Sampler([EOS], seed=0), first, range(len(MIXED)), 20)
    generate(Sampler([EOS], seed=0), second, range(len(MIXED)), 20, forget=True)
    assert [r.token_ids for r in first] == [r.token_ids for r in second]


def test_the_state_of_a_request_is_made_once() -> None:
    request = make_request()
    assert SamplingState.of(request) is SamplingState.of(request)
