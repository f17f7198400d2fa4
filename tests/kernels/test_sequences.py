"""Sequences: what a caller may leave out changes no answer, and entries behind a context are not followed."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle

from paged_backend.kernels import Sequences, decode_attention, prefill_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_tables_and_lengths_are_enough_for_decode(backend):
    case = make_case([5, 33])
    query, cache, _, variant = case.decode_arguments
    sequences = Sequences(case.block_tables, case.context_lens)
    assert_attention_close(decode_attention(query, cache, sequences, variant, backend=backend), oracle(case))


@pytest.mark.parametrize("longest", [None, 33, 40])
def test_decode_attends_alike_whether_the_longest_context_is_told_or_not(backend, longest):
    case = make_case([5, 33])
    query, cache, sequences, variant = case.decode_arguments
    sequences = sequences._replace(max_context_len=longest)
    assert_attention_close(decode_attention(query, cache, sequences, variant, backend=backend), oracle(case))


@pytest.mark.parametrize(("longest", "most"), [(None, None), (33, None), (None, 9), (33, 9), (40, 12)])
def test_prefill_attends_alike_whether_lengths_are_told_or_not(backend, longest, most):
    case = make_case([5, 33], [5, 9])
    query, cache, sequences, variant = case.prefill_arguments
    sequences = sequences._replace(max_context_len=longest, max_seqlen_q=most)
    assert_attention_close(prefill_attention(query, cache, sequences, variant, backend=backend), oracle(case))


def test_tables_may_be_rows_of_wider_ones(backend):
    case = make_case([5, 33])
    wider = torch.full((2, case.block_tables.shape[1] + 3), -1, dtype=torch.int32)
    wider[:, : case.block_tables.shape[1]] = case.block_tables
    query, cache, sequences, variant = case.decode_arguments
    sequences = sequences._replace(block_tables=wider[:, : case.block_tables.shape[1]])
    assert_attention_close(decode_attention(query, cache, sequences, variant, backend=backend), oracle(case))
