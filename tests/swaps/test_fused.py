"""What stands in for a module still answers for it."""

from __future__ import annotations

import pytest
from torch import nn

from paged_backend.swaps.fused import Fused


def test_attributes_and_weights_are_those_of_the_original():
    original = nn.Linear(2, 3)
    original.note = "kept"
    fused = Fused(original)
    assert fused.note == "kept"
    assert fused.weight is original.weight
    assert fused.in_features == 2
    assert list(fused.parameters()) == list(original.parameters())


def test_what_neither_has_is_missing_by_the_originals_name():
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'nothing'"):
        _ = Fused(nn.Linear(2, 3)).nothing


def test_it_takes_any_number_of_tokens_and_no_memory_unless_it_says_so():
    fused = Fused(nn.Identity())
    assert fused.most_rows == float("inf")
    assert fused.num_bytes == 0
