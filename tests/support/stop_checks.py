"""A request that is fed tokens until one ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paged_backend.request.request import Request
from paged_backend.sampling.stopping import finish_reason
from paged_backend.sampling_params import SamplingParams

EOS = 7


def make_request(
    tokenizer: Any = None, stop_condition: Callable[[Request], bool] | None = None, **params: Any
) -> Request:
    request = Request("r", [1, 2, 3], SamplingParams(**params), 0.0, 0, stop_condition=stop_condition)
    if tokenizer is not None:
        request.output.decode = lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
    return request


def run(request: Request, tokens: Sequence[int], eos: Sequence[int] = (EOS,)) -> list[str | None]:
    """Feed tokens until one ends the request; the reasons so far."""
    reasons: list[str | None] = []
    for token in tokens:
        request.append_token(token)
        reasons.append(finish_reason(request, token, frozenset(eos)))
        if reasons[-1] is not None:
            break
    return reasons
