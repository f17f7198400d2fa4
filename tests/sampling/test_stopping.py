"""When a request ends: tokens, texts split over tokens, conditions, lengths; and the text it ends with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import SENTENCES, byte_fallback_bpe, byte_level_bpe, byte_tokenizer

from paged_backend.errors import RequestRefused
from paged_backend.request.request import Request
from paged_backend.sampling.stopping import check_stop, finish_reason
from paged_backend.sampling_params import SamplingParams

EOS = 7


def make_request(
    tokenizer: Any = None, stop_condition: Callable[[Request], bool] | None = None, **params: Any
) -> Request:
    request = Request("r", [1, 2, 3], SamplingParams(**params), 0.0, 0, stop_condition=stop_condition)
    if tokenizer is not None:
        request.output.decode = lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
    return request


def run(request: Request, tokens: Sequence[int], eos: Sequence[int] = (EOS,)) -> list[str | None]:
    """Feed tokens until one ends the request; the reasons so far."""
    reasons: list[str | None] = []
    for token in tokens:
        request.append_token(token)
        reasons.append(finish_reason(request, token, frozenset(eos)))
        if reasons[-1] is not None:
            break
    return reasons


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


@pytest.mark.parametrize("make_tokenizer", [byte_level_bpe, byte_fallback_bpe])
@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("one two STOP three", ["STOP"], "one two "),
        ("one two\n\nthree", ["\n\n"], "one two"),
        ("ab 日本語 cd", ["本"], "ab 日"),
        ("emoji 😀 done", ["😀"], "emoji "),
        ("a b c d", ["c", "b"], "a "),
        ("doesn't it", ["'t"], "doesn"),
        ("hello there", [" there"], "hello"),
        ("hello", ["h"], ""),
    ],
)
def test_a_stop_text_is_found_wherever_tokens_split_it(
    make_tokenizer: Callable[[], Any], text: str, stop: list[str], kept: str
) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    request = make_request(tokenizer, stop=stop)
    assert run(request, ids)[-1] == "stop"
    assert request.output.text == kept
    # No token more than needed was taken, and none was taken back.
    assert request.output.token_ids == ids[: request.num_output_tokens]
    assert not any(text in tokenizer.decode(request.output.token_ids[:-1]) for text in stop)


def test_the_stop_text_may_be_kept() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode("one two STOP three", add_special_tokens=False)
    request = make_request(tokenizer, stop="STOP", include_stop_str_in_output=True)
    run(request, ids)
    assert request.output.text == "one two STOP"


def test_the_beginning_of_a_stop_text_ends_nothing() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode("one STO", add_special_tokens=False)
    request = make_request(tokenizer, stop="STOP", max_tokens=len(ids))
    assert run(request, ids)[-1] == "length"
    assert request.output.text == "one STO"


def test_a_stop_text_before_min_tokens_is_passed_over_for_good() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode("XY one XY two XY three", add_special_tokens=False)
    least = tokenizer.encode("XY one", add_special_tokens=False)
    request = make_request(tokenizer, stop="XY", min_tokens=len(least))
    assert run(request, ids)[-1] == "stop"
    assert request.output.text == "XY one "


@pytest.mark.parametrize("text", ["one XY two XY three", "日本XY語XY", "XYXY"])
def test_a_stop_text_that_begins_before_min_tokens_is_passed_over_for_good(text: str) -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode(text, add_special_tokens=False)
    count = next(n for n in range(len(ids)) if "X" in tokenizer.decode(ids[:n]))
    assert "XY" not in tokenizer.decode(ids[:count])
    request = make_request(tokenizer, stop="XY", min_tokens=count)
    assert run(request, ids)[-1] == "stop"
    assert request.output.text == text[: text.rindex("XY")]


def test_a_stop_character_that_min_tokens_cuts_in_half_is_passed_over() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode("a本b本", add_special_tokens=False)
    count = next(n for n in range(len(ids)) if "\ufffd" in tokenizer.decode(ids[:n]))
    request = make_request(tokenizer, stop="本", min_tokens=count)
    assert run(request, ids)[-1] == "stop"
    assert request.output.text == "a本b"


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


@settings(deadline=None)
@given(data=st.data())
def test_stop_texts_agree_with_looking_through_the_whole_text_each_time(data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([byte_level_bpe(), byte_fallback_bpe()]))
    words = data.draw(st.lists(st.sampled_from(" ".join(SENTENCES).split(" ")), min_size=1, max_size=60))
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    text = tokenizer.decode(ids)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = [text[start : start + data.draw(st.integers(1, 12))], data.draw(st.sampled_from(["zq", "\n", "e"]))]
    # While a run of byte tokens is incomplete all of it is garbled, so there is no telling what was there before.
    min_tokens = data.draw(st.integers(0, len(ids))) if tokenizer is byte_level_bpe() else 0
    request = make_request(tokenizer, stop=stop, min_tokens=min_tokens, max_tokens=10**6)
    reasons = run(request, ids)

    for count in range(min_tokens + 1, len(ids) + 1):
        whole, before, least = (tokenizer.decode(ids[:n]) for n in (count, count - 1, min_tokens))
        while not whole.startswith(before):
            before = before[:-1]
        half = not whole.startswith(least)
        while not whole.startswith(least):
            least = least[:-1]
        first = len(least) + half
        starts = [whole.find(text, max(first, len(before) - len(text) + 1)) for text in stop]
        if any(start >= 0 for start in starts):
            assert reasons == [None] * (count - 1) + ["stop"]
            assert request.output.text == whole[: min(start for start in starts if start >= 0)]
            return
    assert reasons == [None] * len(ids)


def test_a_stop_text_costs_few_decoded_tokens_however_long_the_output() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode(" ".join(SENTENCES) * 10, add_special_tokens=False)
    decoded: list[int] = []
    request = make_request(stop="never there", max_tokens=10**6)

    def decode(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return tokenizer.decode(token_ids)

    request.output.decode = decode
    assert set(run(request, ids)) == {None}
    assert len(ids) > 1500
    assert max(decoded) < 120


def test_a_stop_text_within_a_long_run_of_byte_tokens_is_found() -> None:
    tokenizer = byte_fallback_bpe()
    text = "日本語の文章と中文字符" * 8
    ids = tokenizer.encode(text + "終" + text, add_special_tokens=False)
    assert len(ids) > 500
    request = make_request(tokenizer, stop="終", max_tokens=10**6)
    assert run(request, ids)[-1] == "stop"
    assert request.output.text == text


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


def test_a_request_without_stop_texts_decodes_nothing() -> None:
    request = make_request(max_tokens=100)
    request.output.decode = lambda token_ids: pytest.fail("decoded")
    assert set(run(request, [5] * 99)) == {None}
    assert request.sampling_state is None
