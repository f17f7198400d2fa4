"""Sampler: equal to transformers' processors, drawn from the right distribution, each request for itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_checks import EOS, MIXED, generate, make_request, make_requests, random_logits, stock_scores
from torch import Tensor

from paged_backend.errors import SamplingFailed
from paged_backend.request.request import Request
from paged_backend.sampling.sampler import Sampler
from paged_backend.sampling_params import SamplingParams


def on_an_edge(params: SamplingParams, request: Request, logits: Tensor) -> bool:
    """Whether the rounding of a sum could decide about some token in stock's top_p or min_p."""
    whole = dataclasses.replace(params, top_p=1.0, min_p=0.0)
    probs = stock_scores(whole, request, logits).double().softmax(-1).sort().values
    edges = probs.cumsum(-1) - (1 - params.top_p)
    if params.top_p < 1 and edges.abs().min() < 1e-5:
        return True
    return params.min_p > 0 and bool(((probs / probs.max() - params.min_p).abs() < 1e-5).any())


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    def sometimes(strategy: st.SearchStrategy, default: Any) -> Any:
        return draw(strategy) if draw(st.booleans()) else default

    token = st.integers(0, vocab_size - 1)
    return SamplingParams(
        temperature=sometimes(st.floats(0.3, 3.0), 1.0) if draw(st.integers(0, 4)) else 0.0,
        top_k=sometimes(st.integers(1, 12) | st.integers(-1, vocab_size + 3), 0),
        top_p=sometimes(st.floats(0.01, 0.999), 1.0),
        min_p=sometimes(st.floats(0.0, 1.0), 0.0),
        repetition_penalty=sometimes(st.floats(0.5, 2.0), 1.0),
        presence_penalty=sometimes(st.floats(-2, 2), 0.0),
        frequency_penalty=sometimes(st.floats(-2, 2), 0.0),
        logit_bias=sometimes(st.dictionaries(token, st.floats(-5, 5), max_size=4), None),
        # At least four tokens are left over.
        bad_words=sometimes(
            st.lists(st.lists(st.integers(0, min(2, vocab_size - 5)), min_size=1, max_size=3), max_size=3), ()
        ),
        min_tokens=sometimes(st.integers(0, 4), 0),
        stop_token_ids=sometimes(st.lists(st.integers(0, 2), max_size=2), ()),
        logprobs=vocab_size,
        logprobs_mode="processed",
    )


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_row_of_a_mixed_batch_equals_transformers_processors(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([7, 64, 65, 300, 2100]))
    rows = data.draw(st.integers(1, 5))
    params = [data.draw(sampling_params(vocab_size)) for _ in range(rows)]
    prompts = data.draw(
        st.lists(
            st.lists(st.integers(0, min(vocab_size, 12) - 1), min_size=1, max_size=5), min_size=rows, max_size=rows
        )
    )
    requests = [make_request(p, prompt, order) for order, (p, prompt) in enumerate(zip(params, prompts, strict=True))]
    sampler = Sampler([EOS], seed=0)
    seed = data.draw(st.integers(0, 2**32))
    for step in range(3):
        logits = random_logits(rows, vocab_size, seed + step)
        edges = [on_an_edge(p, r, row) for p, r, row in zip(params, requests, logits, strict=True)]
        assume(not all(edges))
        expected = [stock_scores(p, r, row) for p, r, row in zip(params, requests, logits, strict=True)]
        sampled = sampler.sample(logits, requests)
        for row, request in enumerate(requests):
            token, logprobs = sampled.tokens[row], sampled.logprobs[row]
            assert isinstance(token, int)
            assert logprobs is not None
            request.append_token(token)
            if edges[row]:
                continue
            stock = expected[row].log_softmax(-1)
            # Below, float32 probabilities are zero or nearly so.
            visible = (stock > -80).nonzero()[:, 0].tolist()
            assert set(visible) <= set(logprobs) <= set((stock > -math.inf).nonzero()[:, 0].tolist())
            assert [logprobs[t] for t in visible] == pytest.approx([float(stock[t]) for t in visible], abs=2e-5)
            assert token in visible
            if request.params.is_greedy:
                assert token == int(expected[row].argmax())


# Chi-square of drawn tokens against what stock would draw from.

