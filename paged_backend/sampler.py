"""Sampler: one token per request from a step's logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paged_backend.distribution import warp
from paged_backend.errors import SamplingFailed
from paged_backend.logits_processing import LogitsProcessing
from paged_backend.random_stream import stream_key, uniform
from paged_backend.sampling_state import SamplingState

if TYPE_CHECKING:
    from paged_backend.request import Request
    from paged_backend.sampling_params import SamplingParams

# Rows are processed in groups of about this many logits: 8 MiB in float32, which a CPU's cache holds.
_CPU_GROUP, _GPU_GROUP = 2**21, 2**26
# The first maximum is sought among the maxima of blocks of this many logits.
_BLOCK = 256


class Sampled(NamedTuple):
    """One entry per request: its token or why it has none, and its logprobs by token id (None unless asked for).

    Logprobs hold the token itself first, then the likeliest tokens, likeliest first, without those that cannot come up.
    """

    tokens: list[int | Exception]
    logprobs: list[dict[int, float] | None]


class Sampler:
    """Chooses tokens as each request's SamplingParams say; requests of one step may differ in everything.

    A request's token depends on its own logits row, parameters, tokens and random stream only. The stream is a function
    of the seed, ``RequestOutput.index`` and the number of output tokens, so neither batch mates nor preemption move it.

    eos_token_ids: the model's end-of-sequence tokens. seed: where the streams of requests without a seed start,
    together with ``Request.order``; None draws it afresh. tokenizer: needed for ``bad_words`` given as texts.
    """

    def __init__(self, eos_token_ids: Collection[int], seed: int | None = None, tokenizer: Any = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed
        self.processing = LogitsProcessing(eos_token_ids, tokenizer)

    @torch.no_grad()
    def sample(self, logits: Tensor, requests: Sequence[Request]) -> Sampled:
        """Next tokens of ``requests`` from ``logits`` ([R, V], the model's dtype), which are left as they are.

        An exception raised by a request's own processor is returned as that request's entry, as is SamplingFailed where
        logits or processed scores hold NaN or nothing above -inf.
        """
        tokens: list[int | Exception] = [-1] * len(requests)
        logprobs: list[dict[int, float] | None] = [None] * len(requests)
        others = [row for row, request in enumerate(requests) if not request.params.is_plain_greedy]
        if len(others) < len(requests):
            tokens[:] = _first_argmax(logits).tolist()
        group = max(1, (_CPU_GROUP if logits.device.type == "cpu" else _GPU_GROUP) // logits.shape[1])
        for start in range(0, len(others), group):
            self._sample_rows(logits, requests, others[start : start + group], tokens, logprobs)
        for row, token in enumerate(tokens):
            if token == -1:
                tokens[row] = SamplingFailed(
                    f"no token can be chosen for request {requests[row].request_id!r}: its "
                    f"{'processed scores' if requests[row].params.changes_logits else 'logits'} hold NaN or only -inf"
                )
        return Sampled(tokens, logprobs)

    def _sample_rows(
        self,
        logits: Tensor,
        all_requests: Sequence[Request],
        rows: list[int],
        tokens: list[int | Exception],
        logprobs: list[dict[int, float] | None],
    ) -> None:
        """Fill in ``tokens`` and ``logprobs`` of some rows, -1 where no token can be chosen."""
        requests = [all_requests[row] for row in rows]
        params = [request.params for request in requests]
        scores = logits[rows].float()
        failures = self.processing(scores, requests)

        chosen = [-1] * len(rows)
        processed: dict[int, Tensor] = {}
        greedy = [place for place, p in enumerate(params) if p.is_greedy]
        if greedy:
            for place, token in zip(greedy, _first_argmax(scores[greedy]).tolist(), strict=True):
                chosen[place] = token
                if _wants_processed(params[place]):
                    processed[place] = scores[place].log_softmax(-1)
        drawn = [place for place, p in enumerate(params) if not p.is_greedy]
        if drawn:
            uniforms = scores.new_tensor([self._uniform(requests[place]) for place in drawn], dtype=torch.float64)
            for group, distribution in warp(scores[drawn], [params[place] for place in drawn]):
                for row, token in enumerate(distribution.draw(uniforms[group]).tolist()):
                    place = drawn[group[row]]
                    chosen[place] = token
                    if _wants_processed(params[place]):
                        processed[place] = distribution.logprobs(row, scores.shape[1])

        for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            tokens[row] = failures.get(place, token)
            count = params[place].logprobs
            if count is not None and place not in failures and token >= 0:
                dense = processed[place] if place in processed else logits[row].float().log_softmax(-1)
                logprobs[row] = _top_logprobs(dense, token, count)

    def _uniform(self, request: Request) -> float:
        state = SamplingState.of(request)
        if state.stream is None:
            seed, index = request.params.seed, request.output.index
            state.stream = (
                stream_key(0, seed, index) if seed is not None else stream_key(1, self.seed, request.order, index)
            )
        return uniform(state.stream, request.num_output_tokens)


def _wants_processed(params: SamplingParams) -> bool:
    return params.logprobs is not None and params.logprobs_mode == "processed"


def _top_logprobs(logprobs: Tensor, token: int, count: int) -> dict[int, float]:
    top = {token: float(logprobs[token])}
    if count:
        values, token_ids = logprobs.topk(count)
        for token_id, value in zip(token_ids.tolist(), values.tolist(), strict=True):
            if value > -math.inf:
                top.setdefault(token_id, value)
    return top


def _first_argmax(scores: Tensor) -> Tensor:
    """Index of the first maximum of each row ([R, V] to [R] int64), -1 for a row with NaN or nothing above -inf.

    In the scores' own dtype, which orders them as float32 would since every half-precision number is one of float32.
    Plain maxima of blocks come first, because torch finds a maximum without its index many times faster.
    """
    vocab_size = scores.shape[1]
    num_blocks, rest = divmod(vocab_size, _BLOCK)
    maxima = scores[:, : vocab_size - rest].unflatten(1, (num_blocks, _BLOCK)).amax(-1)
    if rest:
        maxima = torch.cat([maxima, scores[:, vocab_size - rest :].amax(-1, keepdim=True)], 1)
    block = maxima.argmax(-1, keepdim=True)
    # Past the end the last score repeats, which moves no first maximum.
    places = block * _BLOCK + torch.arange(_BLOCK, device=scores.device)
    tokens = block[:, 0] * _BLOCK + scores.gather(1, places.clamp_(max=vocab_size - 1)).argmax(-1)
    return torch.where(maxima.gather(1, block)[:, 0] > -torch.inf, tokens, -1)
