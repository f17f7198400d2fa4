"""A norm is swapped where it is an RMS norm, whatever it adds to its weight."""

from __future__ import annotations

import pytest
from swap_checks import stock_tokens, tokens

from paged_backend import Engine


@pytest.mark.parametrize(("family", "made"), [("llama", 7), ("gemma2", 13), ("qwen3", 13)])
def test_every_rms_norm_is_swapped(tiny_model, family, made):
    model = tiny_model(family)
    engine = Engine(model, optimize=["norm"])
    assert engine.stats().swaps_made == {"norm": made}
    assert tokens(engine) == stock_tokens(model)


def test_what_only_is_called_a_norm_stays(tiny_model):
    model = tiny_model("llama")
    norm = model.model.norm
    base = type(norm)

    class HalvedRMSNorm(base):
        def forward(self, hidden_states):
            return 0.5 * super().forward(hidden_states)

    norm.__class__ = HalvedRMSNorm
    engine = Engine(model, optimize=["norm"])
    reason = "a HalvedRMSNorm computes something else than an RMS norm"
    assert engine.stats().swaps_refused == {"model.norm": reason}
    assert tokens(engine) == stock_tokens(model)
