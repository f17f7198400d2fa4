"""The two policies."""

from __future__ import annotations

from collections import defaultdict

from paged_backend.policies import CachedBlock, KeyedEviction, KeyedPolicy, RequestView


class ShortestPredicted(KeyedPolicy):
    """The request predicted to need the fewest tokens goes first.

    Outputs are predicted by the running mean of the client's finished requests, ``max_tokens`` before there is one.
    aging: each second of waiting counts as this many tokens less, so a request is overtaken by one that is n tokens
    shorter only if that one arrives within ``n / aging`` seconds after it.
    """

    def __init__(self, aging: float = 10.0) -> None:
        if not aging > 0:
            raise ValueError(f"aging must be above 0 tokens a second, got {aging!r}")
        self.aging = aging
        self._num_finished: defaultdict[str | None, int] = defaultdict(int)
        self._mean_output: defaultdict[str | None, float] = defaultdict(float)

    def key(self, request: RequestView) -> float:
        """All requests age at the same rate, so the order between two never changes and a fixed key will do."""
        return request.num_uncomputed_tokens + self._predict(request) + self.aging * request.arrival_time

    def on_finished(self, request: RequestView, now: float) -> None:
        """Learn from requests that came to their own end."""
        if request.finish_reason in ("stop", "length"):
            client = request.client_id
            self._num_finished[client] += 1
            error = request.num_output_tokens - self._mean_output[client]
            self._mean_output[client] += error / self._num_finished[client]

    def _predict(self, request: RequestView) -> float:
        known = self._num_finished[request.client_id] > 0
        output = self._mean_output[request.client_id] if known else request.params.max_tokens
        return max(1.0, output - request.num_output_tokens)


class ByClass(KeyedEviction):
    """Drops what the least urgent requests left, longest unused first."""

    def key(self, block: CachedBlock) -> tuple[int, float, int]:
        """A larger ``priority`` is less urgent."""
        return (-block.priority, block.last_used, -block.depth)