VOCAB_SIZE, NUM_DRAWS = 16, 4000
WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7},
    "cold": {"temperature": 0.6},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.08},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.6},
    "bias": {"logit_bias": {0: 1.5, 5: -math.inf}},
    "min_tokens": {"min_tokens": 9},
    "bad_words": {"bad_words": [[5], [3, 1]]},
    "temperature_top_k": {"temperature": 1.5, "top_k": 9},
    "temperature_top_p": {"temperature": 1.5, "top_p": 0.7},
    "top_k_top_p": {"top_k": 10, "top_p": 0.75},
    "top_k_top_p_min_p": {"temperature": 2.0, "top_k": 12, "top_p": 0.95, "min_p": 0.2},
    "all": {
        "temperature": 1.4,
        "top_k": 13,
        "top_p": 0.97,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {4: 1.0},
        "min_tokens": 9,
        "bad_words": [[5], [3, 1]],
    },
}
# Each is a way to get the options above wrong: every one must be told apart by the same number of draws.
MUTANTS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.4},
    "cold": {"temperature": 0.65},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "repetition": {"repetition_penalty": 1.0},
    "presence": {"presence_penalty": 0.0},
    "frequency": {"frequency_penalty": 0.0},
    "bias": {"logit_bias": {0: 1.2, 5: -math.inf}},
    "min_tokens": {"min_tokens": 0},
    "bad_words": {"bad_words": [[5]]},
    "temperature_top_k": {"top_k": 0},
    "temperature_top_p": {"top_p": 0.6},
    "top_k_top_p": {"top_k": 0},
    "top_k_top_p_min_p": {"min_p": 0.0},
    "all": {"repetition_penalty": 1.0},
}
PROMPT, OUTPUT = [0, 2, 2], [8, 8, 10, 3]


def tally(params: SamplingParams, logits: Tensor) -> tuple[Tensor, Request]:
    """How often each token is drawn in NUM_DRAWS seeded draws after PROMPT and OUTPUT."""
    requests = [make_request(dataclasses.replace(params, seed=seed), PROMPT) for seed in range(NUM_DRAWS)]
    for request in requests:
        for token in OUTPUT:
            request.append_token(token)
    tokens = Sampler([EOS]).sample(logits.expand(NUM_DRAWS, -1), requests).tokens
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE), requests[0]


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """Chance of counts at least as far from ``probs`` if they were drawn from it; 0 if they hold what it excludes."""
    if counts[probs == 0].any():
        return 0.0
    counts, expected = counts[probs > 0].double(), probs[probs > 0].double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    if len(counts) == 1:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize("name", WARPERS)
def test_tokens_are_drawn_from_stocks_distribution(name: str) -> None:
    logits = random_logits(1, VOCAB_SIZE, seed=5, scale=1.2)[0]
    params = SamplingParams(**{"temperature": 1.0, **WARPERS[name]})
    counts, request = tally(params, logits)
    assert chi_square_p(counts, stock_scores(params, request, logits).softmax(-1)) > 1e-4
    mutant = dataclasses.replace(params, **MUTANTS[name])
    assert chi_square_p(counts, stock_scores(mutant, request, logits).softmax(-1)) < 1e-6


def test_draws_of_one_request_over_its_tokens_follow_the_distribution() -> None:
    logits = random_logits(1, VOCAB_SIZE, seed=5, scale=1.2)
    sampler, request = Sampler([], seed=3), make_request(SamplingParams(temperature=1.0, max_tokens=10**6))
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    for _ in range(4000):
        token = sampler.sample(logits, [request]).tokens[0]
        assert isinstance(token, int)
        counts[token] += 1
        request.append_token(token)
    assert chi_square_p(counts, logits[0].softmax(-1)) > 1e-4


# Random streams.


@pytest.mark.parametrize("params", MIXED[1:])
def test_a_seeded_request_draws_the_same_tokens_whatever_runs_beside_it(params: SamplingParams) -> None:
    seeded = dataclasses.replace(params, seed=11)
    alone = make_request(seeded)
    generate(Sampler([EOS], seed=0), [alone], [0], 25)
    for place in range(len(MIXED) + 1):
        batch = [make_request(p, order=order) for order, p in enumerate(MIXED, start=1)]
        again = make_request(seeded, order=99)
        batch.insert(place, again)
        generate(Sampler([EOS], seed=place), batch, [0 if r is again else 1 for r in batch], 25)
        assert again.token_ids == alone.token_ids


