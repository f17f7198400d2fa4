"""Nearest to finishing first, with a bound on how often anybody is overtaken."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Generator
from contextlib import closing

from paged_backend.checks import checked_int, checked_number
from paged_backend.plugins.length_prediction import Predictor, RemainingTokens
from paged_backend.plugins.victims import ChoosesVictim, VictimRule
from paged_backend.policies import KeyedPolicy, RequestView


class StarvationAware(ChoosesVictim, KeyedPolicy):
    """The request with the fewest tokens left, prompt and predicted output, first, until others have waited enough.

    Guarantee: while a request waits, at most ``max_overtakes`` later arrivals start before it; once it has waited
    ``max_wait_s`` since its arrival, none does. Both hold whether or not it fits, so under an endless stream of short
    requests a long one starts, and once started it advances with every step that computes prompts in order of
    admission.

    A preempted request that does not fit is not passed over either.

    Why: a later arrival overtakes every earlier one that waits, so the earliest has been overtaken most. Its count and
    its wait are checked before each start; at a bound it is the only candidate, and if it does not fit, nobody starts.

    predict: output length, "max_tokens", "quantile" (of the client's last requests) or a function of the request.
    """

    def __init__(
        self,
        max_overtakes: int = 16,
        max_wait_s: float = 60.0,
        predict: str | Predictor = "max_tokens",
        victim: str | VictimRule = "newest",
    ) -> None:
        super().__init__(victim)
        self.max_overtakes = checked_int("max_overtakes", max_overtakes, 0)
        self.max_wait_s = checked_number("max_wait_s", max_wait_s, 0, math.inf)
        self._remaining = RemainingTokens(predict)
        # Orders of those that wait, ascending, with their requests. A start adds 1 to the nearest earlier order, and
        # counts for everybody before it too: how often a request was overtaken is the sum from itself on.
        self._orders: list[int] = []
        self._requests: dict[int, RequestView] = {}
        self._overtakes: dict[int, int] = {}
        self._total = 0

    def key(self, request: RequestView) -> float:
        """Tokens left."""
        return self._remaining(request)

    def add(self, request: RequestView, now: float) -> None:
        """O(log n)."""
        super().add(request, now)
        insort(self._orders, request.order)
        self._requests[request.order] = request
        self._overtakes[request.order] = 0

    def remove(self, request: RequestView) -> None:
        """O(log n)."""
        super().remove(request)
        self._leave(request)

    def candidates(self, now: float) -> Generator[RequestView]:
        """Fewest tokens left first; the earliest arrival as soon as it is at a bound."""
        offered = set()
        with closing(super().candidates(now)) as nearest:
            while self._orders:
                earliest = self._requests[self._orders[0]]
                at_bound = self._total >= self.max_overtakes or now - earliest.arrival_time >= self.max_wait_s
                request = earliest if at_bound else next((r for r in nearest if r.order in self._requests), None)
                if request is None or request.order in offered:
                    return
                offered.add(request.order)
                yield request
                if not request.is_waiting:
                    self._leave(request)
                elif at_bound or request.num_preemptions:
                    return

    def _leave(self, request: RequestView) -> None:
        """Take a request off the books; if it started, everybody before it was overtaken."""
        if self._requests.pop(request.order, None) is None:
            return
        index = bisect_left(self._orders, request.order)
        del self._orders[index]
        count = self._overtakes.pop(request.order) + (not request.is_waiting)
        if index:
            self._overtakes[self._orders[index - 1]] += count
            self._total += not request.is_waiting
        else:
            self._total -= count - (not request.is_waiting)

    def on_finished(self, request: RequestView, now: float) -> None:
        """Lets the predictor learn."""
        self._remaining.observe(request)
