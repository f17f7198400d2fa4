"""How many blocks a sequence holds at most, by what its layers see."""

from __future__ import annotations

import pytest

from paged_backend.kernels import FULL, MaskRule
from paged_backend.memory.kv_group import KVGroup


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (100, 25)])
def test_full_attention_holds_every_block(num_tokens: int, num_blocks: int):
    assert KVGroup(FULL, (0,), 1).blocks_for(num_tokens, 4, chunk=16) == num_blocks


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_layers_with_a_limit_hold_what_a_step_sees_and_a_cut_block(kind: str):
    group = KVGroup(MaskRule(kind, 8), (0,), 1)
    assert group.blocks_for(1000, 4, chunk=6) == 4 + 1


def test_a_sequence_shorter_than_its_window_holds_only_its_own_blocks():
    assert KVGroup(MaskRule("window", 64), (0,), 1).blocks_for(9, 4, chunk=16) == 3


def test_longer_chunks_take_more_blocks_at_once():
    group = KVGroup(MaskRule("window", 8), (0,), 1)
    assert group.blocks_for(1000, 4, chunk=1) < group.blocks_for(1000, 4, chunk=32)
