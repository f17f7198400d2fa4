"""A model that asks its cache how many tokens came before is told so for each token of a pack, or is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import draw_prompts, stock_greedy
from paged_forward import prefill_logits, stepped_logits
from transformers import PreTrainedModel

from paged_backend import Engine, SamplingParams
from paged_backend.errors import ConfigError, ContextOverflow
from paged_backend.model.layer_probe import _FarPasses
from paged_backend.model.packed_past import PackedPast
from paged_backend.model.twin import BoundedPositionsWarning, Twin

TinyModel = Callable[..., PreTrainedModel]
# Layers without RoPE scale their queries from here on, by the length of the cache.
FLOOR = 48
BOUND = FLOOR - 1


def llama4(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama4", floor_scale=FLOOR, attn_scale=2.0, num_local_experts=1, num_experts_per_tok=1)


@torch.no_grad()
def farthest(model: PreTrainedModel, prompts: list[list[int]], found: list[torch.Tensor]) -> float:
    """The largest distance of a logit from the model's own."""
    wanted = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


# Chunks of prompts that share passes, so that a token's place in the pack is not its position.
@pytest.mark.parametrize("chunks", [[], [50, 20], [60, 1, 1]], ids=str)
def test_positions_beyond_the_scale_are_right_wherever_a_token_lies(tiny_model: TinyModel, chunks: list[int]) -> None:
    model = llama4(tiny_model)
    prompts = draw_prompts([100, 30, 4 * FLOOR])
    assert farthest(model, prompts, stepped_logits(Twin(model), prompts, chunks)) < 1e-3


@pytest.mark.parametrize("optimize", ["none", "auto"])
def test_tokens_beyond_the_scale_are_stocks(tiny_model: TinyModel, optimize: str) -> None:
    model = llama4(tiny_model)
    prompts = draw_prompts([FLOOR - 5, 3 * FLOOR])
    with Engine(model, optimize=optimize, max_num_batched_tokens=64) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [stock_greedy(model, prompt, 10) for prompt in prompts]


def test_a_twin_that_ignores_the_past_would_be_seen(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama4(tiny_model)
    prompts = draw_prompts([2 * FLOOR, 30])
    monkeypatch.setattr(_FarPasses, "past_matters", lambda self, end: False)
    assert farthest(model, prompts, stepped_logits(Twin(model), prompts, [80, 2])) > 0.05


def test_a_model_that_asks_nothing_is_given_no_cache(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    given: list[Any] = []
    model.model.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs["cache"]), with_kwargs=True)
    twin = Twin(model)
    given.clear()
    prefill_logits(twin, draw_prompts([5]))
    assert given == [None]


def ask_for_one_number(model: PreTrainedModel) -> None:
    """Queries go by the length of the cache in a way that cannot differ between the tokens of a pack."""
    base = type(model.model.layers[1].self_attn)

    class Asking(base):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("cache")
            past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
            return super().forward(hidden_states * math.ceil((past + hidden_states.shape[1]) / 100), *args, **kwargs)

    model.model.layers[1].self_attn.__class__ = Asking


def test_a_model_that_cannot_be_told_is_bounded_and_says_why(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    ask_for_one_number(model)
    with pytest.warns(BoundedPositionsWarning, match="up to 100 tokens: from position 100 on it goes by the length"):
        engine = Engine(model, max_num_batched_tokens=32, max_num_seqs=4)
    assert engine.max_model_len == 100
    with pytest.raises(ContextOverflow, match=r"beyond the 100 positions .*it goes by the length of its own cache"):
        engine.add_request([5] * 90, {"max_tokens": 11})
    (prompt,) = draw_prompts([80])
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))
    assert output.token_ids == stock_greedy(model, prompt, 20)


@pytest.mark.filterwarnings("ignore::paged_backend.model.twin.BoundedPositionsWarning")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 101}, "max_model_len=101 is beyond the 100 positions .*its own cache"),
        ({"max_num_batched_tokens": 98, "max_num_seqs": 3}, "may hold 101 tokens, beyond the 100 positions"),
    ],
)
def test_what_goes_beyond_a_bound_is_refused_by_name(
    tiny_model: TinyModel, options: dict[str, int], message: str
) -> None:
    model = tiny_model("llama")
    ask_for_one_number(model)
    with pytest.raises(ConfigError, match=message):
        Engine(model, **{"max_num_batched_tokens": 32, "max_num_seqs": 4, **options})


def test_a_past_that_tells_nothing_bounds_the_model(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedPast, "get_seq_length", lambda self, layer_idx=0: 0)
    with pytest.warns(BoundedPositionsWarning):
        twin = Twin(llama4(tiny_model))
    assert twin.max_positions == BOUND
