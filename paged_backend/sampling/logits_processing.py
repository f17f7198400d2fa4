"""What changes logits before a token is chosen, for many requests at once where the rule allows, else one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from paged_backend.errors import SamplingFailed, contained
from paged_backend.request.request import Request
from paged_backend.sampling.bad_words import BadWords
from paged_backend.sampling.detokenizer import tokenizer_lock
from paged_backend.sampling.sampling_state import SamplingState
from paged_backend.sampling.seen_tokens import SeenTokens
from paged_backend.sampling.structured import Constraint
from paged_backend.sampling_params import LogitsProcessor


class LogitsProcessing:
    """Everything between the logits and temperature, in transformers' order.

    logit_bias, repetition penalty, presence and frequency penalty (which transformers lacks), min_tokens, bad_words,
    then the request's own processors, and last what its output must match, which nothing may undo. The first four work
    on all rows at once and touch only the tokens concerned, with the results of SequenceBias-, RepetitionPenalty- and
    MinNewTokensLengthLogitsProcessor.
    """

    def __init__(self, eos_token_ids: Collection[int], tokenizer: Any = None) -> None:
        self.eos_token_ids = sorted(eos_token_ids)
        self.tokenizer = tokenizer

    def __call__(self, scores: Tensor, requests: Sequence[Request]) -> dict[int, Exception]:
        """Change ``scores`` ([R, V] float32) in place; returns the rows that could not be processed, and why."""
        self._add_bias(scores, requests)
        self._penalize(scores, requests)
        self._suppress_stops(scores, requests)
        failures: dict[int, Exception] = {}
        for row, request in enumerate(requests):
            if request.params.bad_words or request.params.logits_processors:
                try:
                    scores[row] = self._process_alone(scores[row : row + 1].clone(), request)[0]
                # Whatever a request's own code raises is that request's result and no other's.
                except BaseException as error:
                    failures[row] = contained(error)
            if request.params.is_constrained and row not in failures:
                try:
                    self._constrain(scores[row], request)
                except Exception as error:
                    failures[row] = error
        return failures

    def _add_bias(self, scores: Tensor, requests: Sequence[Request]) -> None:
        rows = [row for row, request in enumerate(requests) if request.params.logit_bias]
        if not rows:
            return
        biases = []
        for row in rows:
            state, bias = SamplingState.of(requests[row]), requests[row].params.logit_bias or {}
            if state.bias is None:
                assert max(bias) < scores.shape[1], "logit_bias was not checked against the vocabulary"
                values = torch.tensor(list(bias.values()), dtype=torch.float32, device="cpu")
                state.bias = torch.tensor(list(bias), device="cpu"), values
            biases.append(state.bias)
        places = _places(scores, rows, [token_ids for token_ids, _ in biases])
        scores.view(-1).index_add_(0, places, torch.cat([values for _, values in biases]).to(scores.device))

    def _penalize(self, scores: Tensor, requests: Sequence[Request]) -> None:
        rows = [row for row, request in enumerate(requests) if request.params.has_penalties]
        if not rows:
            return
        seen = []
        for row in rows:
            request, state = requests[row], SamplingState.of(requests[row])
            if state.seen is None:
                state.seen = SeenTokens(scores.shape[1])
            seen.append(state.seen.update(request.token_ids, request.num_prompt_tokens))
        params = [requests[row].params for row in rows]
        penalties = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
        factors = torch.tensor(penalties, dtype=torch.float32, device="cpu")
        counts = torch.tensor([len(ids) for ids, _ in seen], device="cpu")
        factors = factors.repeat_interleave(counts, dim=0).to(scores.device)
        repetition, frequency, presence = factors.unbind(1)
        counts = torch.cat([counts for _, counts in seen]).to(scores.device)
        places = _places(scores, rows, [ids for ids, _ in seen])
        values = scores.view(-1)[places]
        values = torch.where(values < 0, values * repetition, values / repetition)
        scores.view(-1)[places] = values - frequency * counts - presence * (counts > 0)

    def _suppress_stops(self, scores: Tensor, requests: Sequence[Request]) -> None:
        rows, token_ids = [], []
        for row, request in enumerate(requests):
            params = request.params
            if request.num_output_tokens < params.min_tokens:
                stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
                rows.append(row)
                in_vocabulary = [token for token in stops if token < scores.shape[1]]
                token_ids.append(torch.tensor(in_vocabulary, dtype=torch.int64, device="cpu"))
        if rows:
            scores.view(-1)[_places(scores, rows, token_ids)] = -torch.inf

    def _process_alone(self, scores: Tensor, request: Request) -> Tensor:
        """The request's own processors on its row: [1, V] float32 to [1, V]."""
        state = SamplingState.of(request)
        if state.processors is None:
            state.processors = [*self._bad_words_processors(request), *request.params.logits_processors]
        input_ids = torch.tensor([request.token_ids], device=scores.device)
        for processor in state.processors:
            processed = processor(input_ids, scores)
            if not isinstance(processed, Tensor) or processed.shape != scores.shape:
                got = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
                name = getattr(processor, "__name__", type(processor).__name__)
                expected = tuple(scores.shape)
                raise SamplingFailed(f"logits processor {name} must return scores of shape {expected}, got {got}")
            scores = processed
        return scores

    def _constrain(self, scores: Tensor, request: Request) -> None:
        state = SamplingState.of(request)
        if state.constraint is None:
            state.constraint = Constraint(request.params, self.tokenizer, self.eos_token_ids, len(scores))
        state.constraint.apply(scores, request.output.token_ids)

    def _bad_words_processors(self, request: Request) -> list[LogitsProcessor]:
        words = [
            list(spelling)
            for word in request.params.bad_words
            for spelling in (self._spellings(word) if isinstance(word, str) else [word])
        ]
        return [BadWords(words, self.eos_token_ids)] if words else []

    def _spellings(self, text: str) -> set[tuple[int, ...]]:
        """A text's token ids at the start of a text and after a space."""
        if self.tokenizer is None:
            raise SamplingFailed(f"bad_words={text!r} needs a tokenizer; give the engine one, or give token ids")
        with tokenizer_lock(self.tokenizer):
            spellings = (
                self.tokenizer.encode(prefix + text.lstrip(), add_special_tokens=False) for prefix in ("", " ")
            )
            return {tuple(spelling) for spelling in spellings}


def _places(scores: Tensor, rows: Sequence[int], token_ids: Sequence[Tensor]) -> Tensor:
    """Where the tokens of these rows stand in the flattened scores."""
    starts = torch.tensor(rows, device="cpu") * scores.shape[1]
    lengths = torch.tensor([len(ids) for ids in token_ids], device="cpu")
    return (torch.cat(list(token_ids)) + starts.repeat_interleave(lengths)).to(scores.device)
