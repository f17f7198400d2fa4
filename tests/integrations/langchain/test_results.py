"""What a finished request tells, in LangChain's and OpenAI's shapes."""

from __future__ import annotations

from typing import Any

from tiny_tokenizers import byte_tokenizer

from paged_backend.integrations.langchain.results import (
    details,
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


def test_details_tell_only_the_times_that_were_reached():
    done = output(finish_reason="stop", stop_reason="x")
    done.metrics.first_token_time = 1.5
    found = details(done, "m", TOKENIZER)
    assert found == {
        "finish_reason": "stop", "model_name": "m", "timings": {"first_token_s": 0.5}, "stop_reason": "x",
    }  # fmt: skip
