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

LENGTHS = (5, 23, 1)
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def generate(family: str, backend: str) -> list[list[int]]:
    config = EngineConfig(
        attention_backend=backend, block_size=7, max_num_batched_tokens=16, enable_prefix_caching=True
    )
    engine = Engine(make_tiny(family), None, config)
    outputs = engine.generate(draw_prompts(LENGTHS), GREEDY)
    engine.close()
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_two_layer_model_gives_the_tokens_of_the_reference_backend(monkeypatch, family):
    expected = generate(family, "reference")
    calls = []
    for operation in ("store_kv", "prefill_attention", "decode_attention"):
        run = triton.BACKEND.functions[operation]

        def counted(*arguments, name=operation, run=run):
            calls.append(name)
            return run(*arguments)

        monkeypatch.setitem(triton.BACKEND.functions, operation, counted)
    assert generate(family, "triton") == expected
    assert {"store_kv", "prefill_attention", "decode_attention"} <= set(calls)
