"""A decoder layer is swapped whole where C++ computes the same, and only there."""

from __future__ import annotations

import pytest
import torch
from oracle import draw_prompts, stock_greedy
from swap_checks import PARTLY, WHOLE, stock_tokens, tokens
from tiny_models import FAMILIES, draw_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from paged_backend import Engine, SamplingParams
from paged_backend.swaps import layer as layer_swap
from paged_backend.swaps.layer import FusedLayer

pytestmark = pytest.mark.filterwarnings("ignore::paged_backend.model.twin.ExpandedCacheWarning")


@pytest.mark.parametrize("family", WHOLE)
def test_common_layers_are_swapped_whole(tiny_model, family):
    stats = Engine(tiny_model(family)).stats()
    assert stats.swaps_made == {"layer": 3, "linear": 1, "norm": 1}
    assert stats.swaps_refused == {}
    assert stats.packed_bytes > 0


@pytest.mark.parametrize("family", PARTLY)
def test_other_layers_are_refused_with_a_reason_and_their_parts_swapped(tiny_model, family):
    stats = Engine(tiny_model(family)).stats()
    assert "layer" not in stats.swaps_made
    assert stats.swaps_made["linear"] > 0
    assert len(stats.swaps_refused) >= 3
    assert all(stats.swaps_refused.values())


def test_a_hooked_layer_stays_and_its_hook_runs(tiny_model):
    model = tiny_model("llama")
    calls = []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    engine = Engine(model)
    calls.clear()
    stats = engine.stats()
    assert stats.swaps_made["layer"] == 2
    assert "has hooks" in stats.swaps_refused["model.layers.1"]
    assert tokens(engine) == stock_tokens(model)
    assert calls


def test_a_replaced_forward_is_left_alone(tiny_model):
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    original = mlp.forward
    mlp.forward = lambda x: original(x) * 0.5
    engine = Engine(model)
    assert "was replaced" in engine.stats().swaps_refused["model.layers.0"]
    assert tokens(engine) == stock_tokens(model)


@pytest.mark.parametrize("change", ["scale", "epsilon", "residual", "activation"])
def test_a_layer_that_looks_right_and_computes_something_else_is_refused(tiny_model, change):
    model = tiny_model("llama")
    layer = model.model.layers[1]
    if change == "residual":
        # A class of its own, so that no instance attribute gives it away.
        base = type(layer)

        class Halved(base):
            def forward(self, hidden_states, *args, **kwargs):
                return hidden_states + 0.9 * (super().forward(hidden_states, *args, **kwargs) - hidden_states)

        layer.__class__ = Halved
    elif change == "activation":
        layer.mlp.act_fn = nn.Tanh()
    elif change == "epsilon":
        layer.input_layernorm.variance_epsilon = 0.1
    else:
        layer.self_attn.scaling *= 3
    engine = Engine(model)
    refused = engine.stats().swaps_refused
    # A scale is read off the call of attention and therefore right; everything else is refused.
    assert ("model.layers.1" in refused) == (change != "scale")
    assert tokens(engine) == stock_tokens(model)


def test_past_the_crossover_the_original_layer_runs(tiny_model, monkeypatch):
    model = tiny_model("llama")
    engine = Engine(model)
    layers = [module for module in engine.twin.module.modules() if isinstance(module, FusedLayer)]
    ran = []
    for layer in layers:
        layer.most_rows = 8
        layer.original.register_forward_hook(lambda *_: ran.append(1))
    assert tokens(engine) == stock_tokens(model)
    # The prompts are longer than that, their decodes are not.
    assert 0 < len(ran) < 3 * 14


def test_a_quantised_cache_keeps_layers_and_swaps_their_parts(tiny_model):
    stats = Engine(tiny_model("llama"), kv_dtype="int8").stats()
    assert "layer" not in stats.swaps_made
    assert stats.swaps_made["mlp"] == 3
    assert stats.swaps_refused["model.layers.0"] == "its cache is quantised"


# Queries are scaled from this position on, and by 1 before.
ORIGINAL = 64
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral3(beta=0.1):
    shape = {**FAMILIES["llama"][1], "max_position_embeddings": 16 * ORIGINAL, "sliding_window": None}
    config = AutoConfig.for_model("ministral3", **shape, rope_parameters={**YARN, "llama_4_scaling_beta": beta})
    model = AutoModelForCausalLM.from_config(config).eval()
    draw_weights(model)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_that_scales_its_queries_far_out_stays(dtype):
    stats = Engine(ministral3().to(dtype)).stats()
    assert "layer" not in stats.swaps_made
    assert stats.swaps_made["mlp"] == 3
    assert "goes by positions otherwise than by rotation" in stats.swaps_refused["model.layers.0"]


@pytest.mark.parametrize("beta", [0.1, 0.0])
def test_tokens_far_out_are_stocks(beta):
    model = ministral3(beta)
    (prompt,) = draw_prompts([3 * ORIGINAL])
    with Engine(model) as engine:
        assert ("layer" in engine.stats().swaps_made) == (not beta)
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=10, ignore_eos=True))
    assert output.token_ids == stock_greedy(model, prompt, 10)


def test_a_swap_that_drops_the_scale_is_seen_by_its_numbers_too(monkeypatch):
    monkeypatch.setattr(layer_swap, "_check_far", lambda *_: None)
    stats = Engine(ministral3()).stats()
    assert "layer" not in stats.swaps_made
    assert "what C++ computes in its place" in stats.swaps_refused["model.layers.0"]
