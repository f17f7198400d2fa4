"""PagedCache under stock decoding: the same results as transformers' own cache, in shared blocks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
import walk_models
from stock_equality import LENGTH, RAGGED, assert_same_scores, assert_same_tokens, left_padded, paged
from tiny_models import make_tiny
from transformers import DynamicCache

from paged_backend import PagedCache
from paged_backend.errors import ConfigError, ContextOverflow, UnsupportedModel

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gpt2", "opt", "phimoe", "llama4", "deepseek_v2", "gpt_oss"]
SCORES = {"return_dict_in_generate": True, "output_scores": True}


def both(model, block_size=16, inputs=RAGGED, **options):
    """What stock returns with its own cache and with ours, under the same seed; and our cache."""
    results = []
    for cache in (None, PagedCache(block_size)):
        torch.manual_seed(3)
        results.append(model.generate(**inputs, **{**LENGTH, **options}, **SCORES, cache=cache))
    check_tables(cache)
    return *results, cache


def check_tables(cache):
    tables = cache.tables
    held = [block for row in tables.rows for block in row]
    assert all(len(row) == -(-tables.length // tables.block_size) for row in tables.rows)
    assert all(len(set(row)) == len(row) for row in tables.rows)
    assert {block: held.count(block) for block in held} == dict(tables.owners)
    assert not set(tables._free) & set(held)
    assert set(tables._free) | set(held) == set(range(tables._num_made))
    assert all(layer.length == tables.length for layer in cache.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_search_is_the_same_with_blocks(family):
    stock, ours, cache = both(make_tiny(family), block_size=7)
    assert_same_tokens(ours.sequences, stock.sequences, stock.scores)
    assert_same_scores(ours.scores, stock.scores)
    assert ours.cache is cache
    assert cache.get_seq_length() == 55


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0},
        {"num_beams": 3, "do_sample": True},
        {"do_sample": True, "top_k": 9},
        {"use_cache": True, "prefill_chunk_size": 5},
    ],
    ids=["beams", "several beams", "beam sampling", "sampling", "chunked prefill"],
)
def test_every_way_of_decoding_is_the_same_with_blocks(llama, options, block_size):
    stock, ours, _ = both(llama, block_size, **options)
    assert torch.equal(ours.sequences, stock.sequences)
    assert_same_scores(ours.scores, stock.scores)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": "itself"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_assisted_decoding_takes_tokens_back(family, options):
    model = make_tiny(family)
    if options.get("assistant_model") == "itself":
        options = {"assistant_model": make_tiny(family, seed=1)}
    ids = torch.tensor([[5, 6, 7, 8] * 5])
    stock = model.generate(ids, **LENGTH, **options)
    cache = PagedCache(4)
    assert torch.equal(model.generate(ids, **LENGTH, **options, cache=cache), stock)
    check_tables(cache)
    assert cache.get_seq_length() == stock.shape[1] - 1


def test_beams_share_the_blocks_of_their_common_past(llama):
    inputs = {"input_ids": left_padded([64])["input_ids"]}
    stock, ours, cache = both(llama, 4, inputs, num_beams=8, num_return_sequences=8)
    assert torch.equal(ours.sequences, stock.sequences)
    # 8 beams of 79 tokens would be 160 blocks without sharing.
    assert cache.num_used_blocks < 60


def test_chat_turns_go_on_from_the_cache(llama):
    caches, texts = [DynamicCache(config=llama.config), PagedCache(5)], []
    for cache in caches:
        ids = left_padded([9, 9], seed=1)["input_ids"]
        for turn in range(3):
            ids = torch.cat([ids, left_padded([4, 4], seed=turn)["input_ids"]], dim=1)
            ids = llama.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **LENGTH)
        texts.append(ids)
    assert torch.equal(*texts)
    assert caches[1].get_seq_length() == texts[1].shape[1] - 1
    assert caches[1].num_used_blocks == 2 * -(-(texts[1].shape[1] - 1) // 5)


def test_a_copied_cache_is_on_its_own(llama):
    prefix = left_padded([12])["input_ids"]
    cache = PagedCache(5)
    with torch.no_grad():
        llama(prefix, cache=cache)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        ids = torch.cat([prefix, left_padded([3], seed=4)["input_ids"]], dim=1)
        out = llama.generate(ids, cache=copied, **LENGTH)
        assert torch.equal(out, llama.generate(ids, **LENGTH))
        assert copied.get_seq_length() == 30
        assert cache.get_seq_length() == 12
        check_tables(copied)


def test_plain_forward_calls_keep_keys_and_values(llama):
    ids = left_padded([11, 11])["input_ids"]
    cache = PagedCache(4)
    with torch.no_grad():
        whole = llama(ids).logits
        parts = [llama(part, cache=cache).logits for part in ids.split([3, 1, 6, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    cache.crop(-3)
    cache.crop(7)
    with torch.no_grad():
        torch.testing.assert_close(llama(ids[:, 7:], cache=cache).logits, whole[:, 7:], rtol=1e-4, atol=1e-4)
    check_tables(cache)


def test_rows_that_are_reordered_repeated_and_selected_keep_their_own_tokens(llama):
    ids = left_padded([6, 6, 6])["input_ids"]
    cache = PagedCache(4)
    with torch.no_grad():
        llama(ids, cache=cache)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2, 3, 5]))
        rows = ids[[2, 0, 0, 0]]
        more = left_padded([3] * 4, seed=9)["input_ids"]
        expected = llama(torch.cat([rows, more], dim=1)).logits[:, 6:]
        used = cache.num_used_blocks
        logits = llama(more, cache=cache).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert used == 4
    # Those who share a half-filled block each write into one of their own, and one more block each is begun.
    assert cache.num_used_blocks == 4 + 2 + 4
    check_tables(cache)
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    assert len(cache.tables.rows) == 2
    check_tables(cache)


def test_a_cache_of_fixed_size_says_when_it_is_full(llama):
    cache = PagedCache(4, num_blocks=8)
    ids = left_padded([15, 15])["input_ids"]
    with torch.no_grad():
        llama(ids, cache=cache)
        cache.crop(-2)
        llama(ids[:, -2:], cache=cache)
        with pytest.raises(ContextOverflow, match=r"need 2 blocks.*0 of 8 are free"):
            llama(ids[:, :2], cache=cache)
    assert cache.get_max_length() == 16
    check_tables(cache)
    cache.reset()
    assert cache.num_used_blocks == cache.get_seq_length() == 0
    with torch.no_grad():
        torch.testing.assert_close(llama(ids[:1], cache=cache).logits, llama(ids[:1]).logits)
    with pytest.raises(ValueError, match="reset"), torch.no_grad():
        llama(ids, cache=cache)


KEEPING_MORE = {
    "MambaForCausalLM": "states of convolutions or of linear attention",
    "Lfm2MoeForCausalLM": "states of convolutions or of linear attention",
    "Qwen3NextForCausalLM": "states of convolutions or of linear attention",
    "DeepseekV32ForCausalLM": "the keys of an indexer",
    "DeepseekV4ForCausalLM": "looks for 'store_compression_weights'",
    "Qwen4ExpForCausalLM": "layer 1 of this model keeps something else",
    # Its states are in its modules.
    "RecurrentGemmaForCausalLM": "layer 0 of this model keeps none",
}


@pytest.mark.parametrize("use_generate", [True, False], ids=["generate", "forward"])
@pytest.mark.parametrize(("name", "what"), KEEPING_MORE.items(), ids=KEEPING_MORE.keys())
def test_a_model_that_keeps_more_than_keys_and_values_is_refused_by_name(name, what, use_generate):
    if not hasattr(transformers, name):
        pytest.skip("this version of transformers has no such class")
    model = walk_models.build(name)
    inputs = {**left_padded([9]), "cache": PagedCache(), **(LENGTH if use_generate else {})}
    run = model.generate if use_generate else model
    with pytest.raises(UnsupportedModel, match=f"holds the keys and values of every layer and nothing else.*{what}"):
        run(**inputs)


def test_a_chunked_prefill_of_embeddings_fails_as_with_stocks_cache(llama):
    for cache in (DynamicCache(), PagedCache()):
        with pytest.raises(RuntimeError, match="shape"):
            llama.generate(inputs_embeds=torch.zeros(2, 1, 64), **LENGTH, prefill_chunk_size=4, cache=cache)


def test_asking_whether_a_cache_has_something_else_is_answered(llama):
    cache = PagedCache()
    llama(left_padded([9])["input_ids"], cache=cache)
    assert not hasattr(cache, "conv_states")
    assert not hasattr(cache.layers[0], "recurrent_states")


@pytest.mark.parametrize("options", [{"block_size": 0}, {"block_size": "16"}, {"num_blocks": 0}, {"num_blocks": 1.5}])
def test_a_size_that_means_nothing_is_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        PagedCache(**options)


def test_a_model_in_the_place_of_a_size_is_refused_at_once_and_briefly(llama):
    with pytest.raises(ConfigError, match=r"^block_size must be an int of at least 1, got LlamaForCausalLM") as caught:
        PagedCache(llama)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "llama4"])
def test_the_engine_and_stock_with_this_cache_agree(family):
    model = make_tiny(family)
    _, ours, _ = both(model, 3)
    assert_same_tokens(paged(model), ours.sequences, ours.scores)
