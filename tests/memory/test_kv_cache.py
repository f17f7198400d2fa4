"""Groups of layers, what a token costs them, and how much a cheaper dtype loses."""

from __future__ import annotations

import pytest
import torch
from oracle import draw_prompts
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.kernels import FULL, MaskRule
from paged_backend.memory.kv_cache import LayerSpec, group_layers
from paged_backend.memory.kv_group import KVGroup

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
CPU = torch.device("cpu")
WINDOW = MaskRule("window", 64)
GROUPS = [KVGroup(FULL, (0, 2), 200), KVGroup(WINDOW, (1,), 100)]


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


def layer(rule: MaskRule, dtype: torch.dtype = torch.float32) -> LayerSpec:
    return LayerSpec("layer", 4, 2, 16, 8, dtype, CPU, rule)


def test_layers_of_one_rule_share_a_group_full_attention_first():
    groups = group_layers([layer(WINDOW), layer(FULL), layer(WINDOW)])
    assert [(group.rule, group.layers) for group in groups] == [(FULL, (1,)), (WINDOW, (0, 2))]


def test_a_token_costs_its_key_its_value_and_its_scales():
    assert layer(FULL).bytes_per_token() == 2 * (16 + 8) * 4
    assert layer(FULL).bytes_per_token(torch.bfloat16) == 2 * (16 + 8) * 2
    assert layer(FULL).bytes_per_token(torch.int8) == 2 * (16 + 8 + 8)


def test_windowed_group_holds_the_window_and_a_chunk_however_long_the_sequence():
    assert GROUPS[1].blocks_for(10**6, 16, 32) == (64 + 32) // 16 + 1
    assert GROUPS[1].blocks_for(40, 16, 32) == 3
    assert GROUPS[0].blocks_for(100, 16, 32) == 7


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_token", "tolerance"),
    [
        ("float32", 768, 1e-5),
        ("float16", 384, 2e-3),
        ("bfloat16", 384, 2e-2),
        ("int8", 192 + 48, 3e-2),
        ("fp8", 192 + 48, 2e-1),
    ],
)
def test_cheaper_cache_costs_fewer_bytes_and_a_bounded_error(llama, kv_dtype, bytes_per_token, tolerance):
    engine = Engine(llama, kv_dtype=kv_dtype)
    assert engine.stats().groups[0].bytes_per_token == bytes_per_token
    prompt = draw_prompts([60])[0]
    logits = []
    forward = engine.runner.forward
    engine.runner.forward = lambda batch: logits.append(forward(batch)) or logits[-1]
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    with torch.no_grad():
        exact = llama(torch.tensor([prompt + output.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    got = torch.cat(logits)
    error = (got - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm()
    assert error < tolerance


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_cache_gives_the_same_tokens_under_chunks_hits_and_preemption(llama, kv_dtype):
    prompts = draw_prompts([30, 25, 33, 28])
    reference = [output.token_ids for output in Engine(llama, kv_dtype=kv_dtype).generate(prompts, GREEDY)]
    tight = Engine(
        llama,
        kv_dtype=kv_dtype,
        block_size=4,
        max_num_batched_tokens=16,
        kv_cache_memory=80 * 240,
        max_model_len=64,
    )
    for _ in range(2):
        assert [output.token_ids for output in tight.generate(prompts, GREEDY)] == reference
    assert tight.stats().num_preemptions > 0
    assert tight.stats().num_cached_tokens > 0
