"""A linear layer is swapped where nothing but its plain weight takes part."""

from __future__ import annotations

import pytest
import torch
from swap_checks import stock_tokens, tokens
from torch import nn

from paged_backend import Engine


@pytest.mark.parametrize(("family", "made"), [("llama", 22), ("gpt2", 13)])
def test_every_plain_linear_layer_is_swapped(tiny_model, family, made):
    model = tiny_model(family)
    engine = Engine(model, optimize=["linear"])
    assert engine.stats().swaps_made == {"linear": made}
    assert tokens(engine) == stock_tokens(model)


class Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_linear_layer_of_another_class_stays(tiny_model):
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj.__class__ = Linear
    engine = Engine(model, optimize=["linear"])
    assert engine.stats().swaps_refused == {"model.layers.0.mlp.up_proj": "a Linear is no plain linear layer"}
    assert tokens(engine) == stock_tokens(model)