def test_greedy_rows_are_unaffected_by_sampling_rows() -> None:
    logits = random_logits(6, 500)
    params = [SamplingParams() if row % 2 else MIXED[row] for row in range(6)]
    tokens = Sampler([EOS]).sample(logits, make_requests(params)).tokens
    assert tokens[1::2] == logits.argmax(-1).tolist()[1::2]


def test_samples_of_one_request_differ_and_so_do_seeds_and_requests_without_a_seed() -> None:
    params = SamplingParams(temperature=2.0, seed=5)
    unseeded = dataclasses.replace(params, seed=None)
    requests = [make_request(params, index=index) for index in range(3)]
    requests += [make_request(dataclasses.replace(params, seed=6)), make_request(unseeded, order=0)]
    requests += [make_request(unseeded, order=1), make_request(unseeded, order=1, index=1)]
    generate(Sampler([EOS], seed=5), requests, [0] * len(requests), 10)
    assert len({tuple(request.token_ids) for request in requests}) == len(requests)


def test_the_engines_seed_decides_what_requests_without_one_draw() -> None:
    def draw(engine_seed: int | None, seed: int | None) -> list[int]:
        request = make_request(SamplingParams(temperature=2.0, seed=seed), order=3)
        generate(Sampler([EOS], seed=engine_seed), [request], [0], 10)
        return request.token_ids

    assert draw(1, None) == draw(1, None)
    assert draw(1, None) != draw(2, None)
    assert draw(1, 7) == draw(2, 7)
    assert draw(None, None) != draw(None, None)


# Greedy.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 3, 255, 256, 257, 1000, 4096])
def test_greedy_takes_the_first_maximum_as_stock_does(dtype: torch.dtype, vocab_size: int) -> None:
    # Rounded to few values, so that most rows have ties.
    logits = random_logits(40, vocab_size).round().to(dtype)
    tokens = Sampler([EOS]).sample(logits, make_requests([SamplingParams()] * 40)).tokens
    assert tokens == logits.float().argmax(-1).tolist()
    assert tokens == [row.index(max(row)) for row in logits.tolist()]


def test_greedy_rows_with_processors_take_the_first_maximum_too() -> None:
    logits = random_logits(30, 700).round()
    params = SamplingParams(repetition_penalty=2.0)
    requests = make_requests([params] * 30)
    tokens = Sampler([EOS]).sample(logits, requests).tokens
    assert tokens == [int(stock_scores(params, r, row).argmax()) for r, row in zip(requests, logits, strict=True)]


def test_logits_are_left_as_they_are() -> None:
    def spoil(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.fill_(0.0)

    params = [*MIXED, SamplingParams(temperature=1.0, logits_processors=[spoil])]
    logits = random_logits(len(params), 100)
    before = logits.clone()
    Sampler([EOS]).sample(logits, make_requests(params))
    assert torch.equal(logits, before)


def test_the_layout_of_the_logits_does_not_matter() -> None:
    logits = random_logits(len(MIXED), 900)
    tokens = Sampler([EOS], seed=0).sample(logits, make_requests(MIXED)).tokens
    for other in (logits.T.contiguous().T, torch.cat([logits, logits], 1)[:, :900]):
        assert not other.is_contiguous()
        assert Sampler([EOS], seed=0).sample(other, make_requests(MIXED)).tokens == tokens
        penalized = [dataclasses.replace(p, repetition_penalty=1.1) for p in MIXED]
        expected = Sampler([EOS], seed=0).sample(logits, make_requests(penalized)).tokens
        assert Sampler([EOS], seed=0).sample(other, make_requests(penalized)).tokens == expected


def test_half_precision_logits_are_drawn_from_as_their_float32_values() -> None:
    logits = random_logits(len(MIXED), 900).bfloat16()
    half = Sampler([EOS], seed=0).sample(logits, make_requests(MIXED)).tokens
    assert half == Sampler([EOS], seed=0).sample(logits.float(), make_requests(MIXED)).tokens


# Rows that fail.


@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("spoilt", ["nan", "one nan", "-inf"])
def test_unusable_logits_fail_their_own_request_alone(params: SamplingParams, spoilt: str) -> None:
    logits = random_logits(3, 600)
    expected = Sampler([EOS], seed=0).sample(logits, make_requests([params] * 3)).tokens
    logits[1, slice(None) if spoilt != "one nan" else slice(77, 78)] = -math.inf if spoilt == "-inf" else math.nan
    tokens = Sampler([EOS], seed=0).sample(logits, make_requests([params] * 3)).tokens
    assert isinstance(tokens[1], SamplingFailed)
    assert "request '1'" in str(tokens[1])
    assert "look for NaN among the model's weights" in str(tokens[1])
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]


