"""What a finished request tells: usage, times and logprobs, in LangChain's and OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata

from paged_backend.integrations.chat.token_logprobs import TokenLogprobs

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
        found["logprobs"] = {"content": TokenLogprobs(tokenizer).entries(output.token_ids, output.logprobs)}
    return found
