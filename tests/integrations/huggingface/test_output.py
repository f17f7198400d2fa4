"""return_dict_in_generate: every field as stock fills it."""

from __future__ import annotations

import copy

import pytest
import torch
from pairwise import pairwise
from stock_equality import (
    LENGTH,
    RAGGED,
    assert_same_cache,
    assert_same_scores,
    left_padded,
    paged,
    tokens_drawn_early,
)
from tiny_models import make_tiny
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paged_backend.errors import UnsupportedCall

FIELDS = {"return_dict_in_generate": True}
SCORES = {**FIELDS, "output_scores": True, "output_logits": True}


def both(model, inputs=RAGGED, paged_config=None, **options):
    options = {**LENGTH, **options}
    return (
        model.generate(**inputs, **options),
        model.generate(**inputs, **options, cache_impl="paged", paged_config=paged_config),
    )


def assert_same_output(ours, stocks):
    assert type(ours) is type(stocks) is GenerateDecoderOnlyOutput
    assert list(ours) == list(stocks)
    assert torch.equal(ours.sequences, stocks.sequences)
    assert_same_scores(ours.scores, stocks.scores)
    assert_same_scores(ours.logits, stocks.logits)
    assert ours.attentions is stocks.attentions is None
    assert ours.hidden_states is stocks.hidden_states is None
    assert_same_cache(ours.cache, stocks.cache)


OPTIONS = {
    "fields": FIELDS,
    "all": SCORES,
    "scores": {**FIELDS, "output_scores": True},
    "logits": {**FIELDS, "output_logits": True, "repetition_penalty": 1.3},
    "processed": {**SCORES, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    "no cache": {**FIELDS, "use_cache": False},
}


@pytest.mark.parametrize(("name", "ends", "chunk"), pairwise(list(OPTIONS), (False, True), (None, 9)))
def test_every_field_equals_stock(llama, name, ends, chunk):
    eos = tokens_drawn_early(llama, 4) if ends else None
    config = chunk and {"max_num_batched_tokens": chunk}
    stock, ours = both(llama, **OPTIONS[name], eos_token_id=eos, pad_token_id=9, paged_config=config)
    assert_same_output(ours, stock)


def test_finished_rows_keep_the_scores_that_stock_gives_padding(llama):
    new = llama.generate(**RAGGED, **LENGTH)[:, 40:]
    stock, ours = both(llama, **SCORES, eos_token_id=int(new[0, 2]), pad_token_id=9)
    assert (ours.sequences[0, 44:] == 9).all()
    assert_same_scores(ours.scores, stock.scores)
    assert_same_scores(ours.logits, stock.logits)


def test_transition_scores_equal_stocks(llama):
    stock, ours = both(llama, **SCORES, eos_token_id=tokens_drawn_early(llama, 3))
    for normalize in (False, True):
        theirs = llama.compute_transition_scores(stock.sequences, stock.scores, normalize_logits=normalize)
        mine = llama.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=normalize)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def test_scores_of_sampled_rows_are_what_they_were_drawn_from(llama):
    options = {"do_sample": True, "temperature": 0.7, "top_k": 10, "top_p": 0.9}
    torch.manual_seed(4)
    ours = paged(llama, **SCORES, **options)
    torch.manual_seed(4)
    assert torch.equal(paged(llama, **options), ours.sequences)
    new = ours.sequences[:, 40:]
    for step, (scores, logits) in enumerate(zip(ours.scores, ours.logits, strict=True)):
        drawn = scores.gather(1, new[:, step : step + 1])
        assert (drawn > -torch.inf).all()
        assert ((scores > -torch.inf).sum(1) <= 10).all()
        torch.testing.assert_close(drawn, logits.gather(1, new[:, step : step + 1]) / 0.7)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("ends", [False, True], ids=["to the end", "rows end early"])
def test_stock_goes_on_from_the_cache_as_from_its_own(family, ends):
    model = make_tiny(family)
    eos = tokens_drawn_early(model, 3) if ends else None
    stock, ours = both(model, **FIELDS, eos_token_id=eos)
    assert_same_output(ours, stock)
    turn = left_padded([6] * 5, seed=3)["input_ids"]
    results = []
    for output in (stock, ours):
        ids = torch.cat([output.sequences, turn], dim=1)
        mask = torch.cat([RAGGED["attention_mask"], torch.ones_like(ids[:, 40:])], dim=1)
        result = model.generate(ids, attention_mask=mask, cache=copy.deepcopy(output.cache), **LENGTH, **SCORES)
        results.append(result)
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert_same_scores(results[1].scores, results[0].scores)


def test_scores_are_ordinary_tensors(llama):
    ours = paged(llama, **SCORES)
    assert not any(tensor.is_inference() for tensor in (*ours.scores, *ours.logits, ours.sequences))
    weight = torch.ones(256, requires_grad=True)
    (ours.scores[0] * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_what_the_engine_does_not_compute_is_refused_by_name(llama, name):
    with pytest.raises(UnsupportedCall, match=name):
        paged(llama, **FIELDS, **{name: True})


def test_outputs_without_the_dictionary_have_no_effect_as_in_stock(llama):
    stock, ours = both(llama, output_scores=True, output_logits=True)
    assert torch.equal(ours, stock)
