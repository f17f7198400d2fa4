"""The built-in eviction policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_backend.checks import checked_number
from paged_backend.hookspecs import hookimpl
from paged_backend.policies import CachedBlock, EvictionPolicy, KeyedEviction, LazyHeap


class Lru(KeyedEviction):
    """Drops the block that went unused first; of those that one request leaves, the last. O(log n)."""

    def key(self, block: CachedBlock) -> tuple[float, int]:
        return (block.last_used, -block.depth)


class Fifo(KeyedEviction):
    """Drops the block that was computed first, however often it is reused since. O(log n)."""

    def key(self, block: CachedBlock) -> int:
        return block.created


class Slru(EvictionPolicy):
    """Segmented LRU: blocks that were never reused go before those that were, least recently used first. O(log n).

    A scan of prompts that come once cannot push out what is reused (Karedla et al., 1994). So that blocks which were
    popular once do not stay for ever, at most ``protected``, a share from 0 to 1, of the blocks on offer are spared for
    having been reused; the least recently used ones beyond that stand with the rest.
    """

    def __init__(self, protected: float = 0.8) -> None:
        self.protected = checked_number("protected", protected, 0, 1)
        self._probation: LazyHeap[CachedBlock] = LazyHeap()
        self._protected: LazyHeap[CachedBlock] = LazyHeap()

    def add(self, block: CachedBlock) -> None:
        segment = self._protected if block.hits else self._probation
        segment.push(block.id, (block.last_used, -block.depth), block)

    def remove(self, block: CachedBlock) -> None:
        self._probation.discard(block.id)
        self._protected.discard(block.id)

    def evict(self) -> int:
        most = self.protected * (len(self._protected) + len(self._probation))
        while len(self._protected) > most and (oldest := self._protected.first()) is not None:
            key, block = oldest
            self._protected.discard(block.id)
            self._probation.push(block.id, key, block)
        first = self._probation.first() or self._protected.first()
        if first is None:
            raise LookupError("no block is on offer")
        return first[1].id


class Gdsf(KeyedEviction):
    """Greedy dual size frequency with flat cost: drops the block with the least ``age + uses``. O(log n).

    ``age`` is the value of the block that was dropped last, so that what was popular once grows old (Cherkasova,
    HPL-98-69). Every block costs the same here: weighing blocks by their depth keeps what is seldom reached.
    """

    def __init__(self) -> None:
        self._age = 0

    def key(self, block: CachedBlock) -> tuple[int, float, int]:
        return (self._age + block.hits + 1, block.last_used, -block.depth)

    def evict(self) -> int:
        first = self._blocks.first()
        if first is not None:
            self._age = first[0][0]
        return super().evict()


@hookimpl
def register_evictions(register: Callable[[str, Any], None]) -> None:
    """Offer the policies of this module."""
    register("lru", Lru)
    register("fifo", Fifo)
    register("slru", Slru)
    register("gdsf", Gdsf)
