"""RequestOutput: what the caller of a request gets to see of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass
class RequestMetrics:
    """Times in seconds of the engine's clock, None until they happen."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0


@dataclass
class RequestOutput:
    """A request's result, complete once ``finish_reason`` is set.

    While the request runs, each step hands out the same object: ``token_ids`` grows in place and ``new_token_ids`` is
    what the step added. ``index`` tells the samples of one request apart when ``n`` is above 1. ``stop_reason`` is the
    one of the request's ``stop`` texts or ``stop_token_ids`` that ended it, None where something else did. ``error``
    holds the exception when ``finish_reason`` is ``"error"``.
    """

    request_id: str
    index: int
    prompt_token_ids: Sequence[int]
    metrics: RequestMetrics
    token_ids: list[int] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    error: Exception | None = None
    decode: Callable[[Sequence[int]], str] | None = field(default=None, repr=False, compare=False)
    final_text: str | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The tokens so far as text, without a stop string; empty when the engine has no tokenizer."""
        if self.final_text is not None:
            return self.final_text
        return self.decode(self.token_ids) if self.decode is not None else ""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def snapshot(self) -> RequestOutput:
        """A copy that shares nothing which grows or can be changed."""
        return replace(
            self,
            prompt_token_ids=list(self.prompt_token_ids),
            metrics=replace(self.metrics),
            token_ids=list(self.token_ids),
            new_token_ids=list(self.new_token_ids),
            logprobs=None if self.logprobs is None else [dict(entry) for entry in self.logprobs],
        )
