"""States of decodes are updated where they lie, in modules whose own function for that comes out the same."""

from __future__ import annotations

import functools

import pytest
import torch
from oracle import assert_greedy, draw_prompts, stock_greedy
from recurrent_models import make_recurrent

from paged_backend import Engine, SamplingParams
from paged_backend.kernels import cpu
from paged_backend.swaps import state as state_swap

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="no C++ operations here")

OPTIONS = {"block_size": 5, "optimize": ["state"]}
PROMPTS = draw_prompts([13, 40, 1])


def assert_stocks_tokens(model, engine):
    for prompt, output in zip(
        PROMPTS, engine.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True)), strict=True
    ):
        assert_greedy(model, prompt, output.token_ids, stock_greedy(model, prompt, 12))


@pytest.mark.parametrize(
    ("family", "made"), [("qwen3_next", 2), ("olmo_hybrid", 2), ("mamba2", 3), ("bamba", 2), ("falcon_h1", 3)]
)
def test_gated_delta_rules_and_scans_are_updated_where_they_lie(family, made):
    model = make_recurrent(family)
    with Engine(model, **OPTIONS) as engine:
        assert engine.stats().swaps_made == {"state": made}
        assert_stocks_tokens(model, engine)


@pytest.mark.filterwarnings("ignore::paged_backend.model.twin.ExpandedCacheWarning")
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("kimi_linear", "g must be [1, 4], got [1, 4, 16]"),
        ("jamba", "it updates dimensions of a head each in its own way"),
        ("lfm2", "it has 0 recurrent states, and calls 0 functions that are known"),
    ],
)
def test_other_ways_to_update_stay_with_the_reason(family, reason):
    with Engine(make_recurrent(family), **OPTIONS) as engine:
        stats = engine.stats()
        assert stats.swaps_made == {}
        assert set(stats.swaps_refused.values()) == {reason}


def test_a_state_is_read_and_written_in_the_pool_alone(monkeypatch):
    copied = []
    with Engine(make_recurrent("qwen3_next"), **OPTIONS) as engine:
        states, read = engine.runner.states, engine.runner.states.read
        recurrent = {
            index for index, spec in enumerate(states.specs) if spec.dtype == torch.float32 and len(spec.shape) == 3
        }
        monkeypatch.setattr(states, "read", lambda index, slots: copied.append(index) or read(index, slots))
        engine.generate([PROMPTS[2]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert recurrent
    assert copied
    assert not recurrent & set(copied)


@pytest.mark.parametrize(
    "mutant",
    ["the state is not decayed", "the query is not normalised", "the state stays in its old slot"],
)
def test_an_update_that_is_wrong_is_not_taken(mutant, monkeypatch):
    right = state_swap.gated_delta_update

    def wrong(query, key, value, g, beta, pool, sources, targets, *, normalises, backend):
        if mutant == "the state is not decayed":
            g = torch.zeros_like(g)
        elif mutant == "the query is not normalised":
            normalises = False
        else:
            targets = sources
        return right(query, key, value, g, beta, pool, sources, targets, normalises=normalises, backend=backend)

    monkeypatch.setattr(state_swap, "gated_delta_update", wrong)
    model = make_recurrent("qwen3_next")
    with Engine(model, **OPTIONS) as engine:
        stats = engine.stats()
        assert stats.swaps_made == {}
        assert all("is rounding" in reason for reason in stats.swaps_refused.values())
        assert_stocks_tokens(model, engine)


def test_a_forward_of_the_users_own_is_left_alone():
    model = make_recurrent("qwen3_next")
    mixer = model.model.layers[0].linear_attn
    own = mixer.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        return own(*args, **kwargs)

    mixer.forward = forward
    with Engine(model, **OPTIONS) as engine:
        assert engine.stats().swaps_made == {"state": 1}
        assert engine.stats().swaps_refused == {"model.layers.0.linear_attn": "its forward was replaced"}
        assert_stocks_tokens(model, engine)
