"""Sampler: one token per request from a step's logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from paged_backend.errors import SamplingFailed
from paged_backend.kernels import first_argmax
from paged_backend.request.lockstep import Lockstep
from paged_backend.request.request import Request
from paged_backend.sampling.distribution import take_rows, warp
from paged_backend.sampling.logits_processing import LogitsProcessing
from paged_backend.sampling.random_stream import stream_key, uniform
from paged_backend.sampling.sampled import Sampled
from paged_backend.sampling.sampling_state import SamplingState

# Rows are processed in groups of about this many logits: 8 MiB in float32, which a CPU's cache holds.
_CPU_GROUP, _GPU_GROUP = 2**21, 2**26


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
        together: dict[Lockstep, list[int]] = {}
        others = []
        for row, request in enumerate(requests):
            if request.lockstep is not None:
                together.setdefault(request.lockstep, []).append(row)
            elif not request.params.is_plain_greedy:
                others.append(row)
        if len(others) + sum(map(len, together.values())) < len(requests):
            tokens[:] = first_argmax(logits).tolist()
        for lockstep, rows in together.items():
            try:
                self._sample_rows(lockstep, logits, requests, rows, tokens, logprobs)
            except Exception as error:
                for row in rows:
                    tokens[row] = error
        group = max(1, (_CPU_GROUP if logits.device.type == "cpu" else _GPU_GROUP) // logits.shape[1])
        for start in range(0, len(others), group):
            self._sample_apart(logits, requests, others[start : start + group], tokens, logprobs)
        for row, token in enumerate(tokens):
            if token == -1:
                tokens[row] = _no_token(requests[row], logits[row : row + 1])
        return Sampled(tokens, logprobs)

    def _sample_apart(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        rows: list[int],
        tokens: list[int | Exception],
        logprobs: list[dict[int, float] | None],
    ) -> None:
        """``_sample_rows``; where it fails as a whole, by halves, until only rows that fail alone have no token."""
        try:
            self._sample_rows(self.processing, logits, requests, rows, tokens, logprobs)
        except Exception as error:
            if len(rows) == 1:
                tokens[rows[0]] = error
                return
            half = len(rows) // 2
            for part in (rows[:half], rows[half:]):
                self._sample_apart(logits, requests, part, tokens, logprobs)

    def _sample_rows(
        self,
        processing: Callable[[Tensor, Sequence[Request]], dict[int, Exception]],
        logits: Tensor,
        all_requests: Sequence[Request],
        rows: list[int],
        tokens: list[int | Exception],
        logprobs: list[dict[int, float] | None],
    ) -> None:
        """Fill in ``tokens`` and ``logprobs`` of some rows, -1 where no token can be chosen."""
        requests = [all_requests[row] for row in rows]
        scores = take_rows(logits, rows).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        failures = processing(scores, requests)
        chosen, processed = self._choose(scores, requests)
        for place, (row, request) in enumerate(zip(rows, requests, strict=True)):
            token = tokens[row] = failures.get(place, chosen[place])
            count = request.params.logprobs
            if count is not None and isinstance(token, int) and token >= 0:
                dense = processed[place] if place in processed else logits[row].float().log_softmax(-1)
                logprobs[row] = _top_logprobs(dense, token, count)

    def _choose(self, scores: Tensor, requests: Sequence[Request]) -> tuple[list[int], dict[int, Tensor]]:
        """Tokens from processed scores, and [V] logprobs of the rows that want those of what they were drawn from."""
        chosen = [-1] * len(requests)
        processed: dict[int, Tensor] = {}
        wants_processed = [r.params.logprobs is not None and r.params.logprobs_mode == "processed" for r in requests]
        greedy = [row for row, request in enumerate(requests) if request.params.is_greedy]
        drawn = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        if greedy:
            for row, token in zip(greedy, first_argmax(take_rows(scores, greedy)).tolist(), strict=True):
                chosen[row] = token
                if wants_processed[row]:
                    processed[row] = scores[row].log_softmax(-1)
        if drawn:
            numbers = [self._uniform(requests[row]) for row in drawn]
            uniforms = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            for places, distribution in warp(take_rows(scores, drawn), [requests[row].params for row in drawn]):
                picked = distribution.draw(uniforms[places].to(scores.device)).tolist()
                for column, (place, token) in enumerate(zip(places, picked, strict=True)):
                    row = drawn[place]
                    chosen[row] = token
                    if wants_processed[row]:
                        processed[row] = distribution.logprobs(column, scores.shape[1])
        return chosen, processed

    def _uniform(self, request: Request) -> float:
        state = SamplingState.of(request)
        if state.stream is None:
            seed, index = request.params.seed, request.output.index
            state.stream = (
                stream_key(0, seed, index) if seed is not None else stream_key(1, self.seed, request.order, index)
            )
        return uniform(state.stream, request.num_output_tokens)


def _no_token(request: Request, logits: Tensor) -> SamplingFailed:
    """Why a request got none, by its logits ([1, V]) as the model gave them."""
    changed = request.params.changes_logits or request.lockstep is not None
    if changed and first_argmax(logits).item() != -1:
        what = "processed scores hold NaN or only -inf, and the model's logits do not"
        fix = "its logits_processors, logit_bias, bad_words and min_tokens must leave a token that can be chosen"
    else:
        what = f"logits, {logits.dtype} as the model computes them, hold NaN or only -inf"
        fix = (
            "look for NaN among the model's weights; where float16 overflows, at 65504, load it with "
            "dtype=torch.bfloat16 or torch.float32"
        )
    return SamplingFailed(f"no token can be chosen for request {request.request_id!r}: its {what}; {fix}")


def _top_logprobs(logprobs: Tensor, token: int, count: int) -> dict[int, float]:
    top = {token: float(logprobs[token])}
    if count:
        values, token_ids = logprobs.topk(count)
        for token_id, value in zip(token_ids.tolist(), values.tolist(), strict=True):
            if value > -math.inf:
                top.setdefault(token_id, value)
    return top
