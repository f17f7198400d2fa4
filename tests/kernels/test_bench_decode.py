"""The benchmark of decode: how many bytes a kernel has to read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
from bench_decode import bytes_read
from measure import Shape

# Of keys and of values, 3 sequences of 10 tokens in 2 heads.
ROWS = 2 * 3 * 10 * 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ROWS * 8 * 2),
        ({"dtype": torch.float32}, ROWS * 8 * 4),
        ({"cache_dtype": torch.int8}, ROWS * (8 + 4)),
        ({"window": 4}, ROWS * 8 * 2 * 4 // 10),
        ({"window": 40}, ROWS * 8 * 2),
    ],
    ids=str,
)
def test_keys_and_values_that_are_seen_are_read_once_with_their_scales(changes, expected):
    assert bytes_read(Shape(3, 10, num_heads=4, num_kv_heads=2, head_dim=8, **changes)) == expected
