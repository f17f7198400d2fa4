"""prefill_attention against an oracle that attends one token at a time."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle

from paged_backend.kernels import decode_attention, prefill_attention
from paged_backend.kernels.triton import support as triton_support

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Whole prompts and chunks after a cached prefix, around the edges of a block of 16 and of a slice of queries.
CONTEXTS, QUERIES = [37, 1, 15, 16, 17, 90], [37, 1, 3, 16, 5, 67]
LONG_RULES = [{}, {"window": 100}, {"chunk": 100}]
RULES = [{}] + [{name: size} for name in ("window", "chunk") for size in (1, 7, 16, 70)]


def run(case, backend):
    return prefill_attention(*case.prefill_arguments, backend=backend)


def check(case, backend):
    assert_attention_close(run(case, backend), oracle(case))


@pytest.mark.parametrize("rule", RULES, ids=str)
# The interpreter meets the other sizes in drawn cases.
@pytest.mark.parametrize("block_size", [7] if triton_support.interpreted else [1, 7, 16, 32])
def test_ragged_prompts_and_chunks_match_the_oracle_under_every_mask_rule(backend, block_size, rule):
    check(make_case(CONTEXTS, QUERIES, block_size=block_size, group=2, num_kv_heads=1, key_dim=16, **rule), backend)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [{"window": 100}] if triton_support.interpreted else LONG_RULES, ids=str)
def test_several_hundred_tokens_match_the_oracle(backend, rule):
    check(make_case([233, 300], [180, 90], group=3, num_kv_heads=1, **rule), backend)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_query_heads_read_the_kv_head_of_their_group(backend, group):
    check(make_case([19, 9], [19, 4], group=group, num_kv_heads=3, key_dim=32), backend)


def test_a_group_of_more_heads_than_a_tile_has_rows(backend):
    check(make_case([9, 5], [9, 3], group=71, num_kv_heads=1, key_dim=8, sinks=True), backend)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (24, 16), (16, 40)])
def test_any_head_dim_and_unequal_key_and_value_dims(backend, key_dim, value_dim):
    check(make_case([19, 9], [19, 4], group=2, num_kv_heads=1, key_dim=key_dim, value_dim=value_dim), backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_stay_within_their_tolerance(backend, dtype):
    case = make_case(CONTEXTS, QUERIES, group=2, num_kv_heads=1, dtype=dtype, window=30)
    assert run(case, backend).dtype == dtype
    check(case, backend)


def test_softcap_and_sinks_and_a_rule_work_together(backend):
    options = {"group": 2, "num_kv_heads": 1, "scale": 0.7, "softcap": 2.0, "sinks": True}
    check(make_case(CONTEXTS, QUERIES, **options, window=20), backend)
    check(make_case(CONTEXTS, QUERIES, **options, chunk=20), backend)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_caches_are_read_through_their_scales(backend, cache_dtype):
    check(make_case(CONTEXTS, QUERIES, group=2, cache_dtype=cache_dtype, window=20), backend)


@pytest.mark.parametrize("rule", [{}, {"window": 20}, {"chunk": 24}], ids=str)
def test_a_prompt_in_chunks_equals_the_prompt_whole(backend, rule):
    case = make_case([80], [80], group=2, num_kv_heads=1, sinks=True, **rule)
    whole = run(case, backend)
    for start, end in ((0, 1), (1, 17), (17, 64), (64, 80)):
        _, cache, sequences, variant = case.prefill_arguments
        part = prefill_attention(
            case.query[start:end],
            cache,
            sequences._replace(
                cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
                context_lens=torch.tensor([end], dtype=torch.int32),
            ),
            variant,
            backend=backend,
        )
        assert_attention_close(part, whole[start:end])


def test_a_chunk_of_one_token_equals_decode(backend):
    case = make_case([37, 90], [1, 1], group=3, window=30)
    assert_attention_close(
        run(case, backend),
        decode_attention(*case.decode_arguments, backend=backend),
    )


def test_rows_past_the_last_sequence_and_empty_sequences_come_out_zero(backend):
    case = make_case([5, 7, 9], [5, 0, 3])
    padded = torch.cat((case.query, torch.full_like(case.query[:2], torch.nan)))
    output = prefill_attention(padded, *case.prefill_arguments[1:], backend=backend)
    assert output[8:].eq(0).all()
    assert_attention_close(output[:8], oracle(case))


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"window": 8}, {"window": 7}),
        ({"chunk": 8}, {"chunk": 7}),
        ({"scale": 1.0, "softcap": 3.0}, {"softcap": None}),
        ({"sinks": True}, {"sinks": None}),
        ({"group": 3}, {"kv_head_of": lambda head: head % 2}),
        ({}, {"scale": 0.95 * 64**-0.5}),
    ],
    ids=["window-1", "chunk-1", "no softcap", "no sinks", "interleaved heads", "scale 5 % off"],
)
def test_a_missing_feature_would_be_noticed(backend, options, change):
    # In the precision whose tolerance is largest.
    case = make_case([37, 16, 70], [37, 3, 20], dtype=torch.bfloat16, **options)
    output = run(case, backend)
    assert_attention_close(output, oracle(case))
    with pytest.raises(AssertionError):
        assert_attention_close(output, oracle(case, **change))


def test_queries_that_outnumber_their_context_are_refused_where_lengths_are_read():
    case = make_case([5], [5])
    query, cache, sequences, variant = case.prefill_arguments
    sequences = sequences._replace(context_lens=torch.tensor([4], dtype=torch.int32))
    with pytest.raises(ValueError, match="sequence 0 has 5 queries but only 4 tokens of context"):
        prefill_attention(query, cache, sequences, variant, backend="reference")


def test_shapes_that_do_not_fit_are_refused():
    case = make_case([5, 6], [5, 6])
    query, cache, sequences, variant = case.prefill_arguments
    with pytest.raises(ValueError, match="3 entries to go with 2 context_lens"):
        prefill_attention(query, cache, sequences._replace(cu_seqlens_q=case.cu_seqlens_q[:2]), variant)
    with pytest.raises(ValueError, match="no backend 'gpu'"):
        prefill_attention(*case.prefill_arguments, backend="gpu")
