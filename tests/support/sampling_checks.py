"""What tests of sampling share: requests, logits, and what stock `generate` would do with them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from paged_backend.request.request import Request
from paged_backend.sampling.sampler import Sampler
from paged_backend.sampling_params import SamplingParams

EOS = 1


def make_request(params: SamplingParams, prompt: Sequence[int] = (2, 3, 2), order: int = 0, index: int = 0) -> Request:
    return Request(str(order), list(prompt), params, 0.0, order, index=index)


def make_requests(params: Sequence[SamplingParams], prompt: Sequence[int] = (2, 3, 2)) -> list[Request]:
    return [make_request(p, prompt, order) for order, p in enumerate(params)]


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


class PresenceAndFrequency(LogitsProcessor):
    """The formula of OpenAI's reference, which transformers has no processor for."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self.params, self.num_prompt_tokens = params, num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.num_prompt_tokens :], minlength=scores.shape[1])[: scores.shape[1]]
        return scores - counts * self.params.frequency_penalty - (counts > 0) * self.params.presence_penalty


def stock_processors(params: SamplingParams, num_prompt_tokens: int) -> LogitsProcessorList:
    """What stock ``generate`` would apply for ``params``, in its order."""
    warping = {
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p or None,
    }
    config = GenerationConfig(
        do_sample=not params.is_greedy,
        **({} if params.is_greedy else warping),
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_tokens,
        bad_words_ids=[list(word) for word in params.bad_words] or None,
        sequence_bias={(token,): bias for token, bias in params.logit_bias.items()} if params.logit_bias else None,
    )
    config._eos_token_tensor = torch.tensor([EOS])
    owner = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=GenerationMixin._merge_criteria_processor_list.__get__(object()),
    )
    processors = GenerationMixin._get_logits_processor(
        owner,
        generation_config=config,
        input_ids_seq_length=num_prompt_tokens,
        logits_processor=LogitsProcessorList(params.logits_processors),
        device="cpu",
    )
    if params.stop_token_ids and params.min_tokens:
        stops = list(params.stop_token_ids)
        processors.insert(0, MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_tokens, stops))
    # Ours comes after the repetition penalty, which comes after the bias.
    before = [p for p in processors if type(p).__name__ == "SequenceBiasLogitsProcessor"]
    before += [p for p in processors if isinstance(p, RepetitionPenaltyLogitsProcessor)]
    after = [p for p in processors if p not in before]
    return LogitsProcessorList([*before, PresenceAndFrequency(params, num_prompt_tokens), *after])


def stock_scores(params: SamplingParams, request: Request, logits: Tensor) -> Tensor:
    """[V] float32, as stock would draw from or take the argmax of."""
    processors = stock_processors(params, request.num_prompt_tokens)
    return processors(torch.tensor([request.token_ids]), logits[None].to(copy=True, dtype=torch.float32))[0]


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=20),
    SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.95, frequency_penalty=0.4, bad_words=[[3, 4]]),
]


def generate(
    sampler: Sampler, batch: Sequence[Request], names: Sequence[int], steps: int, forget: bool = False
) -> None:
    """Run requests to ``steps`` tokens with logits that depend on the request's name and its tokens only."""
    for _ in range(steps):
        logits = torch.cat(
            [
                random_logits(1, 1000, seed=hash((name, *r.token_ids)) % 2**32)
                for name, r in zip(names, batch, strict=True)
            ]
        )
        for request, token in zip(batch, sampler.sample(logits, batch).tokens, strict=True):
            assert isinstance(token, int)
            request.append_token(token)
            if forget:
                request.sampling_state = None
