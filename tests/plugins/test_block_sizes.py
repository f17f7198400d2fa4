"""Block-size rules: what they choose, and what they are given to choose by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams, hookimpl
from paged_backend.plugins.block_sizes import CANDIDATES, auto
from paged_backend.policies import ModelShape

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


def test_equal_times_choose_the_least_waste():
    assert auto(shape(dict.fromkeys(CANDIDATES, 1.0)), CPU) == min(CANDIDATES)


def test_a_faster_large_block_wins_if_it_saves_more_than_it_wastes():
    assert auto(shape({16: 1.0, 32: 0.5, 64: 0.48, 128: 0.47}), CPU) == 32
    assert auto(shape({16: 1.0, 32: 0.8, 64: 0.6, 128: 0.2}), CPU) == 128


def test_differences_that_are_noise_keep_the_small_block():
    assert auto(shape({16: 1.0, 32: 0.96, 64: 0.9, 128: 0.9}), CPU) == 16


def test_waste_weighs_more_for_a_model_of_short_texts():
    seconds = {16: 1.0, 32: 0.8, 64: 0.6, 128: 0.6}
    assert auto(shape(seconds), CPU) == 64
    assert auto(shape(seconds, max_positions=64), CPU) == 32


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


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_auto_measures_a_real_model(model, kv_dtype):
    engine = Engine(model, block_size="auto", kv_dtype=kv_dtype)
    assert engine.blocks.block_size in CANDIDATES
    assert engine.stats().policy_errors == {}
    assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
