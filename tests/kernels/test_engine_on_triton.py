"""The whole engine on the Triton backend: the tokens of the reference backend."""

from __future__ import annotations

import pytest
from oracle import draw_prompts
from tiny_models import make_tiny

from paged_backend import Engine, EngineConfig, SamplingParams
from paged_backend.kernels import triton
from paged_backend.kernels.triton import support as triton_support

pytestmark = pytest.mark.skipif(
    not triton_support.interpreted, reason="runs where TRITON_INTERPRET=1 is set, see test_interpreter.py"
)

LENGTHS = (5, 13, 1)
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)


def generate(backend: str) -> list[list[int]]:
    # Sinks, and a window in one of the layers.
    model = make_tiny("gpt_oss", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    config = EngineConfig(attention_backend=backend, block_size=7, max_num_batched_tokens=8, enable_prefix_caching=True)
    engine = Engine(model, None, config)
    outputs = engine.generate(draw_prompts(LENGTHS), GREEDY)
    engine.close()
    return [output.token_ids for output in outputs]


def test_a_two_layer_model_gives_the_tokens_of_the_reference_backend(monkeypatch):
    expected = generate("reference")
    calls = []
    for operation in ("store_kv", "prefill_attention", "decode_attention"):
        run = triton.BACKEND.functions[operation]

        def counted(*arguments, name=operation, run=run):
            calls.append(name)
            return run(*arguments)

        monkeypatch.setitem(triton.BACKEND.functions, operation, counted)
    assert generate("triton") == expected
    assert {"store_kv", "prefill_attention", "decode_attention"} <= set(calls)
