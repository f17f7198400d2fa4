"""The tiny models of the tests: deterministic, and sensitive to the feature each stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB_SIZE, make_tiny
from transformers import PreTrainedModel

# A wrong attention must move the logits by far more than float32 rounding (about 1e-5 here).
VISIBLE = 0.02


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    token_ids = torch.randint(3, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(1))
    return model(input_ids=token_ids, use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_model(family: str) -> None:
    torch.manual_seed(7)
    first = logits(make_tiny(family))
    torch.manual_seed(8)
    assert torch.equal(first, logits(make_tiny(family)))
    assert not torch.allclose(first, logits(make_tiny(family, seed=1)), atol=VISIBLE)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_early_token_shows_in_the_last_logits(family: str) -> None:
    model = make_tiny(family)
    token_ids = torch.randint(3, VOCAB_SIZE, (2, 7), generator=torch.Generator().manual_seed(2))
    token_ids[1, 1:] = token_ids[0, 1:]
    with torch.inference_mode():
        last = model(input_ids=token_ids, use_cache=False).logits[:, -1]
    assert (last[0] - last[1]).abs().max() > VISIBLE


@pytest.mark.parametrize(
    ("family", "broken"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 9}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 18}),
        ("gemma2", {"sliding_window": 9}),
        ("gemma3", {"query_pre_attn_scalar": 18}),
        ("gemma3", {"sliding_window": 9}),
        ("gpt2", {"scale_attn_weights": False}),
        ("phi3_longrope", {"original_max_position_embeddings": 64}),
        ("phimoe", {"sliding_window": None}),
        ("phimoe", {"sliding_window": 9}),
        ("llama4", {"attention_chunk_size": 9}),
        ("gpt_oss", {"sliding_window": 9}),
    ],
    ids=str,
)
def test_a_broken_feature_shows_in_the_logits(family: str, broken: dict[str, Any]) -> None:
    assert (logits(make_tiny(family)) - logits(make_tiny(family, **broken))).abs().max() > VISIBLE


def test_attention_sinks_show_in_the_logits() -> None:
    model = make_tiny("gpt_oss")
    before = logits(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(float("-inf"))
    assert (before - logits(model)).abs().max() > VISIBLE
