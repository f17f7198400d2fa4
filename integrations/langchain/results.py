"""What a finished request tells: usage, times and logprobs, in LangChain's and OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata

if TYPE_CHECKING:
    from paged_backend import RequestOutput


def usage_metadata(outputs: Sequence[RequestOutput], num_reasoning_tokens: int = 0) -> UsageMetadata:
    """Tokens of a request; ``cache_read`` of the prompt's were in the prefix cache."""
    first = outputs[0]
    num_prompt, num_output = len(first.prompt_token_ids), sum(len(output.token_ids) for output in outputs)
    usage = UsageMetadata(
        input_tokens=num_prompt,
        output_tokens=num_output,
        total_tokens=num_prompt + num_output,
        input_token_details=InputTokenDetails(cache_read=first.metrics.num_cached_tokens),
    )
    if num_reasoning_tokens:
        usage["output_token_details"] = OutputTokenDetails(reasoning=num_reasoning_tokens)
    return usage


def token_usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The same under the names that LLM classes use."""
    usage = usage_metadata(outputs)
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": usage["input_token_details"]["cache_read"]},
    }


def sum_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several prompts."""
    total = {
        name: sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}


def details(output: RequestOutput, model: str, tokenizer: Any) -> dict[str, Any]:
    """Why it ended, which model it was, how long it took (seconds), and its logprobs if they were asked for.

    Streams give it with their last chunk: merged chunks join texts and refuse two different floats.
    """
    metrics = output.metrics
    start = metrics.arrival_time
    moments = {
        "queue_s": metrics.first_scheduled_time,
        "first_token_s": metrics.first_token_time,
        "total_s": metrics.finished_time,
    }
    found: dict[str, Any] = {
        "finish_reason": output.finish_reason,
        "model_name": model,
        "timings": {name: moment - start for name, moment in moments.items() if moment is not None},
    }
    if output.logprobs is not None:
        found["logprobs"] = {"content": openai_logprobs(output, tokenizer)}
    return found


def openai_logprobs(output: RequestOutput, tokenizer: Any) -> list[dict[str, Any]]:
    """One entry per output token: the token, and the likeliest ones with it."""
    from paged_backend import tokenizer_lock

    entries = []
    with tokenizer_lock(tokenizer):
        for token_id, top in zip(output.token_ids, output.logprobs or (), strict=True):
            likeliest = sorted(top.items(), key=lambda item: -item[1])
            shown = [_logprob(tokenizer, other, value) for other, value in likeliest]
            entries.append({**_logprob(tokenizer, token_id, top[token_id]), "top_logprobs": shown})
    return entries


def _logprob(tokenizer: Any, token_id: int, value: float) -> dict[str, Any]:
    text: str = tokenizer.decode([token_id])
    return {"token": text, "bytes": list(text.encode()), "logprob": value}
