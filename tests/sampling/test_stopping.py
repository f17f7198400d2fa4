"""When a request ends: tokens, texts split over tokens, conditions, lengths; and the text it ends with."""

from __future__ import annotations

from typing import Any

import pytest
from stop_checks import EOS, make_request, run
from tiny_tokenizers import byte_level_bpe, byte_tokenizer

from paged_backend.errors import RequestRefused
from paged_backend.request.request import Request
from paged_backend.sampling.stopping import check_stop
from paged_backend.sampling_params import SamplingParams


def test_an_end_of_sequence_token_ends_a_request_and_stays_in_its_tokens() -> None:
    request = make_request()
    assert run(request, [5, EOS, 6]) == [None, "stop"]
    assert request.output.token_ids == [5, EOS]


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    assert run(make_request(ignore_eos=True, max_tokens=3), [5, EOS, 6, 6]) == [None, None, "length"]


def test_the_last_token_allowed_may_still_be_a_stop() -> None:
    assert run(make_request(max_tokens=2), [5, EOS]) == [None, "stop"]


def test_a_stop_token_ends_a_request_even_when_eos_is_ignored() -> None:
    assert run(make_request(stop_token_ids=[9], ignore_eos=True), [5, 9, 6]) == [None, "stop"]


def test_nothing_stops_before_min_tokens() -> None:
    request = make_request(min_tokens=3, stop_token_ids=[9])
    assert run(request, [9, EOS, 5, EOS]) == [None, None, None, "stop"]


def test_the_text_leaves_out_a_stop_token_unless_asked() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode("hi!", add_special_tokens=False)
    request = make_request(tokenizer, stop_token_ids=[ids[-1]])
    assert run(request, ids)[-1] == "stop"
    assert request.output.text == "hi"
    assert request.output.token_ids == ids
    request = make_request(tokenizer, stop_token_ids=[ids[-1]], include_stop_str_in_output=True)
    run(request, ids)
    assert request.output.text == "hi!"


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({"stop": ["on", "nd"]}, "and so on", "nd"),
        ({"stop": ["nd so", "nd"]}, "and so on", "nd"),
        ({"stop_token_ids": [ord("s")]}, "and so on", ord("s")),
        ({"stop": ["x"], "stop_token_ids": [9]}, "a\x07", None),
        ({"stop": ["x"], "max_tokens": 2}, "and", None),
    ],
)
def test_what_stopped_a_request_is_told(params: dict[str, Any], text: str, reason: str | int | None) -> None:
    request = make_request(**params)
    request.output.decode = lambda token_ids: "".join(map(chr, token_ids))
    assert run(request, list(map(ord, text)))[-1] is not None
    assert request.output.stop_reason == reason


def test_a_condition_of_the_caller_ends_a_request() -> None:
    request = make_request(stop_condition=lambda request: request.output.token_ids[-2:] == [4, 4])
    assert run(request, [4, 5, 4, 4, 4]) == [None, None, None, "stop"]


def test_a_condition_that_raises_is_not_swallowed() -> None:
    def broken(request: Request) -> bool:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        run(make_request(stop_condition=broken), [4])


def test_stop_texts_without_a_tokenizer_are_refused_with_the_fix() -> None:
    with pytest.raises(RequestRefused, match="stop_token_ids"):
        check_stop(SamplingParams(stop="x"), None)
    with pytest.raises(RequestRefused, match="token ids"):
        check_stop(SamplingParams(bad_words=["x"]), None)
    check_stop(SamplingParams(stop_token_ids=[3], bad_words=[[3]]), None)
    check_stop(SamplingParams(stop="x", bad_words=["x"]), byte_level_bpe())


def test_a_special_token_as_a_stop_text_is_refused_with_its_id() -> None:
    with pytest.raises(RequestRefused, match=f"{byte_level_bpe().eos_token_id}, into stop_token_ids"):
        check_stop(SamplingParams(stop="<|end|>"), byte_level_bpe())


def test_a_special_token_without_a_name_is_refused_as_a_stop_text_unless_it_is_shown() -> None:
    tokenizer = byte_tokenizer(marks=["<call>"])
    assert "<call>" not in tokenizer.all_special_tokens
    with pytest.raises(RequestRefused, match="259, into stop_token_ids"):
        check_stop(SamplingParams(stop="a<call>"), tokenizer)
    check_stop(SamplingParams(stop="a<call>", shown_special_tokens=["<call>"]), tokenizer)
    with pytest.raises(RequestRefused, match="needs a tokenizer"):
        check_stop(SamplingParams(shown_special_tokens="<call>"), None)


def test_the_token_that_ends_a_text_is_not_shown() -> None:
    request = make_request(shown_special_tokens=["<end>"])
    request.output.decode = lambda token_ids: "".join("<end>" if token == EOS else "x" for token in token_ids)
    assert run(request, [5, EOS])[-1] == "stop"
    assert request.output.text == "x"
    request = make_request(shown_special_tokens=["<end>"], ignore_eos=True, max_tokens=3)
    request.output.decode = lambda token_ids: "".join("<end>" if token == EOS else "x" for token in token_ids)
    assert run(request, [5, EOS, 5])[-1] == "length"
    assert request.output.text == "x<end>x"
