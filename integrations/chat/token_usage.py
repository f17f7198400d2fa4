"""How many tokens requests took, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_backend import RequestOutput


def token_usage(outputs: Sequence[RequestOutput], num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """Of one request with all its samples; ``cached_tokens`` of the prompt's were in the prefix cache."""
    first = outputs[0]
    num_prompt, num_output = len(first.prompt_token_ids), sum(len(output.token_ids) for output in outputs)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": first.metrics.num_cached_tokens},
    }
    if num_reasoning_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return usage


def sum_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several prompts."""
    total = {
        name: sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}
