"""Prefill and decode on whatever hypothesis draws: shapes, lengths, rules and dtypes together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import assert_attention_close, make_case, oracle

from paged_backend.kernels import decode_attention, prefill_attention
from paged_backend.kernels.triton import support as triton_support

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BACKENDS = ["triton"] if triton_support.interpreted else ["reference", "cpu"]
# A kernel takes a hundred times as long in the interpreter, which long contexts meet in cases chosen for them.
FEW, MANY = (6 if triton_support.interpreted else 12), 40
many_more = pytest.mark.skipif(triton_support.interpreted, reason="each would take seconds in the interpreter")
# One fixture serves all examples: it poisons memory, and keeps nothing between them.
DRAWN = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

OPTIONS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 5, 16, 24, 64]),
        "group": st.sampled_from([1, 2, 3, 4, 7, 8]),
        "num_kv_heads": st.integers(1, 2),
        "key_dim": st.sampled_from([8, 16, 20, 64]),
        "value_dim": st.sampled_from([8, 16, 20, 64]),
        "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        "sinks": st.booleans(),
        "seed": st.integers(0, 1000),
    },
    optional={
        "softcap": st.sampled_from([1.0, 30.0]),
        "cache_dtype": st.sampled_from([torch.int8, torch.float8_e4m3fn]),
    },
)
RULES = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"window": st.integers(1, 80)}),
    st.fixed_dictionaries({"chunk": st.integers(1, 80)}),
)


def check_decode(lengths: list[int], options: dict[str, Any]) -> None:
    case = make_case(lengths, **options)
    expected = oracle(case)
    for backend in BACKENDS:
        assert_attention_close(decode_attention(*case.decode_arguments, backend=backend), expected)


def check_prefill(lengths: list[tuple[int, int]], options: dict[str, Any]) -> None:
    case = make_case([before + new for before, new in lengths], [new for _, new in lengths], **options)
    expected = oracle(case)
    for backend in BACKENDS:
        assert_attention_close(prefill_attention(*case.prefill_arguments, backend=backend), expected)


@settings(DRAWN, max_examples=FEW)
@given(lengths=st.lists(st.integers(0, 150), min_size=1, max_size=4), options=OPTIONS, rule=RULES)
def test_decode_matches_the_oracle(lengths, options, rule):
    check_decode(lengths, options | rule)


@settings(DRAWN, max_examples=FEW)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
    options=OPTIONS,
    rule=RULES,
)
def test_prefill_matches_the_oracle(lengths, options, rule):
    check_prefill(lengths, options | rule)


@pytest.mark.slow
@many_more
@settings(DRAWN, max_examples=MANY)
@given(lengths=st.lists(st.integers(0, 700), min_size=1, max_size=6), options=OPTIONS, rule=RULES)
def test_decode_matches_the_oracle_on_many_more(lengths, options, rule):
    check_decode(lengths, options | rule)


@pytest.mark.slow
@many_more
@settings(DRAWN, max_examples=MANY)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 100)), min_size=1, max_size=4),
    options=OPTIONS,
    rule=RULES,
)
def test_prefill_matches_the_oracle_on_many_more(lengths, options, rule):
    check_prefill(lengths, options | rule)
