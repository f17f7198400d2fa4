"""Reading mask rules off transformers' mask functions, and position limits off the look-ups of a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    padding_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from paged_backend.kernels import FULL, MaskRule
from paged_backend.model.layer_probe import PROBE_NAME, Unprovable, read_mask_rule
from paged_backend.model.position_limit import PositionTables

Mask = Callable[..., torch.Tensor]
CPU = torch.device("cpu")


def chunked(size: int) -> Mask:
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))


def test_a_causal_mask_is_full() -> None:
    assert read_mask_rule(causal_mask_function, CPU) == FULL


@pytest.mark.parametrize("size", [1, 2, 8, 4096, 131072, 1 << 20])
def test_the_size_of_a_window_is_read(size: int) -> None:
    assert read_mask_rule(sliding_window_causal_mask_function(size), CPU) == MaskRule("window", size)


@pytest.mark.parametrize("size", [2, 3, 8, 8192, 131072])
def test_the_size_of_a_chunk_is_read(size: int) -> None:
    assert read_mask_rule(chunked(size), CPU) == MaskRule("chunk", size)


def seen_by_all(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key < 4) & (query >= 0)


@pytest.mark.parametrize(
    "mask",
    [
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(8),
        # Streaming attention keeps the first tokens besides the window; a prefix attends in both directions.
        and_masks(causal_mask_function, or_masks(sliding_window_causal_mask_function(8), seen_by_all)),
        or_masks(causal_mask_function, seen_by_all),
        and_masks(sliding_window_causal_mask_function(8), chunked(12)),
        and_masks(causal_mask_function, lambda batch, head, query, key: (query - key) % 2 == 0),
        lambda batch, head, query, key: (query + key) < 0,
    ],
)
def test_any_other_mask_is_refused(mask: Mask) -> None:
    with pytest.raises(Unprovable, match="neither causal, a causal window nor a causal chunk"):
        read_mask_rule(mask, CPU)


def test_a_mask_that_reads_data_is_refused() -> None:
    padded = and_masks(causal_mask_function, padding_mask_function(torch.ones(1, 16, dtype=torch.bool)))
    with pytest.raises(Unprovable, match="depends on more than positions"):
        read_mask_rule(padded, CPU)


def test_the_probe_serves_no_model_that_was_loaded_with_it() -> None:
    attention = AttentionInterface()[PROBE_NAME]
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match=r"attn_implementation='paged_backend_probe'"):
        attention(torch.nn.Identity(), heads, heads, heads)


POSITIONS = torch.arange(3, 11)
TABLE = torch.zeros(100, 4)


@pytest.mark.parametrize(
    ("look_up", "limit"),
    [
        (lambda: F.embedding(POSITIONS, TABLE), 100),
        (lambda: F.embedding(POSITIONS[None] + 2, TABLE), 98),
        (lambda: torch.nn.Embedding(64, 4)(POSITIONS), 64),
        (lambda: torch.embedding(TABLE, POSITIONS), 100),
        (lambda: TABLE[POSITIONS], 100),
        (lambda: TABLE.t()[:, POSITIONS], 100),
        (lambda: TABLE[None].repeat(1, 1, 1)[0, POSITIONS], 100),
        (lambda: TABLE.index_select(0, POSITIONS), 100),
        (lambda: torch.gather(TABLE, 0, POSITIONS[:, None].repeat(1, 4)), 100),
        (lambda: (TABLE[POSITIONS], torch.zeros(50, 4)[POSITIONS]), 50),
        # Indices over the tokens of the batch, and tokens themselves, are no positions.
        (lambda: TABLE[torch.arange(8)], None),
        (lambda: TABLE[torch.tensor([3, 4, 5, 6, 7, 8, 9, 12])], None),
        (lambda: TABLE[torch.arange(8).repeat(2)], None),
        (lambda: TABLE[3:11], None),
    ],
)
def test_tables_read_at_the_positions_are_noticed(look_up: Callable[[], Any], limit: int | None) -> None:
    with PositionTables(POSITIONS) as tables:
        look_up()
    assert tables.limit == limit
