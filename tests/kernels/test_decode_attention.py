"""decode_attention against an oracle that attends one token at a time."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle

from paged_backend.kernels import decode_attention
from paged_backend.kernels.triton import support as triton_support

pytestmark = pytest.mark.usefixtures("poisoned_memory")

RAGGED = [37, 1, 15, 16, 17, 301]
RULES = [{}] + [{name: size} for name in ("window", "chunk") for size in (1, 7, 16, 40)]


def run(case, backend):
    return decode_attention(*case.decode_arguments, backend=backend)


def check(case, backend):
    assert_attention_close(run(case, backend), oracle(case))


@pytest.mark.parametrize("rule", RULES, ids=str)
# The interpreter meets the other sizes in drawn cases.
@pytest.mark.parametrize("block_size", [7] if triton_support.interpreted else [1, 7, 16, 32])
def test_ragged_contexts_match_the_oracle_under_every_mask_rule(backend, block_size, rule):
    check(make_case(RAGGED, block_size=block_size, group=3, num_kv_heads=1, key_dim=32, **rule), backend)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_query_heads_read_the_kv_head_of_their_group(backend, group):
    check(make_case([29, 4], group=group, num_kv_heads=3), backend)


def test_a_group_of_more_heads_than_a_tile_has_rows(backend):
    check(make_case([29, 4], group=71, num_kv_heads=2, key_dim=8, sinks=True), backend)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (24, 16), (16, 40)])
def test_any_head_dim_and_unequal_key_and_value_dims(backend, key_dim, value_dim):
    check(make_case([33, 5], group=2, key_dim=key_dim, value_dim=value_dim), backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_stay_within_their_tolerance(backend, dtype):
    case = make_case(RAGGED, group=3, dtype=dtype, window=150)
    assert run(case, backend).dtype == dtype
    check(case, backend)


def test_a_cache_of_lower_precision_than_the_query_gives_the_query_dtype(backend):
    case = make_case([37, 9], dtype=torch.float32, cache_dtype=torch.bfloat16)
    output = run(case, backend)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, oracle(case), atol=2e-2, rtol=2e-2)


def test_softcap_and_sinks_and_a_rule_work_together(backend):
    check(make_case(RAGGED, group=2, scale=0.7, softcap=2.0, sinks=True, window=20), backend)
    check(make_case(RAGGED, group=2, scale=0.7, softcap=2.0, sinks=True, chunk=20), backend)


@pytest.mark.parametrize(("cache_dtype", "rule"), [(torch.int8, {}), (torch.float8_e4m3fn, {"window": 20})], ids=str)
def test_quantised_caches_are_read_through_their_scales(backend, cache_dtype, rule):
    check(make_case(RAGGED, group=3, cache_dtype=cache_dtype, **rule), backend)


def test_a_padding_row_comes_out_zero_whatever_its_table_holds(backend):
    case = make_case([5, 0, 21, 0])
    output = run(case, backend)
    assert output[1].eq(0).all()
    assert output[3].eq(0).all()
    assert_attention_close(output, oracle(case))


def test_only_padding_rows_come_out_zero(backend):
    case = make_case([0, 0])
    assert run(case, backend).eq(0).all()


def test_a_visible_nan_reaches_its_own_sequence_and_no_other(backend):
    case = make_case([20, 20])
    case.value_cache[case.block_tables[0, 0]] = torch.nan
    output = run(case, backend)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_a_table_changed_in_place_is_read_anew(backend):
    case = make_case([20, 20])
    before = run(case, backend)
    case.block_tables.copy_(case.block_tables.flip(0))
    after = run(case, backend)
    assert_attention_close(after, oracle(case))
    assert not torch.allclose(before, after)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"window": 8}, {"window": 9}),
        ({"window": 8}, {"window": 7}),
        ({"chunk": 8}, {"chunk": 7}),
        ({"scale": 1.0, "softcap": 3.0}, {"softcap": None}),
        ({"sinks": True}, {"sinks": None}),
        ({"group": 3}, {"kv_head_of": lambda head: head % 2}),
        ({}, {"scale": 0.95 * 64**-0.5}),
    ],
    ids=["window+1", "window-1", "chunk-1", "no softcap", "no sinks", "interleaved heads", "scale 5 % off"],
)
def test_a_missing_feature_would_be_noticed(backend, options, change):
    # Drawn without its rule, so that what a wider window would see is there to be seen.
    rule = {name: options[name] for name in ("window", "chunk") if name in options}
    drawn = {name: options[name] for name in options if name not in rule}
    # In the precision whose tolerance is largest.
    case = make_case([37, 1, 16, 70], dtype=torch.bfloat16, **drawn)
    case.options.update(rule)
    output = run(case, backend)
    assert_attention_close(output, oracle(case))
    with pytest.raises(AssertionError):
        assert_attention_close(output, oracle(case, **change))


def test_unknown_backends_are_refused_by_name():
    case = make_case([5])
    with pytest.raises(ValueError, match=r"no backend 'tritn'; use one of \('auto', .*'reference'"):
        decode_attention(*case.decode_arguments, backend="tritn")


def test_shapes_that_do_not_fit_are_refused():
    case = make_case([5, 6], group=2)
    _, cache, sequences, variant = case.decode_arguments
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        decode_attention(case.query[:, :3], cache, sequences, variant)
    with pytest.raises(ValueError, match="one row for each of the 2 queries"):
        decode_attention(case.query, cache, sequences._replace(block_tables=case.block_tables[:1]), variant)
