"""How many tokens requests took."""

from __future__ import annotations

from paged_backend.integrations.chat.token_usage import sum_usage, token_usage
from paged_backend.outputs import RequestMetrics, RequestOutput


def output(num_tokens: int) -> RequestOutput:
    metrics = RequestMetrics(arrival_time=1.0, num_cached_tokens=2)
    return RequestOutput("0", 0, [5, 6, 7, 8], metrics, list(range(num_tokens)))


def test_samples_count_their_prompt_once():
    usage = token_usage([output(3), output(2)])
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 5, 9)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_reasoning_is_told_where_there_is_some():
    assert "completion_tokens_details" not in token_usage([output(3)])
    assert token_usage([output(3)], 2)["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_usages_of_several_prompts_add_up():
    total = sum_usage([token_usage([output(3)]), token_usage([output(2)])])
    assert (total["prompt_tokens"], total["completion_tokens"], total["total_tokens"]) == (8, 5, 13)
    assert total["prompt_tokens_details"] == {"cached_tokens": 4}
