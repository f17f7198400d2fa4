"""A gated MLP is swapped where it is two products and a gate, and nothing else."""

from __future__ import annotations

import re

import pytest
from swap_checks import stock_tokens, tokens
from torch import nn

from paged_backend import Engine


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3_longrope"])
def test_every_gated_mlp_is_swapped(tiny_model, family):
    model = tiny_model(family, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    engine = Engine(model, optimize=["mlp"])
    assert engine.stats().swaps_made == {"mlp": 2}
    if family != "phi3_longrope":
        assert tokens(engine) == stock_tokens(model)


def change(mlp, how):
    base = type(mlp)
    if how == "activation":
        mlp.act_fn = nn.Tanh()
    elif how == "weights":
        mlp.extra = nn.Linear(2, 2)
    else:

        class Changed(base):
            def forward(self, x):
                return 0.5 * super().forward(x)

        mlp.__class__ = Changed


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("activation", "its activation is neither silu nor gelu_tanh"),
        ("weights", "it has weights beside those of gate, up and down projection"),
        ("result", r"what C\+\+ computes in its place is .* away"),
    ],
)
def test_an_mlp_that_computes_something_else_stays(tiny_model, how, reason):
    model = tiny_model("llama")
    change(model.model.layers[1].mlp, how)
    engine = Engine(model, optimize=["mlp"])
    assert engine.stats().swaps_made == {"mlp": 2}
    (refused,) = engine.stats().swaps_refused.items()
    assert refused[0] == "model.layers.1.mlp"
    assert re.match(reason, refused[1])
    assert tokens(engine) == stock_tokens(model)


class Caller(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(x, scale=0.5)


def test_an_mlp_that_is_called_with_keywords_stays(tiny_model):
    model = tiny_model("llama")
    mlp = model.model.layers[1].mlp
    base = type(mlp)

    class Scaled(base):
        def forward(self, x, scale=1.0):
            return scale * super().forward(x)

    mlp.__class__ = Scaled
    model.model.layers[1].mlp = Caller(mlp)
    engine = Engine(model, optimize=["mlp"])
    assert engine.stats().swaps_refused == {"model.layers.1.mlp.mlp": "it is called with keywords: scale"}
    assert tokens(engine) == stock_tokens(model)
