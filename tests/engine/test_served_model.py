"""The cache of a served model: its size is refused, kept, grown or given back."""

from __future__ import annotations

import pytest
import torch
from block_checks import assert_all_blocks_are_back
from oracle import draw_prompts, stock_greedy
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.errors import ConfigError
from paged_backend.kernels import cpu

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


def run(engine: Engine) -> dict[str, list]:
    outputs: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2 parsecs", "is not a size"),
        (0, "is not usable"),
        (-1, "is not usable"),
        (float("nan"), "is not usable"),
        (1.5, "is not a fraction"),
        (True, "is not usable"),
        (0.5, "share of a GPU's free memory, but the model is on cpu"),
        (100, "does not hold one block"),
    ],
)
def test_unusable_budget_is_refused_with_the_reason(llama, value, message):
    with pytest.raises(ConfigError, match=message):
        Engine(llama, kv_cache_memory=value)


def test_budget_is_kept_over_all_groups():
    engine = Engine(make_tiny("gemma2"), kv_cache_memory="1MiB")
    assert 0.9 * 2**20 < engine.stats().reserved_bytes <= 2**20


def test_elastic_engine_grows_for_what_comes_and_keeps_its_cache(llama):
    engine = Engine(llama, elastic=True, block_size=4)
    short, long = draw_prompts([40, 150])
    engine.generate([short], GREEDY)
    small = engine.stats().reserved_bytes
    engine.fit([len(short) + NUM_TOKENS, len(long) + NUM_TOKENS])
    assert engine.stats().reserved_bytes > 3 * small
    (output,) = engine.generate([long], GREEDY)
    assert output.token_ids == stock_greedy(llama, long, NUM_TOKENS)
    (output,) = engine.generate([short], GREEDY)
    assert output.metrics.num_cached_tokens == 36
    assert output.token_ids == stock_greedy(llama, short, NUM_TOKENS)
    assert_all_blocks_are_back(engine)


def test_elastic_engine_grows_while_others_run(llama):
    engine = Engine(llama, elastic=True, block_size=4)
    short, long = draw_prompts([20, 150])
    first = engine.add_request(short, GREEDY)
    for _ in range(5):
        engine.step()
    second = engine.add_request(long, GREEDY)
    outputs = run(engine)
    assert outputs[first][0].token_ids == stock_greedy(llama, short, NUM_TOKENS)
    assert outputs[second][0].token_ids == stock_greedy(llama, long, NUM_TOKENS)


def test_elastic_engine_gives_back_what_a_small_call_does_not_need(llama):
    engine = Engine(llama, elastic=True, block_size=4)
    engine.fit([200] * 40)
    large = engine.stats().reserved_bytes
    engine.fit([30])
    assert engine.stats().reserved_bytes < large / 10
    assert engine.generate([[5] * 9], GREEDY)[0].token_ids == stock_greedy(llama, [5] * 9, NUM_TOKENS)


def test_what_computes_and_what_would_be_faster_stand_in_the_stats(llama):
    with Engine(llama, attention_backend="reference") as engine:
        assert (engine.stats().kernels, engine.stats().faster) == ("reference", ())
    with Engine(llama, quantize=None) as engine:
        assert (engine.stats().kernels, engine.stats().faster) == (cpu.running(), cpu.faster(torch.float32))
