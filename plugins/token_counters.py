"""TokenCounters: what each client received, and who of those that wait received least."""

from __future__ import annotations

from collections.abc import Mapping

from paged_backend.policies import LazyHeap

# Clients that do not wait are forgotten beyond this many, if a return would lift their counters anyway.
MANY_CLIENTS = 1024


class _Client:
    """A client's counter; its number orders clients with equal counters by when they were first seen."""

    __slots__ = ("counter", "name", "number", "weight")

    def __init__(self, name: str | None, number: int, weight: float) -> None:
        self.name = name
        self.number = number
        self.weight = weight
        self.counter = 0.0


class TokenCounters:
    """The virtual counters of VTC (arXiv:2401.00588): service received, divided by the client's weight.

    A client that comes back is lifted to the smallest counter of those that wait, or of the one that left last if
    nobody waits, so idleness earns no credit. Every call costs O(log n) amortised in the number of clients.
    """

    def __init__(self, weights: Mapping[str | None, float]) -> None:
        self._weights = weights
        self._clients: dict[str | None, _Client] = {}
        # Those that wait, by a counter that may have grown since.
        self._waiting: LazyHeap[_Client] = LazyHeap()
        self._last_to_leave = _Client(None, 0, 1.0)
        self._num_seen = 0

    def __len__(self) -> int:
        return len(self._clients)

    def charge(self, name: str | None, cost: float) -> None:
        """The client received service."""
        client = self._client(name)
        client.counter += cost / client.weight

    def join(self, name: str | None) -> None:
        """The client begins to wait."""
        client = self._client(name)
        client.counter = max(client.counter, self._floor())
        self._waiting.push(client.number, client.counter, client)

    def leave(self, name: str | None) -> None:
        """The client no longer waits."""
        self._last_to_leave = self._client(name)
        self._waiting.discard(self._last_to_leave.number)

    def least_served(self) -> str | None:
        """The client with the smallest counter of those that wait, of which there must be one."""
        return self._least_served().name

    def _least_served(self) -> _Client:
        while (first := self._waiting.first()) is not None:
            counter, client = first
            if counter == client.counter:
                return client
            self._waiting.push(client.number, client.counter, client)
        raise LookupError("nobody waits")

    def _floor(self) -> float:
        return (self._least_served() if self._waiting else self._last_to_leave).counter

    def _client(self, name: str | None) -> _Client:
        if name not in self._clients:
            if len(self._clients) > MANY_CLIENTS + 2 * len(self._waiting):
                floor, waiting = self._floor(), self._waiting
                self._clients = {n: c for n, c in self._clients.items() if c.number in waiting or c.counter > floor}
            self._num_seen += 1
            self._clients[name] = _Client(name, self._num_seen, self._weights.get(name, 1.0))
        return self._clients[name]
