"""What a plugin implements: who goes first, who gives up memory, what leaves the cache, how big a block is."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paged_backend.request import Request


class SchedulingPolicy(ABC):
    """Owns the order of the waiting requests; the engine decides how much fits and checks every answer.

    Requests are read, never changed, by a policy. Times are seconds of the engine's clock. Ten thousand waiting
    requests are normal: ``add`` and ``remove`` should cost O(log n), ``candidates`` should be lazy.

    lookahead: how many requests that do not fit may be passed over for one behind them in a step; each passing counts
    in ``Request.overtaken``. 0 means that whoever is first blocks the rest until it fits.
    """

    lookahead: int = 8

    @abstractmethod
    def add(self, request: Request, now: float) -> None:
        """``request`` waits from now on: it is new, or was preempted (``request.num_preemptions`` is above 0)."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """``request`` no longer waits: admitted, aborted or timed out."""

    @abstractmethod
    def candidates(self, now: float) -> Iterator[Request]:
        """The waiting requests, best first. The engine takes what fits and may stop at any point.

        The engine calls ``remove`` for an admitted request only after it is done iterating.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many requests wait."""

    def rank_prefills(self, prefilling: Sequence[Request], now: float) -> Sequence[Request]:
        """Who among half-prefilled requests gets the step's token budget first. Default: in order of admission."""
        return prefilling

    def victim(self, running: Sequence[Request], now: float) -> Request:
        """Who of ``running`` (in order of admission) gives up its blocks when memory runs out. Default: the newest."""
        return running[-1]

    def preempts(self, candidate: Request, running: Sequence[Request], now: float) -> Request | None:
        """A running request to set aside so that ``candidate`` can run though seats or blocks are taken, or None."""
        return None

    def on_tokens(self, request: Request, num_tokens: int, now: float) -> None:  # noqa: B027
        """``request`` was served ``num_tokens`` (prompt tokens computed, or one generated): for fairness."""


class KeyedPolicy(SchedulingPolicy):
    """Orders waiting requests by a key that is fixed while a request waits; a heap with lazy deletion.

    A policy is ten lines: return the key. Ties go to the earlier arrival. A preempted request keeps its arrival
    order, so it comes back ahead of later arrivals with an equal key.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, int, Request]] = []
        self._tickets: dict[int, int] = {}
        self._ticket = 0

    @abstractmethod
    def key(self, request: Request) -> Any:
        """What to sort by, smallest first; must not change while the request waits."""

    def add(self, request: Request, now: float) -> None:
        self._ticket += 1
        self._tickets[request.order] = self._ticket
        heapq.heappush(self._heap, (self.key(request), request.order, self._ticket, request))

    def remove(self, request: Request) -> None:
        self._tickets.pop(request.order, None)

    def candidates(self, now: float) -> Iterator[Request]:
        popped = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                request = entry[3]
                if self._tickets.get(request.order) != entry[2]:
                    continue
                popped.append(entry)
                yield request
        finally:
            for entry in popped:
                heapq.heappush(self._heap, entry)

    def __len__(self) -> int:
        return len(self._tickets)


@dataclass(slots=True)
class CachedBlock:
    """A block that no request uses but whose contents may be reused.

    id: the block's number, unique within its policy. depth: full blocks before it in its prefix. hits: how often
    its contents were reused. last_used: seconds. priority: that of the request that used it last.
    """

    id: int
    depth: int
    hits: int
    last_used: float
    priority: int = 0


class EvictionPolicy(ABC):
    """Owns the order of the cached blocks that no request uses; one object per KV group. Every call is per block,
    so it should cost O(1) or O(log n).

    The engine adds the blocks of a freed request tail first, and refuses to drop a block before its descendants.
    """

    @abstractmethod
    def add(self, block: CachedBlock, now: float) -> None:
        """The block's last user left."""

    @abstractmethod
    def remove(self, block: CachedBlock) -> None:
        """The block is in use again, or gone."""

    @abstractmethod
    def evict(self) -> int:
        """The id of the block to drop next. The engine answers with ``remove`` once it is gone."""


@dataclass(frozen=True)
class ModelShape:
    """What a block-size rule may want to know. num_layers counts attention layers; dims are those of the first."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    max_positions: int | None = None


BlockSizeRule = Callable[[ModelShape, torch.device], int]
