"""Blocks with one id hold the same tokens, and a slice holds what its tokens are one by one."""

from __future__ import annotations

import pytest

from paged_backend.lab.block_tokens import SPAN, BlockTokens


def test_equal_ids_mean_equal_tokens_and_other_ids_share_none():
    first, second = BlockTokens([7, 3], 2 * SPAN), BlockTokens([7, 4], 2 * SPAN)
    assert first[:SPAN] == second[:SPAN]
    assert not set(first[SPAN:]) & set(second)


def test_the_last_block_may_be_filled_in_part():
    tokens = BlockTokens([2, 9], SPAN + 3)
    assert len(tokens) == SPAN + 3
    assert list(tokens[SPAN:]) == [9 * SPAN, 9 * SPAN + 1, 9 * SPAN + 2]


@pytest.mark.parametrize(
    "part", [slice(None), slice(5, 9), slice(SPAN - 2, SPAN + 2), slice(-4, None), slice(8, 2), slice(1, 1100, 300)]
)
def test_a_slice_holds_the_tokens_at_its_places(part: slice):
    tokens = BlockTokens([5, 0, 8], 2 * SPAN + 100)
    assert list(tokens[part]) == [tokens[i] for i in range(len(tokens))[part]]


def test_an_empty_prompt_has_an_empty_slice():
    assert list(BlockTokens([], 0)[:]) == []


def test_a_negative_index_counts_from_the_end():
    tokens = BlockTokens([4], 10)
    assert (tokens[-1], tokens[-10]) == (4 * SPAN + 9, 4 * SPAN)


@pytest.mark.parametrize("index", [10, -11])
def test_an_index_outside_raises_as_a_list_does(index: int):
    with pytest.raises(IndexError, match="no such token"):
        BlockTokens([4], 10)[index]
