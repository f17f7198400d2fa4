"""Fair shares of service between clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from paged_backend.checks import checked_amount
from paged_backend.errors import ConfigError
from paged_backend.plugins.token_counters import TokenCounters
from paged_backend.plugins.victims import ChoosesVictim, VictimRule
from paged_backend.policies import LazyHeap, RequestView


class Fair(ChoosesVictim):
    """The client that was served least goes first; first come, first served for each (VTC, arXiv:2401.00588).

    A client's counter grows by ``prompt_cost`` for each prompt token when a request of it first starts and by
    ``output_cost`` for each token generated, both divided by the client's weight.

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
        self.prompt_cost = checked_amount("prompt_cost", prompt_cost)
        self.output_cost = checked_amount("output_cost", output_cost)
        self._counters = TokenCounters(_checked_weights({} if weights is None else weights))
        self._queues: dict[str | None, LazyHeap[RequestView]] = {}
        self._num_waiting = 0

    def add(self, request: RequestView, now: float) -> None:
        """O(log n)."""
        client = request.client_id
        if client not in self._queues:
            self._counters.join(client)
            self._queues[client] = LazyHeap()
        self._queues[client].push(request.order, request.order, request)
        self._num_waiting += 1

    def remove(self, request: RequestView) -> None:
        """O(log n); charges for the prompt when the request starts for the first time."""
        client = request.client_id
        if request.order not in self._queues.get(client, ()):
            return
        self._queues[client].discard(request.order)
        self._num_waiting -= 1
        if not request.is_waiting and request.num_preemptions == 0:
            self._counters.charge(client, self.prompt_cost * request.num_prompt_tokens)
        if not self._queues[client]:
            del self._queues[client]
            self._counters.leave(client)

    def candidates(self, now: float) -> Iterator[RequestView]:
        """The earliest request of the client served least, as long as each one fits."""
        while self._queues:
            request = next(self._queues[self._counters.least_served()].ascending())
            yield request
            if request.is_waiting:
                return
            self.remove(request)

    def __len__(self) -> int:
        return self._num_waiting

    def on_tokens(self, request: RequestView, num_tokens: int, now: float) -> None:
        """Charges for a generated token; computing again after a preemption is free."""
        if request.num_uncomputed_tokens == 0:
            self._counters.charge(request.client_id, self.output_cost)


def _checked_weights(weights: Any) -> dict[str | None, float]:
    if not isinstance(weights, Mapping):
        raise ConfigError(f"weights must map client ids to numbers above 0, got {weights!r:.200}")
    for client in weights:
        if not isinstance(client, (str, NoneType)):
            raise ConfigError(f"a client id of weights must be a text or None, got {client!r:.200}")
    return {
        client: checked_amount(f"weights[{client!r:.80}]", weight, positive=True) for client, weight in weights.items()
    }
