"""MaskRule: one rule says who sees whom, by position and by tensor alike."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels import FULL, MaskRule


@pytest.mark.parametrize("rule", [FULL, MaskRule("window", 3), MaskRule("chunk", 4)], ids=str)
def test_what_is_visible_begins_at_the_first_visible_position_and_ends_at_the_query(rule):
    positions = torch.arange(13)
    seen = rule.visible(positions[:, None], positions)
    for position in range(13):
        assert seen[position].nonzero()[:, 0].tolist() == list(range(rule.first_visible(position), position + 1))


def test_a_window_slides_and_a_chunk_jumps():
    assert [MaskRule("window", 3).first_visible(position) for position in range(6)] == [0, 0, 0, 1, 2, 3]
    assert [MaskRule("chunk", 3).first_visible(position) for position in range(6)] == [0, 0, 0, 3, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("window", 0), "a window must be of at least 1 token, got 0"),
        (("chunk", -1), "a chunk must be of at least 1 token, got -1"),
        (("full", 3), "full attention has no size, got 3"),
        (("causal", 0), "'full', 'window' or 'chunk', got 'causal'"),
    ],
)
def test_what_is_no_rule_is_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        MaskRule(*arguments)
