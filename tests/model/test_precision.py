"""A caller's autocast and default dtype change nothing of what the engine computes, for it or for anybody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import assert_greedy, draw_prompts, stock_greedy
from tiny_models import make_tiny
from transformers import PreTrainedModel

from paged_backend import Engine, SamplingParams

PROMPTS = draw_prompts([21, 30])
EVERYTHING = {
    "max_tokens": 6,
    "ignore_eos": True,
    "logit_bias": {7: 1.5},
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "min_tokens": 2,
    "bad_words": [[9, 10], [11]],
    "logprobs": 2,
}
SAMPLED = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 5}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny("llama")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("optimize", ["auto", "none"])
def test_an_engine_made_and_used_inside_of_autocast_computes_as_outside(model: PreTrainedModel, optimize: str) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
    with Engine(model, kv_cache_memory="1MiB", optimize=optimize) as engine:
        expected = engine.generate(PROMPTS[1], params)[0]
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        Engine(model, kv_cache_memory="1MiB", optimize=optimize) as engine,
    ):
        outputs = [engine.generate(PROMPTS[1], params)[0]]
        engine.weights_changed()
        outputs.append(engine.generate(PROMPTS[1], params)[0])
        with torch.autocast("cpu", enabled=False):
            # Its prompt's keys were made inside.
            outputs.append(engine.generate(PROMPTS[1], params)[0])
        assert engine.stats().num_cached_tokens > 0
    for output in outputs:
        assert output.token_ids == expected.token_ids
        for got, want in zip(output.logprobs, expected.logprobs, strict=True):
            assert got == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fields", [EVERYTHING, EVERYTHING | SAMPLED, SAMPLED], ids=["greedy", "all", "sampled"])
def test_sampling_is_the_same_under_another_default_dtype(
    model: PreTrainedModel, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    with Engine(model, kv_cache_memory="1MiB", seed=0) as engine:
        expected = engine.generate(PROMPTS, SamplingParams(**fields))
        with default_dtype(dtype):
            outputs = engine.generate(PROMPTS, SamplingParams(**fields))
    assert [output.error for output in outputs] == [None, None]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_an_engine_made_under_another_default_dtype_equals_stock(family: str, dtype: torch.dtype, backend: str) -> None:
    model = make_tiny(family)
    expected = stock_greedy(model, PROMPTS[0], 6)
    with default_dtype(dtype), Engine(model, kv_cache_memory="1MiB", attention_backend=backend) as engine:
        tokens = engine.generate(PROMPTS[0], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids
    assert_greedy(model, PROMPTS[0], tokens, expected)


def test_an_engine_under_a_default_device_leaves_it_to_others(model: PreTrainedModel) -> None:
    fields = {**EVERYTHING, **SAMPLED}
    with torch.device("meta"), Engine(model, kv_cache_memory="1MiB", seed=0) as engine:
        inside = engine.generate(PROMPTS, SamplingParams(**fields))
    with Engine(model, kv_cache_memory="1MiB", seed=0) as engine:
        outside = engine.generate(PROMPTS, SamplingParams(**fields))
    assert [output.token_ids for output in inside] == [output.token_ids for output in outside]
