"""How many blocks a byte budget, or a set of lengths, comes to."""

from __future__ import annotations

import re

import pytest
import torch

from paged_backend import EngineConfig
from paged_backend.errors import ConfigError
from paged_backend.kernels import FULL, MaskRule
from paged_backend.memory.cache_sizing import (
    DEFAULT_BUDGET,
    MAX_BLOCKS,
    blocks_for_budget,
    blocks_for_config,
    blocks_for_lengths,
    budget_bytes,
    memory_of,
)
from paged_backend.memory.kv_cache import LayerSpec
from paged_backend.memory.kv_group import KVGroup

CPU = torch.device("cpu")
WINDOW = MaskRule("window", 64)
GROUPS = [KVGroup(FULL, (0, 2), 200), KVGroup(WINDOW, (1,), 100)]


def layer(rule: MaskRule, dtype: torch.dtype = torch.float32) -> LayerSpec:
    return LayerSpec("layer", 4, 2, 16, 8, dtype, CPU, rule)


def test_lengths_are_added_up_with_a_block_to_spare_each():
    assert blocks_for_lengths(GROUPS, 16, 32, [100, 1000]) == [7 + 63 + 2, 7 + 7 + 2]


def test_budget_is_shared_so_that_groups_run_out_together_and_is_not_exceeded():
    budget = 2**20
    counts = blocks_for_budget(GROUPS, 16, 32, budget, 2048)
    spent = sum(count * 16 * group.bytes_per_token for count, group in zip(counts, GROUPS, strict=True))
    assert 0.95 * budget < spent <= budget
    sequences = [count / group.blocks_for(2048, 16, 32) for count, group in zip(counts, GROUPS, strict=True)]
    assert sequences[0] == pytest.approx(sequences[1], rel=0.2)


def test_budget_for_less_than_a_block_says_what_is_needed():
    with pytest.raises(ConfigError, match="100 bytes does not hold one block of 16 tokens"):
        blocks_for_budget(GROUPS, 16, 32, 100, 2048)


def test_default_budget_is_what_the_requests_need_up_to_a_limit():
    assert budget_bytes(None, GROUPS, 4, 100, CPU) == 4 * 100 * 300
    assert budget_bytes(None, GROUPS, 256, 10**6, CPU) == DEFAULT_BUDGET


def blocks(block_size: int = 16, max_len: int = 2048, **options) -> list[int]:
    return blocks_for_config(EngineConfig(**options), GROUPS, block_size, max_len, [CPU])


def test_budget_beyond_the_memory_is_refused_with_what_there_is():
    memory = memory_of([CPU])
    assert memory is not None
    with pytest.raises(ConfigError, match=f"'100TiB' is 109,951,162,777,600 bytes, and cpu has {memory:,} bytes"):
        blocks(kv_cache_memory="100TiB")
    assert max(blocks(kv_cache_memory=memory, block_size=4096, max_num_seqs=2)) > 0


def test_budget_of_more_blocks_than_can_be_counted_is_refused_with_the_most_that_may_be_given():
    with pytest.raises(ConfigError, match=r"at most 4,194,304 can be managed; give at most ([\d,]+) bytes") as caught:
        blocks(block_size=1, kv_cache_memory="2GiB")
    most = int(re.search(r"at most ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))
    assert 0.99 * MAX_BLOCKS < max(blocks(block_size=1, kv_cache_memory=most)) <= MAX_BLOCKS


def test_default_budget_holds_a_block_however_large_and_no_more_than_can_be_counted_however_small():
    assert blocks(block_size=4096, max_len=4, max_num_seqs=1) == [1, 1]
    assert max(blocks(block_size=1, max_len=2**31 - 1, max_num_seqs=16384)) == MAX_BLOCKS
