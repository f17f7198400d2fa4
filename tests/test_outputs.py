"""RequestOutput: its text, its end, and copies that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paged_backend.outputs import RequestMetrics, RequestOutput


def spell(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def output(**fields: Any) -> RequestOutput:
    return RequestOutput("a", 0, [1, 2], RequestMetrics(arrival_time=3.0), **fields)


def test_text_follows_the_tokens_as_they_grow():
    growing = output(token_ids=[97], decode=spell)
    assert growing.text == "a"
    growing.token_ids.append(98)
    assert growing.text == "ab"


def test_a_final_text_stands_even_when_it_is_empty():
    assert output(token_ids=[97], decode=spell, final_text="").text == ""


def test_without_a_tokenizer_there_is_no_text():
    assert output(token_ids=[97]).text == ""


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "timeout", "error"])
def test_an_output_with_a_reason_is_finished(reason: Any):
    assert not output().finished
    assert output(finish_reason=reason).finished


def test_a_snapshot_equals_its_output_and_no_longer_follows_it():
    growing = output(token_ids=[97], new_token_ids=[97], logprobs=[{97: -0.5}], decode=spell)
    copy = growing.snapshot()
    assert copy == growing
    growing.token_ids.append(98)
    growing.new_token_ids[:] = [98]
    growing.logprobs[0][98] = -1.0
    growing.logprobs.append({98: -0.5})
    growing.metrics.first_token_time = 4.0
    growing.prompt_token_ids.append(3)
    assert copy == output(token_ids=[97], new_token_ids=[97], logprobs=[{97: -0.5}])
    assert copy.text == "a"


def test_outputs_of_different_decoders_are_equal_if_all_else_is():
    assert output(token_ids=[97], decode=spell) == output(token_ids=[97])
    assert output(token_ids=[97]) != output(token_ids=[98])
