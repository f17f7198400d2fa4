"""LazyHeap: items in ascending order of a key, with removal from anywhere."""

from __future__ import annotations

import heapq
from collections.abc import Generator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

# A heap with more removed entries than this, and more than half of it, is rebuilt.
_MANY = 64


class LazyHeap(Generic[Item]):
    """A priority queue of items that have an int id; equal keys come in the order of their ids.

    ``push``, ``discard`` and ``first`` cost O(log n) amortised: a removed entry stays until it comes to the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, int, Item]] = []
        self._tickets: dict[int, int] = {}
        self._last_ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, id: int) -> bool:
        return id in self._tickets

    def push(self, id: int, key: Any, item: Item) -> None:
        """Add an item, or give it another key."""
        self._last_ticket += 1
        self._tickets[id] = self._last_ticket
        heapq.heappush(self._heap, (key, id, self._last_ticket, item))

    def discard(self, id: int) -> None:
        """Remove the item, if it is there."""
        self._tickets.pop(id, None)
        if len(self._heap) > 2 * len(self._tickets) + _MANY:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def first(self) -> tuple[Any, Item] | None:
        """The smallest key and its item, or None when empty."""
        while self._heap:
            if self._is_live(self._heap[0]):
                return self._heap[0][0], self._heap[0][3]
            heapq.heappop(self._heap)
        return None

    def ascending(self) -> Generator[Item]:
        """All items, smallest key first, O(log n) each and only as far as they are asked for.

        Items may be added and discarded meanwhile; a discarded one is no longer offered.
        """
        popped = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._is_live(entry):
                    popped.append(entry)
                    yield entry[3]
        finally:
            for entry in popped:
                if self._is_live(entry):
                    heapq.heappush(self._heap, entry)

    def _is_live(self, entry: tuple[Any, int, int, Item]) -> bool:
        return self._tickets.get(entry[1]) == entry[2]
