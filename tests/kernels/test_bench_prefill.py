"""The benchmark of prefill: how many operations the pairs of a query and a key that it sees take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
from bench_prefill import operations
from measure import Shape


@pytest.mark.parametrize(
    ("query_len", "window", "pairs"),
    [(4, None, 1 + 2 + 3 + 4), (2, None, 3 + 4), (1, None, 4), (4, 2, 1 + 2 + 2 + 2), (4, 9, 1 + 2 + 3 + 4)],
)
def test_a_pair_takes_a_multiplication_and_an_addition_in_each_of_two_products(query_len, window, pairs):
    shape = Shape(3, 4, query_len, num_heads=4, num_kv_heads=2, head_dim=8, window=window)
    assert operations(shape) == 2 * 2 * 3 * 4 * 8 * pairs
