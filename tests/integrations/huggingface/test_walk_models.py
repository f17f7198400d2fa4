"""Every causal language model of transformers equals stock, is refused for a known reason, or cannot be built."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
import walk_models
from tiny_configs import tiny_config
from walk_models import EQUAL, NOT_BUILT, REFUSED, causal_classes, walk_class

VERSION, TABLE = walk_models.read_table()
SLICES = 4
# One of each way to come out; the rest is walked in slices.
SAMPLE = [
    "LlamaForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForCausalLM",
    "GotOcr2ForConditionalGeneration",
    "WhisperForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconForCausalLM",
    "MambaForCausalLM",
]
REST = [name for name in causal_classes() if name not in SAMPLE]
stated_version = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"the table states transformers {VERSION}, not the installed one"
)


def check(name: str) -> None:
    """Walk one class, which raises where it differs from stock, and compare with its row of the table."""
    row = walk_class(name)
    if transformers.__version__ != VERSION:
        return
    stated = TABLE[name]
    # Why a class cannot be built depends on what else is installed.
    assert row.result == stated.result, f"{row.line()} but the table says {stated.line()}"
    assert row.result == NOT_BUILT or row == stated


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLICES))
def test_every_other_class_does_what_the_table_says(part: int) -> None:
    for name in REST[part::SLICES]:
        check(name)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_does_what_the_table_says(name: str) -> None:
    check(name)


@stated_version
def test_the_table_lists_every_class_once_and_enough_are_equal() -> None:
    assert list(TABLE) == list(causal_classes())
    assert {name: row.model_types for name, row in TABLE.items()} == causal_classes()
    counts = Counter(row.result for row in TABLE.values())
    assert counts.keys() == {EQUAL, REFUSED, NOT_BUILT}
    assert counts[EQUAL] >= 120
    assert counts[NOT_BUILT] < 10


@stated_version
def test_a_refusal_names_a_rule_and_not_a_crash() -> None:
    crashed = [row.line() for row in TABLE.values() if row.result == REFUSED and "failed with" in row.reason]
    assert crashed == []


def test_a_tiny_config_keeps_each_kind_of_layer() -> None:
    config = tiny_config(transformers.Gemma3ForCausalLM)
    assert config.hidden_size == 64
    assert config.sliding_window == 8
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}


@stated_version
def test_no_kind_of_layer_that_a_class_has_by_default_is_left_out() -> None:
    left_out = {}
    for name, row in TABLE.items():
        model_class = getattr(transformers, name)
        if row.result != NOT_BUILT:
            left_out[name] = layer_kinds(model_class.config_class()) - layer_kinds(tiny_config(model_class))
    assert {name: kinds for name, kinds in left_out.items() if kinds} == {}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("BambaForCausalLM", {"linear_attention", "full_attention"}),
        ("GraniteMoeHybridForCausalLM", {"linear_attention", "full_attention"}),
        ("JambaForCausalLM", {"linear_attention", "full_attention"}),
        ("Lfm2ForCausalLM", {"conv", "full_attention"}),
        ("MiniMaxM3VLForCausalLM", {"minimax_m3_sparse", "full_attention"}),
    ],
)
def test_what_checkpoints_have_beyond_the_default_of_their_class_is_there(name: str, kinds: set[str]) -> None:
    assert layer_kinds(tiny_config(getattr(transformers, name))) == kinds


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("Cohere2MoeForCausalLM", "mlp"),
        ("Llama4ForCausalLM", "feed_forward"),
        ("MellumForCausalLM", "mlp"),
        ("Qwen2MoeForCausalLM", "mlp"),
        ("Qwen3MoeForCausalLM", "mlp"),
        ("Qwen3NextForCausalLM", "mlp"),
    ],
)
def test_dense_layers_and_those_of_experts_are_both_there(name: str, place: str) -> None:
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        model = model_class(tiny_config(model_class))
    assert len({type(getattr(layer, place)) for layer in model.model.layers}) == 2


def layer_kinds(config: transformers.PreTrainedConfig) -> set[str]:
    text = config.get_text_config(decoder=True)
    return set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def test_a_class_that_differs_fails_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = walk_models.stepped_logits

    def late(twin, prompts, chunks):
        return [part.roll(1, 0) if chunks else part for part in logits(twin, prompts, chunks)]

    monkeypatch.setattr(walk_models, "stepped_logits", late)
    with pytest.raises(AssertionError, match=r"tokens after chunks of \[6, 3\]: relative error"):
        walk_class("LlamaForCausalLM")
