"""Belady: the eviction that knows what comes, which no engine can."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from paged_backend.lab.trace import TraceRequest
from paged_backend.memory.prefix_tree import prefix_contents
from paged_backend.policies import CachedBlock, KeyedEviction


class Belady(KeyedEviction):
    """Drops the block whose contents are asked for furthest in the future (Belady, IBM Systems Journal 5, 1966).

    The future are the requests of a trace that have not begun, in order of arrival: exact where requests begin in that
    order and memory is all that an order of eviction decides. A preempted request counts as begun.

    uses: orders of the requests that ask for contents, ascending, as ``uses_of`` tells. awaits: whether the request of
    an order has yet to begin.
    """

    # Who waits is a part of what it knows.
    spares_awaited = False

    def __init__(self, uses: Mapping[int, Sequence[int]], awaits: Callable[[int], bool]) -> None:
        self._uses = uses
        self._left: dict[int, deque[int]] = {}
        self._awaits = awaits

    def key(self, block: CachedBlock) -> tuple[float, int]:
        """The next use, the furthest first, and of one request its end first."""
        # Whoever asks for a block that is on offer takes it off, so that its key holds for as long as it is there.
        return (-self._next_use(block.contents), -block.depth)

    def _next_use(self, contents: int) -> float:
        if contents not in self._uses:
            return math.inf
        left = self._left.setdefault(contents, deque(self._uses[contents]))
        while left and not self._awaits(left[0]):
            left.popleft()
        return next(filter(self._awaits, left), math.inf)


def uses_of(trace: Sequence[TraceRequest], block_size: int) -> dict[int, list[int]]:
    """By the contents of blocks, as ``CachedBlock.contents`` has them, which requests of ``trace`` ask for them.

    Contents that one request alone asks for are left out: they are never found again.
    """
    first: dict[int, int] = {}
    uses: dict[int, list[int]] = {}
    for order, request in enumerate(trace):
        # A prompt's last token is always computed, so that a block that ends with it is not asked for.
        for contents in prefix_contents(request.prompt, len(request.prompt) - 1, request.cache_salt, block_size):
            if contents in first:
                uses.setdefault(contents, [first[contents]]).append(order)
            else:
                first[contents] = order
    return uses
