"""``generate`` on models that keep recurrent state: tokens, scores and the returned cache are stock's."""

from __future__ import annotations

import inspect

import pytest
import torch
from recurrent_models import make_recurrent
from stock_equality import LENGTH, assert_equals_stock, assert_same_scores, left_padded, paged
from transformers import MiniMaxForCausalLM

from paged_backend.errors import UnsupportedCall

INPUTS = left_padded([7, 1, 23])
OPTIONS = {**LENGTH, "max_new_tokens": 10, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["qwen3_next", "mamba2", "jamba", "minimax"])
def model(request):
    return make_recurrent(request.param)


def states_of(cache):
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            yield from (state for state in getattr(layer, name, {}).values() if state is not None)
    # MiniMax keeps a cache of its own kind.
    yield from (state for state in getattr(cache, "linear_cache", ()) if isinstance(state, torch.Tensor))


def test_padded_rows_get_stocks_tokens(model):
    assert_equals_stock(model, INPUTS, **OPTIONS)


def test_scores_and_the_states_of_the_returned_cache_are_stocks(model):
    options = {**OPTIONS, "return_dict_in_generate": True, "output_scores": True}
    stock, ours = model.generate(**INPUTS, **options), paged(model, INPUTS, **options)
    assert torch.equal(ours.sequences, stock.sequences)
    assert_same_scores(ours.scores, stock.scores)
    assert_same_states(ours.cache, stock.cache)


def assert_same_states(ours, stock):
    pairs = list(zip(states_of(ours), states_of(stock), strict=True))
    assert pairs
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_stock_goes_on_from_the_returned_cache(model):
    options = {**OPTIONS, "return_dict_in_generate": True}
    inputs = {"input_ids": INPUTS["input_ids"][2:]}
    whole = model.generate(**inputs, **{**OPTIONS, "max_new_tokens": 14})
    first = paged(model, inputs, **options)
    last = first.sequences[:, -1:]
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        for position in range(first.sequences.shape[1] - 1, 36):
            kwargs = {"position_ids": torch.tensor([[position]])} if takes_positions else {}
            output = model(input_ids=last, cache=first.cache, use_cache=True, **kwargs)
            last = output.logits[:, -1:].argmax(-1)
            first.sequences = torch.cat([first.sequences, last], 1)
    assert torch.equal(first.sequences, whole)


def test_the_returned_cache_is_stocks_where_its_first_layer_counts_no_tokens():
    config = make_recurrent("minimax").config
    config.layer_types = ["linear_attention", "full_attention", "linear_attention"]
    torch.manual_seed(0)
    model = MiniMaxForCausalLM(config).eval()
    options = {**OPTIONS, "return_dict_in_generate": True}
    stock, ours = model.generate(**INPUTS, **options), paged(model, INPUTS, **options)
    assert torch.equal(ours.sequences, stock.sequences)
    assert_same_states(ours.cache, stock.cache)
    torch.testing.assert_close(ours.cache.layers[1].keys, stock.cache.layers[1].keys, rtol=1e-3, atol=1e-3)


def test_padding_is_refused_by_name_where_stock_takes_it_into_a_state():
    model = make_recurrent("recurrent_gemma")
    assert_equals_stock(model, left_padded([9, 9]), **OPTIONS)
    with pytest.raises(UnsupportedCall, match=r"padding \(row 1\) for Recurrent.*, which takes padding into"):
        paged(model, left_padded([9, 8]), **OPTIONS)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_what_would_take_states_back_is_refused(options):
    with pytest.raises(UnsupportedCall):
        paged(make_recurrent("qwen3_next"), left_padded([9]), **OPTIONS, **options)
