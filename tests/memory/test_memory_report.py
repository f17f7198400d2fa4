"""Where the memory goes, in words."""

from __future__ import annotations

import pytest
from oracle import draw_prompts
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


def memory_for(engine_or_model, num_tokens: int, block_size: int) -> int:
    """Bytes of the blocks that ``num_tokens`` tokens fill."""
    layers = Engine(engine_or_model, block_size=block_size).twin.layers
    per_token = sum(layer.bytes_per_token() for layer in layers)
    return -(-num_tokens // block_size) * block_size * per_token


def test_memory_is_explained_in_words(llama):
    engine = Engine(llama, block_size=4, kv_cache_memory=memory_for(llama, 64, 4), max_model_len=64)
    assert "Nothing has run yet" in engine.explain_memory()
    engine.generate(draw_prompts([20, 20, 20]), GREEDY)
    text = engine.explain_memory()
    assert "3 attention layers keep keys and values in float32: 768 B a token." in text
    assert "16 blocks of 4 tokens, 48.0 KiB" in text
    assert "Memory ran out" in text
