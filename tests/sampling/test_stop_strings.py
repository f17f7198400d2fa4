"""Texts that end a request are found wherever tokens split them, and at little cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stop_checks import make_request, run
from tiny_tokenizers import SENTENCES, byte_fallback_bpe, byte_level_bpe


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
