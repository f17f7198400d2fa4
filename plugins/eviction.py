"""The built-in eviction policies."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from paged_backend.checks import checked_flag, checked_number
from paged_backend.hookspecs import hookimpl
from paged_backend.policies import CachedBlock, EvictionPolicy, KeyedEviction, LazyHeap

# More changes of age than this are not remembered.
MANY_AGES = 1024
# For each block, this many that were dropped.
REMEMBERED = 4


class Lru(KeyedEviction):
    """Drops the block that went unused first; of those that one request leaves, the last. O(log n).

    spares_awaited: see EvictionPolicy.
    """

    def __init__(self, spares_awaited: bool = True) -> None:
        self.spares_awaited = checked_flag("spares_awaited", spares_awaited)

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
    having been reused; the least recently used ones beyond that stand with the rest. Few by default: most of what is
    reused is not on offer, for something hangs on it.
    """

    def __init__(self, protected: float = 0.2) -> None:
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

    ``age`` is the value of the block that was dropped last when this one was used last, so that what was popular once
    grows old (Cherkasova, HPL-98-69). Every block costs the same here: weighing blocks by their depth keeps what is
    seldom reached.
    """

    def __init__(self) -> None:
        # When the age rose to what, ascending; a block may be offered long after its last use, once its children went.
        self._times = [-math.inf]
        self._ages = [0]
        self._latest_use = -math.inf

    def key(self, block: CachedBlock) -> tuple[int, float, int]:
        self._latest_use = max(self._latest_use, block.last_used)
        age = self._ages[max(0, bisect_left(self._times, block.last_used) - 1)]
        return (age + block.hits + 1, block.last_used, -block.depth)

    def evict(self) -> int:
        first = self._blocks.first()
        if first is not None and first[0][0] > self._ages[-1]:
            self._ages.append(first[0][0])
            self._times.append(self._latest_use)
            if len(self._times) > MANY_AGES:
                del self._times[: MANY_AGES // 2], self._ages[: MANY_AGES // 2]
        return super().evict()


class Arc(EvictionPolicy):
    """Adaptive replacement: blocks seen once and blocks seen again, in shares that mistakes correct. O(log n).

    Remembers the contents of what it dropped lately. When such contents are computed again, dropping them was a
    mistake: they count as seen again, and the side that they were dropped from gets a larger share (Megiddo and Modha,
    FAST 2003). The least recently used of the side that is above its share goes first. Sides are compared by the blocks
    on offer, for those that others hang on are not shown. Four times as many dropped blocks are remembered as there are
    blocks, a few hundred bytes for each: prefixes come back later than a memory of their own size lasts.
    """

    def __init__(self) -> None:
        self._once: LazyHeap[CachedBlock] = LazyHeap()
        self._again: LazyHeap[CachedBlock] = LazyHeap()
        # Contents that were dropped from either side, the oldest first.
        self._gone_once: OrderedDict[int, None] = OrderedDict()
        self._gone_again: OrderedDict[int, None] = OrderedDict()
        self._num_blocks = 1
        # The share of blocks that were seen once; half of each until mistakes tell.
        self._share_once = 0.5
        self._evicted: CachedBlock | None = None

    def add(self, block: CachedBlock) -> None:
        self._num_blocks = max(self._num_blocks, block.id + 1)
        side = self._again if self._was_seen(block) else self._once
        side.push(block.id, (block.last_used, -block.depth), block)

    def remove(self, block: CachedBlock) -> None:
        if self._evicted is not None and block.id == self._evicted.id:
            gone = self._gone_once if block.id in self._once else self._gone_again
            gone[self._evicted.contents] = None
            self._evicted = None
            if len(self._gone_once) + len(self._gone_again) > REMEMBERED * self._num_blocks:
                longer = max(self._gone_once, self._gone_again, key=len)
                longer.popitem(last=False)
        self._once.discard(block.id)
        self._again.discard(block.id)

    def evict(self) -> int:
        above = len(self._once) > self._share_once * (len(self._once) + len(self._again))
        first = (self._once.first() if above else None) or self._again.first() or self._once.first()
        if first is None:
            raise LookupError("no block is on offer")
        self._evicted = first[1]
        return first[1].id

    def _was_seen(self, block: CachedBlock) -> bool:
        """Whether this is not the first use of these contents; learns from what was dropped too early."""
        once, again = len(self._gone_once), len(self._gone_again)
        if block.contents in self._gone_once:
            del self._gone_once[block.contents]
            self._share_once = min(1.0, self._share_once + max(1.0, again / once) / self._num_blocks)
            return True
        if block.contents in self._gone_again:
            del self._gone_again[block.contents]
            self._share_once = max(0.0, self._share_once - max(1.0, once / again) / self._num_blocks)
            return True
        return block.hits > 0


@hookimpl
def register_evictions(register: Callable[[str, Any], None]) -> None:
    """Offer the policies of this module."""
    register("lru", Lru)
    register("fifo", Fifo)
    register("slru", Slru)
    register("gdsf", Gdsf)
    register("arc", Arc)
