"""RequestView: a request as policies and hooks see it."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

from paged_backend.outputs import FinishReason
from paged_backend.request.state import RequestState
from paged_backend.sampling_params import SamplingParams


def _read(name: str) -> Any:
    return property(attrgetter(f"_request.{name}"))


class RequestView:
    """Everything there is to know about a request, live, with nothing to change: assigning raises AttributeError.

    One object per request for as long as it is unfinished, so views can be compared with ``is`` and kept in sets.

    order: position by arrival, unique; smaller came first. deadline, time_limit: seconds of the engine's clock.
    num_tokens: prompt and output so far. num_computed_tokens: how many of them have keys and values in the cache;
    0 again after a preemption. num_cached_tokens: how many of those were found in the prefix cache.
    num_known_tokens: how many of a waiting request's tokens it would find there now, at most; 0 once it runs.
    max_num_tokens: the most it can come to. tokens_since_admission: tokens generated since it last began to run.
    overtaken: how often it was passed over because it did not fit. metadata: what the caller attached, as it is.
    """

    __slots__ = ("_request",)
    # The Request, whose module knows this one.
    _request: Any

    request_id: str = _read("request_id")
    order: int = _read("order")
    arrival_time: float = _read("arrival_time")
    priority: int = _read("priority")
    deadline: float | None = _read("deadline")
    time_limit: float | None = _read("time_limit")
    client_id: str | None = _read("client_id")
    cache_salt: str | None = _read("cache_salt")
    metadata: Any = _read("metadata")

    state: RequestState = _read("state")
    is_waiting: bool = _read("is_waiting")
    is_decoding: bool = _read("is_decoding")
    is_finished: bool = _read("is_finished")
    finish_reason: FinishReason | None = _read("output.finish_reason")

    num_tokens: int = _read("num_tokens")
    num_prompt_tokens: int = _read("num_prompt_tokens")
    num_output_tokens: int = _read("num_output_tokens")
    num_computed_tokens: int = _read("num_computed_tokens")
    num_uncomputed_tokens: int = _read("num_uncomputed_tokens")
    num_cached_tokens: int = _read("num_cached_tokens")
    num_known_tokens: int = _read("num_known_tokens")
    max_num_tokens: int = _read("max_num_tokens")
    num_preemptions: int = _read("num_preemptions")
    tokens_since_admission: int = _read("tokens_since_admission")
    last_scheduled_time: float | None = _read("last_scheduled_time")
    overtaken: int = _read("overtaken")

    def __init__(self, request: Any) -> None:
        object.__setattr__(self, "_request", request)

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen."""
        params: SamplingParams = self._request.params
        # The one field of it that could be changed in place.
        return params if params.logit_bias is None else replace(params)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output together; a copy, so keep it rather than ask again."""
        return tuple(self._request.token_ids)

    @property
    def forks(self) -> tuple[RequestView, ...]:
        """The further samples of ``n`` above 1 that split off once the prompt is computed; empty after that."""
        return tuple(fork.view for fork in self._request.forks)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set: policies and hooks read requests")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} cannot be deleted: policies and hooks read requests")

    def __repr__(self) -> str:
        return repr(self._request)
