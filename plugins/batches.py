"""The old ways of batching as admission policies, so that batching can be compared on the same kernels."""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice

from paged_backend.checks import checked_int, checked_number
from paged_backend.plugins.victims import ChoosesVictim, VictimRule
from paged_backend.policies import KeyedPolicy, RequestView


class Static(ChoosesVictim, KeyedPolicy):
    """Request-level batching: up to ``batch`` requests start together, and nobody joins until all of them are over.

    Guarantee: batches are formed by arrival, of whoever waits when the last one is over, so a partly filled batch never
    waits for more company; at no time do requests of two batches run. Of a batch, ``max_num_seqs`` run at once.
    Requests that the engine keeps in step with one of a batch join it, whatever its size.
    """

    lookahead = 0

    def __init__(self, batch: int = 8, victim: str | VictimRule = "newest") -> None:
        super().__init__(victim)
        self.batch = checked_int("batch", batch, 1)
        self._chosen: list[RequestView] = []
        self._unfinished: list[RequestView] = []

    def key(self, request: RequestView) -> int:
        """Arrival."""
        return request.order

    def remove(self, request: RequestView) -> None:
        """O(log n) amortised."""
        super().remove(request)
        if not request.is_waiting and request not in self._unfinished:
            self._unfinished += [request, *request.forks]

    def candidates(self, now: float) -> Generator[RequestView]:
        """Those of the batch that wait, by arrival."""
        self._unfinished = [request for request in self._unfinished if not request.is_finished]
        if not self._unfinished:
            self._chosen = list(islice(self._waiting.ascending(), self.batch)) if self.may_start(now) else []
            self._unfinished = [sample for request in self._chosen for sample in (request, *request.forks)]
        yield from (request for request in self._chosen if request.order in self._waiting)

    def may_start(self, now: float) -> bool:
        """Whether the next batch may be formed of whoever waits."""
        return True


class Window(Static):
    """Static batches that wait for company: until ``batch`` requests wait or the oldest has waited ``window_ms``.

    Guarantee: with nothing running, no request waits longer than the window.
    """

    def __init__(self, batch: int = 8, window_ms: float = 50.0, victim: str | VictimRule = "newest") -> None:
        super().__init__(batch, victim)
        self.window_s = checked_number("window_ms", window_ms, 0, 60_000) / 1000

    def may_start(self, now: float) -> bool:
        """A full batch, or time is up."""
        return len(self) >= self.batch or now >= self._closes_at(now)

    def next_wakeup(self, now: float) -> float:
        """When the oldest has waited long enough."""
        return self._closes_at(now)

    def _closes_at(self, now: float) -> float:
        first = self._waiting.first()
        return now if first is None else first[1].arrival_time + self.window_s
