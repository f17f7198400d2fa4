"""Request: what a caller submitted, with its state; and RequestOutput: what the caller sees of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from torch import Tensor

from paged_backend.request.lockstep import Lockstep
from paged_backend.request.view import RequestView
from paged_backend.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class RequestState(Enum):
    """Where a request is in its life; preemption leads from PREFILL or DECODE back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


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
    prompt_token_ids: list[int]
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


class Request:
    """One sequence being generated. The scheduler, the block manager and the sampler fill it in; plugins see a view.

    token_ids: prompt and output together. num_computed_tokens: how many of them have keys and values in the cache.
    num_scheduled_tokens: how many the current step feeds. num_lost_tokens: how many the last preemption took.
    prompt_embeds: what is fed in place of the prompt's tokens, [num_prompt_tokens, D], or None.
    seat: its row in the block tables while it holds one. forks: samples that split off when the prompt is computed.
    """

    __slots__ = (
        "_view",
        "arrival_time",
        "cache_salt",
        "client_id",
        "deadline",
        "forks",
        "last_scheduled_time",
        "lockstep",
        "metadata",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "order",
        "output",
        "overtaken",
        "params",
        "priority",
        "prompt_embeds",
        "queue_limit",
        "request_id",
        "sampling_state",
        "seat",
        "state",
        "stop_condition",
        "time_limit",
        "token_ids",
        "tokens_since_admission",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
        order: int,
        *,
        index: int = 0,
        priority: int = 0,
        deadline: float | None = None,
        time_limit: float | None = None,
        queue_limit: float | None = None,
        client_id: str | None = None,
        cache_salt: str | None = None,
        stop_condition: Callable[[Request], bool] | None = None,
        metadata: Any = None,
        lockstep: Lockstep | None = None,
        prompt_embeds: Tensor | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.arrival_time = arrival_time
        self.order = order
        self.priority = priority
        self.deadline = deadline
        self.time_limit = time_limit
        self.queue_limit = queue_limit
        self.client_id = client_id
        self.cache_salt = cache_salt
        self.stop_condition = stop_condition
        self.metadata = metadata
        self.lockstep = lockstep
        self.prompt_embeds = prompt_embeds
        self.state = RequestState.WAITING
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_lost_tokens = 0
        self.num_preemptions = 0
        self.tokens_since_admission = 0
        self.last_scheduled_time: float | None = None
        self.overtaken = 0
        self.seat: int | None = None
        self.forks: tuple[Request, ...] = ()
        self.sampling_state: Any = None
        self._view: RequestView | None = None
        self.output = RequestOutput(request_id, index, prompt_token_ids, RequestMetrics(arrival_time))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_num_tokens(self) -> int:
        """The most tokens, prompt and output, this request can come to."""
        return self.num_prompt_tokens + self.params.max_tokens

    @property
    def num_seats(self) -> int:
        """Rows of the batch that admitting it takes: its own and its forks'."""
        return 1 + len(self.forks)

    @property
    def view(self) -> RequestView:
        """What policies and hooks get to see of this request."""
        if self._view is None:
            self._view = RequestView(self)
        return self._view

    def forget_view(self) -> None:
        """Break the cycle with the view, so that a finished request goes with its last reference."""
        self._view = None

    @property
    def is_waiting(self) -> bool:
        return self.state is RequestState.WAITING

    @property
    def is_decoding(self) -> bool:
        return self.state is RequestState.DECODE

    @property
    def is_held(self) -> bool:
        """All of its tokens are computed, and the next one is not chosen before others of its lockstep come so far."""
        return self.state is RequestState.DECODE and len(self.token_ids) == self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def append_token(self, token: int) -> None:
        self.token_ids.append(token)
        self.output.token_ids.append(token)
        self.tokens_since_admission += 1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
