"""``inputs_embeds`` in place of, or beside, token ids: the same results as stock."""

from __future__ import annotations

import pytest
import torch
from stock_equality import LENGTH, RAGGED, assert_same_cache, assert_same_scores, assert_same_tokens, left_padded, paged
from tiny_models import make_tiny
from transformers import LogitsProcessorList

from paged_backend.errors import RequestRefused, UnsupportedCall

SCORES = {"return_dict_in_generate": True, "output_scores": True}
MASK = RAGGED["attention_mask"]


def embeds_of(model, ids=RAGGED["input_ids"]):
    """The embeddings of other tokens than ``ids``, moved off the vocabulary."""
    with torch.no_grad():
        return model.get_input_embeddings()(ids.roll(1, dims=1)) * 1.25


def assert_equal(model, inputs, **options):
    options = {**LENGTH, **options}
    paged_config = options.pop("paged_config", None)
    stock = model.generate(**inputs, **options, **SCORES)
    ours = model.generate(**inputs, **options, cache_impl="paged", paged_config=paged_config)
    assert_same_tokens(ours, stock.sequences, stock.scores)
    return ours


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
@pytest.mark.parametrize("paged_config", [None, {"max_num_batched_tokens": 9, "block_size": 4}], ids=str)
def test_embeddings_alone_give_the_new_tokens_alone(family, paged_config):
    model = make_tiny(family)
    inputs = {"inputs_embeds": embeds_of(model), "attention_mask": MASK}
    assert assert_equal(model, inputs, paged_config=paged_config).shape == (5, 16)


def test_token_ids_beside_embeddings_are_shown_and_not_fed():
    model = make_tiny("llama")
    inputs = {"input_ids": RAGGED["input_ids"], "inputs_embeds": embeds_of(model), "attention_mask": MASK}
    out = assert_equal(model, inputs)
    assert torch.equal(out[:, :40], RAGGED["input_ids"])
    assert not torch.equal(out, paged(model))
    seen = []

    def look(input_ids, scores):
        seen.append(input_ids.shape)
        return scores

    assert_equal(model, inputs, logits_processor=LogitsProcessorList([look]))
    assert seen[:16] == seen[16:] == [(5, 40 + step) for step in range(16)]


@pytest.mark.filterwarnings("ignore:Passing `")
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(0, 256, 5))},
        {"eos_token_id": list(range(0, 256, 5)), "pad_token_id": 3},
        {"max_new_tokens": None, "max_length": 53},
        {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    ],
    ids=str,
)
def test_options_mean_the_same_with_embeddings(options):
    model = make_tiny("llama")
    assert_equal(model, {"inputs_embeds": embeds_of(model), "attention_mask": MASK}, **options)


def test_embeddings_without_a_mask_are_all_prompt():
    model = make_tiny("llama")
    assert_equal(model, {"inputs_embeds": embeds_of(model)})


def test_equal_lengths_of_other_embeddings_are_not_mixed_up():
    model = make_tiny("llama")
    embeds = embeds_of(model, left_padded([33])["input_ids"])
    outs = [assert_equal(model, {"inputs_embeds": embeds * scale}, paged_config={"block_size": 4}) for scale in (1, -2)]
    assert not torch.equal(*outs)


def test_scores_and_the_cache_equal_stock():
    model = make_tiny("llama")
    inputs = {"inputs_embeds": embeds_of(model), "attention_mask": MASK}
    stock = model.generate(**inputs, **LENGTH, **SCORES)
    ours = paged(model, inputs, **SCORES)
    assert torch.equal(ours.sequences, stock.sequences)
    assert_same_scores(ours.scores, stock.scores)
    assert ours.cache.get_seq_length() == 55
    assert_same_cache(ours.cache, stock.cache)


def test_embeddings_of_the_wrong_width_and_masks_with_holes_are_refused():
    model = make_tiny("llama")
    embeds = embeds_of(model)
    with pytest.raises(RequestRefused, match="64"):
        paged(model, {"inputs_embeds": embeds[:, :, :-1]})
    mask = torch.ones_like(MASK)
    mask[2, -3:] = 0
    with pytest.raises(UnsupportedCall, match=r"right \(row 2\)"):
        paged(model, {"inputs_embeds": embeds, "attention_mask": mask})
