"""What tokens are drawn from: the edges of temperature, top_k, top_p and min_p, and of the draw itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampling_checks import MIXED, make_request, make_requests, random_logits, stock_scores
from torch import Tensor

from paged_backend.sampling.distribution import Distribution
from paged_backend.sampling.sampler import Sampler
from paged_backend.sampling_params import SamplingParams


@pytest.mark.parametrize("token_ids", [None, torch.tensor([[10, 11, 12, 13, 14, 15]])])
def test_the_ends_of_the_unit_interval_reach_the_first_and_the_last_token_with_weight(token_ids: Tensor | None) -> None:
    distribution = Distribution(torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0]]), token_ids)
    drawn = [int(distribution.draw(torch.tensor([number], dtype=torch.float64))) for number in (0.0, 1 - 2.0**-53)]
    assert drawn == ([2, 4] if token_ids is None else [12, 14])


@pytest.mark.parametrize("top_k", [1, 5, 31, 32, 77, 78, 79, 500, 4999])
def test_top_k_keeps_the_highest_of_a_large_vocabulary(top_k: int) -> None:
    logits = random_logits(3, 5000)
    params = [
        SamplingParams(temperature=1.0, top_k=k, logprobs=5000, logprobs_mode="processed") for k in (top_k, 9, 40)
    ]
    for row, (p, logprobs) in enumerate(
        zip(params, Sampler([]).sample(logits, make_requests(params)).logprobs, strict=True)
    ):
        assert logprobs is not None
        assert set(logprobs) == set(logits[row].topk(p.top_k).indices.tolist())


def test_scores_equal_to_the_last_of_top_k_are_all_kept() -> None:
    params = SamplingParams(temperature=1.0, top_k=2, logprobs=5, logprobs_mode="processed")
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0]])
    logprobs = Sampler([]).sample(logits, make_requests([params])).logprobs[0]
    assert logprobs is not None
    assert set(logprobs) == {1, 2, 3, 4}


def test_top_p_keeps_as_many_equal_tokens_as_stock() -> None:
    logits = torch.zeros(1, 10)
    for top_p in (0.05, 0.25, 0.55, 0.95):
        params = SamplingParams(temperature=1.0, top_p=top_p, logprobs=10, logprobs_mode="processed")
        request = make_request(params)
        logprobs = Sampler([]).sample(logits, [request]).logprobs[0]
        assert logprobs is not None
        assert len(logprobs) == int((stock_scores(params, request, logits[0]) > -math.inf).sum())
        assert set(logprobs) == set(range(len(logprobs)))


@pytest.mark.parametrize("params", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_likeliest_token_is_always_kept(params: dict[str, Any]) -> None:
    logits = random_logits(50, 300)
    requests = make_requests([SamplingParams(temperature=5.0, **params)] * 50)
    assert Sampler([]).sample(logits, requests).tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", MIXED[1:])
def test_tokens_of_probability_zero_are_never_drawn(params: SamplingParams) -> None:
    logits = torch.full((200, 400), -math.inf)
    logits[:, 123] = 0.0
    assert set(Sampler([]).sample(logits, make_requests([params] * 200)).tokens) == {123}