def test_a_request_that_bans_every_token_fails_alone() -> None:
    banned = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(8), -math.inf))
    tokens = Sampler([EOS]).sample(random_logits(2, 8), make_requests([banned, SamplingParams()])).tokens
    assert isinstance(tokens[0], SamplingFailed)
    assert isinstance(tokens[1], int)


# Logprobs.


def test_raw_logprobs_come_from_the_models_logits() -> None:
    params = SamplingParams(temperature=0.5, top_k=2, repetition_penalty=1.5, logprobs=3, seed=1)
    logits = random_logits(1, 50).bfloat16()
    sampled = Sampler([EOS]).sample(logits, [make_request(params)])
    expected = logits[0].float().log_softmax(-1)
    token, logprobs = sampled.tokens[0], sampled.logprobs[0]
    assert isinstance(token, int)
    assert logprobs is not None
    assert next(iter(logprobs)) == token
    assert set(logprobs) == {token, *expected.topk(3).indices.tolist()}
    assert all(value == pytest.approx(float(expected[t]), abs=1e-6) for t, value in logprobs.items())


def test_processed_logprobs_come_from_what_the_token_was_drawn_from() -> None:
    params = SamplingParams(temperature=0.5, top_k=2, logprobs=5, logprobs_mode="processed")
    request, logits = make_request(params), random_logits(1, 50)
    logprobs = Sampler([EOS]).sample(logits, [request]).logprobs[0]
    expected = stock_scores(params, request, logits[0]).log_softmax(-1)
    assert logprobs is not None
    # Only two tokens can be drawn.
    assert logprobs == pytest.approx({t: float(expected[t]) for t in expected.topk(2).indices.tolist()}, abs=1e-6)


def test_zero_logprobs_are_of_the_token_alone_and_none_are_none() -> None:
    logits = random_logits(3, 50)
    params = [SamplingParams(logprobs=0), SamplingParams(temperature=1.0, logprobs=0), SamplingParams(temperature=1.0)]
    sampled = Sampler([EOS]).sample(logits, make_requests(params))
    assert [list(row) if row is not None else None for row in sampled.logprobs] == [
        [sampled.tokens[0]],
        [sampled.tokens[1]],
        None,
    ]


def test_logprobs_do_not_change_the_tokens() -> None:
    logits = random_logits(len(MIXED), 800)
    plain = Sampler([EOS], seed=0).sample(logits, make_requests(MIXED)).tokens
    for mode in ("raw", "processed"):
        asked = [dataclasses.replace(p, logprobs=4, logprobs_mode=mode) for p in MIXED]
        assert Sampler([EOS], seed=0).sample(logits, make_requests(asked)).tokens == plain


def test_a_batch_beyond_one_group_of_rows_equals_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(12, 500)
    params = MIXED * 2
    whole = Sampler([EOS], seed=0).sample(logits, make_requests(params)).tokens
    monkeypatch.setattr("paged_backend.sampling.sampler._CPU_GROUP", 5 * 500)
    assert Sampler([EOS], seed=0).sample(logits, make_requests(params)).tokens == whole


def test_rows_that_fail_together_are_chosen_apart_and_only_the_faulty_one_fails(monkeypatch):
    sampler = Sampler(())
    requests = [make_request(SamplingParams(logit_bias={3: 1.0}), order=order) for order in range(5)]
    choose = sampler._choose

    def fail_for_one(scores, chosen):
        if requests[3] in chosen:
            raise RuntimeError("no memory for this row")
        return choose(scores, chosen)

    monkeypatch.setattr(sampler, "_choose", fail_for_one)
    tokens = sampler.sample(torch.randn(5, 40), requests).tokens
    assert isinstance(tokens[3], RuntimeError)
    assert [type(token) for token in tokens] == [int, int, int, RuntimeError, int]
