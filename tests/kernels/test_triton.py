"""What only attention in Triton has: contexts that are split, slots however far, head dims that no tile holds."""

from __future__ import annotations

import sys

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle

from paged_backend.kernels import (
    AttentionVariant,
    LayerCache,
    MaskRule,
    Sequences,
    decode_attention,
    store_kv,
)
from paged_backend.kernels.triton import support as triton_support
from paged_backend.kernels.triton.decode_attention import num_splits

interpreted = pytest.mark.skipif(
    not triton_support.interpreted, reason="runs where TRITON_INTERPRET=1 is set, see test_interpreter.py"
)


def test_a_small_batch_with_a_long_context_is_split_and_a_large_one_is_not():
    assert num_splits(num_programs=8, max_context_len=65536, processors=132) == 64
    assert num_splits(num_programs=512, max_context_len=4096, processors=132) == 3
    assert num_splits(num_programs=2048, max_context_len=4096, processors=132) == 1
    assert num_splits(num_programs=1, max_context_len=200, processors=132) == 1
    assert num_splits(num_programs=1, max_context_len=0, processors=132) == 1


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("splits", "rule"), [(1, {}), (2, {"window": 100}), (2, {"chunk": 100}), (9, {}), (9, {"window": 100})], ids=str
)
def test_any_number_of_splits_gives_the_same_answer(monkeypatch, splits, rule):
    module = sys.modules["paged_backend.kernels.triton.decode_attention"]
    monkeypatch.setattr(module, "num_splits", lambda *_: splits)
    case = make_case([1, 0, 64, 65, 350], group=2, num_kv_heads=1, sinks=True, softcap=5.0, scale=0.5, **rule)
    output = decode_attention(*case.decode_arguments, backend="triton")
    assert_attention_close(output, oracle(case))


@interpreted
def test_splits_follow_from_what_the_caller_says_about_lengths(monkeypatch):
    module = sys.modules["paged_backend.kernels.triton.decode_attention"]
    longest = []
    monkeypatch.setattr(module, "num_splits", lambda programs, length, processors: longest.append(length) or 1)
    case = make_case([30, 300])
    query, cache, sequences, variant = case.decode_arguments
    for said in (None, 300):
        decode_attention(query, cache, sequences._replace(max_context_len=said), variant, backend="triton")
    window = variant._replace(mask=MaskRule("window", 40))
    decode_attention(query, cache, sequences, window, backend="triton")
    assert longest == [case.block_tables.shape[1] * 16, 300, 40]


@interpreted
def test_slots_beyond_two_to_the_31_elements_are_reached():
    # Reserved, not filled: only the blocks that are used take up memory.
    block_size, dim = 16, 128
    num_blocks = 2**31 // (block_size * dim) + 2
    key_cache, value_cache = (torch.empty(num_blocks, 1, block_size, dim, dtype=torch.int8) for _ in range(2))
    cache = LayerCache(key_cache, value_cache, *(torch.empty(num_blocks, 1, block_size) for _ in range(2)))
    key, value, query = torch.randn(3, 5, 1, dim)
    slots = (num_blocks - 1) * block_size + torch.arange(5)
    store_kv(key, value, cache, slots, backend="triton")
    tables, lengths = torch.tensor([[num_blocks - 1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    attended = decode_attention(query[:1], cache, Sequences(tables, lengths), AttentionVariant(1.0), backend="triton")
    weights = (query[0] @ key[:, 0].T).softmax(-1)
    torch.testing.assert_close(attended[0], weights @ value[:, 0], atol=0.2, rtol=0)


@interpreted
def test_a_head_dim_that_no_tile_holds_is_refused():
    case = make_case([3], key_dim=520)
    with pytest.raises(ValueError, match="head dims up to 512, got 1024"):
        decode_attention(*case.decode_arguments, backend="triton")
