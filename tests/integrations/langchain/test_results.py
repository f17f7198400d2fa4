"""What a finished request tells, in LangChain's and OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import byte_tokenizer

from paged_backend.integrations.langchain.results import (
    details,
    num_tokens_of,
    openai_logprobs,
    sum_usage,
    token_usage,
    usage_metadata,
)
from paged_backend.outputs import RequestMetrics, RequestOutput

TOKENIZER = byte_tokenizer()


def output(text: str = "abc", **fields: Any) -> RequestOutput:
    metrics = RequestMetrics(arrival_time=1.0, num_cached_tokens=2)
    ids = TOKENIZER(text)["input_ids"]
    return RequestOutput("0", 0, [5, 6, 7, 8], metrics, ids, decode=TOKENIZER.decode, **fields)


def test_samples_count_their_prompt_once():
    usage = usage_metadata([output("abc"), output("de")])
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (4, 5, 9)
    assert usage["input_token_details"] == {"cache_read": 2}


def test_reasoning_is_told_where_there_is_some():
    assert "output_token_details" not in usage_metadata([output()])
    assert usage_metadata([output()], 2)["output_token_details"] == {"reasoning": 2}


def test_usages_of_several_prompts_add_up():
    total = sum_usage([token_usage([output("abc")]), token_usage([output("de")])])
    assert (total["prompt_tokens"], total["completion_tokens"], total["total_tokens"]) == (8, 5, 13)
    assert total["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize(("part", "count"), [("a", 1), ("é", 2), ("b", 1), ("aéb", 4), ("ab", 2)])
def test_the_tokens_of_a_part_are_those_that_spell_it(part: str, count: int):
    assert num_tokens_of(part, output("aéb"), TOKENIZER) == count


def test_details_tell_only_the_times_that_were_reached():
    done = output(finish_reason="stop", stop_reason="x")
    done.metrics.first_token_time = 1.5
    found = details(done, "m", TOKENIZER)
    assert found == {
        "finish_reason": "stop", "model_name": "m", "timings": {"first_token_s": 0.5}, "stop_reason": "x",
    }  # fmt: skip


def test_logprobs_have_their_token_and_the_likeliest_first():
    a, b = TOKENIZER("ab")["input_ids"]
    (entry,) = openai_logprobs(output("a", logprobs=[{a: -2.0, b: -0.5}]), TOKENIZER)
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("a", [97], -2.0)
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("b", -0.5), ("a", -2.0)]
