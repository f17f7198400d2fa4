"""What a finished request tells: usage, times and logprobs, in LangChain's and OpenAI's shapes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata

from paged_backend.integrations.langchain.token_bytes import TokenBytes

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


def num_tokens_of(part: str, output: RequestOutput, tokenizer: Any) -> int:
    """How many of an output's tokens spell this part of its text."""
    from paged_backend import tokenizer_lock

    token_ids, decode = output.token_ids, output.decode
    assert decode is not None, "an output with a text has tokens that were decoded"

    def length(count: int) -> int:
        # A part of a character is none yet.
        return len(decode(token_ids[:count]).rstrip("\ufffd"))

    with tokenizer_lock(tokenizer):
        start = decode(token_ids).find(part)
        if start < 0:
            # Put together from several places.
            return min(len(token_ids), len(tokenizer.encode(part, add_special_tokens=False)))
        counts = range(len(token_ids) + 1)
        first, last = (bisect_left(counts, place, key=length) for place in (start, start + len(part)))
        # Special tokens in front are no part of the text.
        while token_ids[first] in tokenizer.all_special_ids:
            first += 1
        return min(last, len(token_ids)) - first


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
    """Why it ended, by which stop text or stop token if by one, which model it was, how long it took (seconds), and
    its logprobs if they were asked for.

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
    if output.stop_reason is not None:
        found["stop_reason"] = output.stop_reason
    if output.logprobs is not None:
        found["logprobs"] = {"content": openai_logprobs(output, tokenizer)}
    return found


def openai_logprobs(output: RequestOutput, tokenizer: Any) -> list[dict[str, Any]]:
    """One entry per output token: the token, and the likeliest ones with it."""
    from paged_backend import tokenizer_lock

    entries = []
    with tokenizer_lock(tokenizer):
        spell, is_first = TokenBytes(tokenizer), True

        def logprob(token_id: int, value: float) -> dict[str, Any]:
            spelt = spell(token_id, is_first=is_first)
            return {"token": spelt.decode(errors="replace"), "bytes": list(spelt), "logprob": value}

        for token_id, top in zip(output.token_ids, output.logprobs or (), strict=True):
            likeliest = [logprob(*other) for other in sorted(top.items(), key=lambda item: -item[1])]
            entries.append({**logprob(token_id, top[token_id]), "top_logprobs": likeliest})
            is_first = is_first and token_id in spell.special_ids
    return entries
