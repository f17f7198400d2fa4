"""Fair shares of service between clients: virtual token counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paged_backend.errors import ConfigError
from paged_backend.plugins.victims import ChoosesVictim, VictimRule
from paged_backend.policies import LazyHeap, RequestView

# Clients that do not wait are forgotten beyond this many, if a return would lift their counters anyway.
MANY_CLIENTS = 1024


class _Client:
    """What a client received, divided by its weight, and its waiting requests by arrival."""

    def __init__(self, number: int, weight: float) -> None:
        self.number = number
        self.weight = weight
        self.counter = 0.0
        self.queue: LazyHeap[RequestView] = LazyHeap()

    def charge(self, cost: float) -> None:
        self.counter += cost / self.weight


class Fair(ChoosesVictim):
    """The client that was served least goes first; first come, first served for each (VTC, arXiv:2401.00588).

    A client's counter grows by ``prompt_cost`` for each prompt token when a request of it first starts and by
    ``output_cost`` for each token generated, both divided by the client's weight. One that comes back is lifted to the
    smallest counter of those that wait (of the one that left last, if nobody waits), so idleness earns no credit.

    Guarantee: between two clients that both have requests waiting all the time, the service received over any such
    time, divided by their weights, differs by at most ``2 * U``, with ``U = (prompt_cost * L + output_cost * S * O) /
    w``: L the longest prompt, S ``max_num_seqs``, O the most output tokens of a request, w the smallest weight. For, a
    client only starts requests while its counter is smallest; until it is so again, its counter grows by that one
    prompt and by what its running requests generate. Whoever is first blocks the others until it fits.

    weights: shares of clients, 1 unless given.
    """

    lookahead = 0

    def __init__(
        self,
        weights: Mapping[str | None, float] | None = None,
        prompt_cost: float = 1.0,
        output_cost: float = 2.0,
        victim: str | VictimRule = "newest",
    ) -> None:
        super().__init__(victim)
        self.weights = dict(weights or {})
        if not all(weight > 0 for weight in self.weights.values()) or not min(prompt_cost, output_cost) >= 0:
            raise ConfigError(f"fair needs positive weights and costs of at least 0, got {weights!r}")
        self.prompt_cost = prompt_cost
        self.output_cost = output_cost
        self._clients: dict[str | None, _Client] = {}
        # Those that wait, by a counter that may have grown since.
        self._waiting: LazyHeap[_Client] = LazyHeap()
        self._last_to_leave = _Client(0, 1.0)
        self._num_seen = 0

    def add(self, request: RequestView, now: float) -> None:
        """O(log n)."""
        client = self._client(request)
        if not client.queue:
            client.counter = max(client.counter, self._floor())
            self._waiting.push(client.number, client.counter, client)
        client.queue.push(request.order, request.order, request)

    def remove(self, request: RequestView) -> None:
        """O(log n); charges for the prompt when the request starts for the first time."""
        client = self._client(request)
        if request.order not in client.queue:
            return
        client.queue.discard(request.order)
        if not request.is_waiting and request.num_preemptions == 0:
            client.charge(self.prompt_cost * request.num_prompt_tokens)
        if not client.queue:
            self._waiting.discard(client.number)
            self._last_to_leave = client

    def candidates(self, now: float) -> Iterator[RequestView]:
        """The earliest request of the client served least, as long as each one fits."""
        while self._waiting:
            request = next(self._least_served().queue.ascending())
            yield request
            if request.is_waiting:
                return
            self.remove(request)

    def __len__(self) -> int:
        return sum(len(client.queue) for client in self._waiting.ascending())

    def on_tokens(self, request: RequestView, num_tokens: int, now: float) -> None:
        """Charges for a generated token; computing again after a preemption is free."""
        if request.num_uncomputed_tokens == 0:
            self._client(request).charge(self.output_cost)

    def _client(self, request: RequestView) -> _Client:
        name = request.client_id
        if name not in self._clients:
            if len(self._clients) > MANY_CLIENTS + 2 * len(self._waiting):
                floor = self._floor()
                self._clients = {n: c for n, c in self._clients.items() if c.queue or c.counter > floor}
            self._num_seen += 1
            self._clients[name] = _Client(self._num_seen, self.weights.get(name, 1.0))
        return self._clients[name]

    def _least_served(self) -> _Client:
        while True:
            counter, client = self._waiting.first()  # type: ignore[misc]
            if counter == client.counter:
                return client
            self._waiting.push(client.number, client.counter, client)

    def _floor(self) -> float:
        return (self._least_served() if self._waiting else self._last_to_leave).counter
