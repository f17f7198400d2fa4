"""The comparison with padded generate: how much of two answers is the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
from bench_generate import agreement


@pytest.mark.parametrize(
    ("some", "others", "share"),
    [
        ([[1, 2, 3, 4]], [[1, 2, 3, 4]], 1.0),
        ([[1, 2, 3, 4]], [[1, 2, 9, 4]], 0.5),
        ([[1, 2, 3, 4]], [[9, 2, 3, 4]], 0.0),
        # A short request counts as much as a long one.
        ([[1], [1, 2, 3, 4]], [[1], [9, 2, 3, 4]], 0.5),
    ],
)
def test_what_agrees_ends_at_the_first_other_token_of_each_request(some, others, share):
    assert agreement(some, others) == share


def test_answers_of_other_lengths_are_no_answers_to_the_same_requests():
    with pytest.raises(ValueError, match="zip"):
        agreement([[1, 2]], [[1]])
