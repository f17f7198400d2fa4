"""What it means that all blocks are back."""

from __future__ import annotations

from typing import Any

from paged_backend.memory.block_manager import BlockManager


def assert_all_blocks_are_back(engine: Any) -> None:
    """Nothing waits, runs or holds a block of an engine, or of a scheduler at work without a model."""
    assert not engine.scheduler.has_work()
    assert_all_available(engine.blocks)


def assert_all_available(blocks: BlockManager) -> None:
    """The books agree, and each block could be given out."""
    blocks.check_integrity()
    assert [pool.num_available for pool in blocks.pools] == [pool.num_blocks for pool in blocks.pools]
