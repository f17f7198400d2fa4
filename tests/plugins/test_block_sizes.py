"""Block-size rules: what they choose, and what they are given to choose by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams, hookimpl
from paged_backend.block_cost import CANDIDATES
from paged_backend.model import attention_timing
from paged_backend.plugins.block_sizes import auto
from paged_backend.policies import BlockSize, ModelShape

CPU = torch.device("cpu")


def shape(seconds, max_positions: int | None = None) -> ModelShape:
    def decode_seconds(block_size: int, context_len: int, num_seqs: int) -> float:
        assert context_len > 0
        assert num_seqs > 0
        return seconds[block_size]

    return ModelShape(2, 4, 2, 16, 16, torch.float32, decode_seconds, max_positions)


@pytest.fixture(scope="module")
def model():
    return make_tiny("llama", num_hidden_layers=1)


def scripted(**faster: float) -> dict[int, float]:
    """Seconds by size: 1, save for those that are given, as ``b32=0.5``."""
    return dict.fromkeys(CANDIDATES, 1.0) | {int(name[1:]): seconds for name, seconds in faster.items()}


def test_equal_times_choose_a_small_block():
    assert auto(shape(scripted()), CPU) == 16


def test_kernels_that_are_slow_on_small_blocks_choose_larger_ones():
    assert auto(shape(scripted(b8=2.0)), CPU) == 16
    assert auto(shape(scripted(b8=4.0, b16=2.0)), CPU) == 32
    assert auto(shape(scripted(b128=0.2, b256=0.19)), CPU) == 128


def test_differences_that_are_noise_keep_the_usual_block():
    assert auto(shape(scripted(b8=0.99, b32=0.98)), CPU) == 16


def test_waste_weighs_more_for_a_model_of_short_texts():
    seconds = scripted(b64=0.6, b128=0.6)
    assert auto(shape(seconds), CPU) == 64
    assert auto(shape(seconds, max_positions=64), CPU) == 8


def test_a_noise_that_lasts_meets_all_sizes():
    calls: list[int] = []

    def decode_seconds(block_size: int, context_len: int, num_seqs: int) -> float:
        calls.append(block_size)
        # Another program runs during the first round.
        return 9.0 if len(calls) <= len(CANDIDATES) else 1.0

    assert auto(ModelShape(2, 4, 2, 16, 16, torch.float32, decode_seconds), CPU) == 16
    assert calls == list(CANDIDATES) * 4


def test_auto_says_what_it_measured_and_why_it_chose():
    reason = auto(shape(scripted(b8=4.0, b16=2.0)), CPU).reason
    assert "timed steps of 8 requests of 512 tokens on cpu" in reason
    assert "blocks of 32 tokens cost least" in reason


def test_engine_measures_its_own_attention_for_the_rule(model):
    measured = {}

    def rule(shape: ModelShape, device: torch.device) -> int:
        measured.update({size: shape.decode_seconds(size, 64, 4) for size in (4, 16)})
        assert (shape.num_heads, shape.num_kv_heads, shape.key_dim, device.type) == (4, 2, 16, "cpu")
        return 8

    plugin = SimpleNamespace(register_block_sizes=hookimpl(lambda register: register("measured", rule)))
    engine = Engine(model, plugins=[plugin], block_size="measured")
    assert engine.blocks.block_size == 8
    assert all(seconds > 0 for seconds in measured.values())
    assert engine.stats().block_size_reason.endswith("rule chose it")


@pytest.mark.parametrize(
    ("block_size", "reason"),
    [
        (24, "block_size=24 was configured"),
        (lambda shape, device: BlockSize(24, "it fits the tiles"), "it fits the tiles"),
        (lambda shape, device: 0, "gave no size that can be used"),
        (lambda shape, device: BlockSize(24, None), "gave no size that can be used"),
    ],
)
def test_stats_say_why_blocks_are_as_large_as_they_are(model, block_size, reason):
    engine = Engine(model, block_size=block_size)
    assert engine.blocks.block_size == (16 if "no size" in reason else 24)
    assert reason in engine.stats().block_size_reason


def test_every_layer_counts_in_what_a_rule_measures(monkeypatch):
    monkeypatch.setattr(attention_timing, "_time", lambda run, device: 1.0 if run().shape[0] else 0.0)
    seen = []

    def rule(shape: ModelShape, device: torch.device) -> int:
        seen.append(shape.decode_seconds(16, 64, 4))
        return 16

    Engine(make_tiny("gemma2"), block_size=rule)
    assert seen == [1.0]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_auto_measures_a_real_model(model, kv_dtype):
    engine = Engine(model, block_size="auto", kv_dtype=kv_dtype)
    assert engine.blocks.block_size in CANDIDATES
    assert engine.stats().policy_errors == {}
    assert "auto timed steps of 8 requests of 128 tokens on cpu" in engine.stats().block_size_reason
    assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
