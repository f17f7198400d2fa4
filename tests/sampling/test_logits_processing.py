"""What changes logits before a token is chosen: biases, penalties, bans, and the caller's own code."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from sampling_checks import EOS, MIXED, make_request, make_requests, random_logits, stock_scores
from tiny_tokenizers import byte_level_bpe
from torch import Tensor

from paged_backend.errors import SamplingFailed
from paged_backend.sampling.sampler import Sampler
from paged_backend.sampling_params import SamplingParams


def test_processed_scores_of_greedy_rows_are_bitwise_those_of_transformers() -> None:
    seen: list[Tensor] = []
    params = SamplingParams(
        repetition_penalty=1.3, logit_bias={3: 0.7, 9: -1.1}, bad_words=[[4], [3, 5]], min_tokens=5, stop_token_ids=[6]
    )
    recording = dataclasses.replace(params, logits_processors=[lambda input_ids, scores: seen.append(scores) or scores])
    request = make_request(recording, [2, 3, 9, 9, 3])
    logits = random_logits(1, 50)
    Sampler([EOS]).sample(logits, [request])
    assert torch.equal(seen[0][0], stock_scores(params, request, logits[0]))


def test_eos_and_stop_tokens_cannot_be_drawn_before_min_tokens() -> None:
    logits = torch.zeros(1, 4)
    logits[0, [EOS, 2]] = 20.0
    params = SamplingParams(temperature=1.0, min_tokens=3, stop_token_ids=[2], max_tokens=5)
    request = make_request(params)
    generated = []
    for _ in range(5):
        token = Sampler([EOS], seed=0).sample(logits, [request]).tokens[0]
        assert isinstance(token, int)
        generated.append(token)
        request.append_token(token)
    assert {EOS, 2}.isdisjoint(generated[:3])
    assert {EOS, 2}.issuperset(generated[3:])


def test_ignored_eos_may_be_drawn_before_min_tokens() -> None:
    logits = torch.zeros(1, 4)
    logits[0, EOS] = 20.0
    assert Sampler([EOS]).sample(logits, [make_request(SamplingParams(min_tokens=3, ignore_eos=True))]).tokens == [EOS]


def test_tokens_beyond_the_logits_do_not_reach_another_row() -> None:
    # As of a model that embeds more tokens than it gives logits for: 10 would be the next row's 0, and 12 its 2.
    logits = random_logits(2, 10)
    logits[1, [0, 2]] = torch.tensor([9.0, 8.0])
    penalized = SamplingParams(repetition_penalty=5.0, min_tokens=3)
    processed = SamplingParams(logprobs=1, logprobs_mode="processed")
    requests = [make_request(penalized, [10, 12]), make_request(processed)]
    for eos in ([10], [12]):
        sampled = Sampler(eos).sample(logits, requests)
        assert sampled.tokens == [int(logits[0].argmax()), 0]
        assert sampled.logprobs[1] == pytest.approx({0: float(logits[1].log_softmax(-1)[0])})


def test_a_processor_sees_its_own_tokens_and_one_row_of_float32_scores() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def look(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((input_ids.clone(), scores.clone()))
        return scores

    logits = random_logits(3, 40).bfloat16()
    params = [SamplingParams(), SamplingParams(temperature=0.5, top_k=3, logits_processors=[look]), MIXED[1]]
    request = make_requests(params)[1]
    request.append_token(9)
    Sampler([EOS]).sample(logits, [make_requests(params)[0], request, make_requests(params)[2]])
    ((input_ids, scores),) = seen
    assert input_ids.tolist() == [[2, 3, 2, 9]]
    assert input_ids.dtype == torch.int64
    # Before temperature and top_k, as in stock generate.
    assert torch.equal(scores, logits[1:2].float())


def test_scores_that_a_processor_keeps_do_not_change_later() -> None:
    kept: list[Tensor] = []

    def keep(input_ids: Tensor, scores: Tensor) -> Tensor:
        kept.append(scores)
        return scores + 1

    logits = random_logits(2, 40)
    params = [SamplingParams(temperature=0.5, top_k=3, logits_processors=[keep, keep]), MIXED[1]]
    Sampler([EOS]).sample(logits, make_requests(params))
    assert [torch.equal(scores, logits[:1] + step) for step, scores in enumerate(kept)] == [True, True]


def test_a_processor_may_force_a_token() -> None:
    def force(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -math.inf).index_fill_(1, torch.tensor([17]), 0.0)

    params = [SamplingParams(logits_processors=[force]), SamplingParams(temperature=1.0, logits_processors=[force])]
    assert Sampler([EOS]).sample(random_logits(2, 40), make_requests(params)).tokens == [17, 17]


class Broken(Exception):
    pass


def raises(input_ids: Tensor, scores: Tensor) -> Tensor:
    raise Broken("on purpose")


def test_what_a_processor_raises_is_its_own_requests_result_alone() -> None:
    logits = random_logits(len(MIXED) * 2, 300)
    healthy = Sampler([EOS], seed=0).sample(logits, make_requests([p for p in MIXED for _ in range(2)])).tokens
    params = [
        p if even else dataclasses.replace(p, logits_processors=[raises]) for p in MIXED for even in (True, False)
    ]
    tokens = Sampler([EOS], seed=0).sample(logits, make_requests(params)).tokens
    assert tokens[::2] == healthy[::2]
    assert all(isinstance(token, Broken) for token in tokens[1::2])


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (lambda input_ids, scores: scores[0], r"shape \(1, 30\), got \(30,\)"),
        (lambda input_ids, scores: scores[:, :-1], r"got \(1, 29\)"),
        (lambda input_ids, scores: None, "got NoneType"),
        (lambda input_ids, scores: scores * math.nan, "hold NaN or only -inf, and the model's logits do not"),
        (lambda input_ids, scores: torch.full_like(scores, -math.inf), "its logits_processors, .* must leave a token"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.5, "min_p": 0.1}])
def test_unusable_scores_fail_their_own_request_alone(
    processor: Any, reason: str, temperature: float, more: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, logprobs=2, **more)
    requests = make_requests([params, dataclasses.replace(params, logits_processors=[processor]), params])
    logits = random_logits(3, 30)
    sampled = Sampler([EOS], seed=0).sample(logits, requests)
    assert isinstance(sampled.tokens[1], SamplingFailed)
    assert sampled.logprobs[1] is None
    with pytest.raises(SamplingFailed, match=reason):
        raise sampled.tokens[1]
    alone = [Sampler([EOS], seed=0).sample(logits[row : row + 1], [requests[row]]).tokens[0] for row in (0, 2)]
    assert [sampled.tokens[0], sampled.tokens[2]] == alone


def test_a_text_among_bad_words_cannot_come_up_at_the_start_or_after_a_space() -> None:
    tokenizer = byte_level_bpe()
    logits = torch.zeros(1, len(tokenizer))
    spellings = [tokenizer.encode(text, add_special_tokens=False) for text in ("fox", " fox")]
    assert len(spellings[0]) == 2
    sampler = Sampler([tokenizer.eos_token_id], seed=0, tokenizer=tokenizer)
    params = SamplingParams(bad_words=["fox"])
    for spelling in spellings:
        logits.zero_()[0, spelling[-1]] = 5.0
        prompt = [0, *spelling[:-1]]
        assert sampler.sample(logits, [make_request(SamplingParams(), prompt)]).tokens == [spelling[-1]]
        assert sampler.sample(logits, [make_request(params, prompt)]).tokens != [spelling[-1]]


def test_bad_words_that_are_only_the_end_of_sequence_ban_nothing_as_in_stock() -> None:
    logits = torch.zeros(1, 5)
    logits[0, EOS] = 3.0
    assert Sampler([EOS]).sample(logits, [make_request(SamplingParams(bad_words=[[EOS]]))]).tokens == [EOS]
