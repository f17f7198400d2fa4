"""The built-in eviction policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_backend.hookspecs import hookimpl
from paged_backend.policies import CachedBlock, EvictionPolicy


class Lru(EvictionPolicy):
    """Drops the block that went unused first.

    The engine frees a request's blocks tail first, so the end of a prefix goes before its beginning. O(1).
    """

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def add(self, block: CachedBlock, now: float) -> None:
        self._blocks[block.id] = None

    def remove(self, block: CachedBlock) -> None:
        del self._blocks[block.id]

    def evict(self) -> int:
        return next(iter(self._blocks))


@hookimpl
def register_evictions(register: Callable[[str, Any], None]) -> None:
    """Offer the policies of this module."""
    register("lru", Lru)
