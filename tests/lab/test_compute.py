"""Operations are counted as the model computes them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_tiny

from paged_backend.lab.compute import TokenCost, flops_ceiling


def test_a_request_takes_its_tokens_and_what_each_attends_to():
    assert TokenCost(100.0, 3.0).of(2, 3) == 4 * 100 + 3 * (1 + 2 + 3 + 4)


def test_weights_are_counted_once_for_each_token_but_embeddings_are_not():
    model = make_tiny("llama")
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    config = model.config
    cost = TokenCost.of_model(model)
    assert cost.flops == 2 * linear
    assert cost.flops_per_context == 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim


def test_of_experts_only_those_count_that_a_token_goes_through():
    model = make_tiny("phimoe")
    config = model.config
    dense = TokenCost.of_model(make_tiny("phimoe", num_experts_per_tok=config.num_local_experts)).flops
    experts = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 3)
    assert experts
    expected = dense - 2 * experts * (1 - config.num_experts_per_tok / config.num_local_experts)
    assert TokenCost.of_model(model).flops == pytest.approx(expected)


def test_the_ceiling_is_a_rate_that_the_machine_reaches(monkeypatch):
    monkeypatch.setattr("paged_backend.lab.compute._SIZES", (64,))
    monkeypatch.setattr("paged_backend.lab.compute._TIMED_S", 0.01)
    assert 1e6 < flops_ceiling([torch.float32, torch.float16], torch.device("cpu")) < 1e15
