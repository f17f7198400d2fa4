"""Earliest deadline first, with a share for those that have none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing

from paged_backend.errors import ConfigError
from paged_backend.plugins.length_prediction import Predictor, RemainingTokens
from paged_backend.plugins.step_cost import StepCost
from paged_backend.plugins.victims import ChoosesVictim, VictimRule, due, latest_deadline
from paged_backend.policies import LazyHeap, RequestView


class Deadline(ChoosesVictim):
    """The earliest deadline goes first, of equals the one with least time to spare, waiting or half-prefilled.

    Guarantee: a request never starts before one that waits with an earlier deadline. While requests with and without a
    deadline wait, of any n starts at least ``floor(n * share)`` are of those without, in order of arrival; and of any n
    steps as many compute their prompts first. Whoever is first blocks the others until it fits.

    share: from 0 to 1, of the starts for requests without a deadline.
    shed: a waiting request that cannot make its deadline any more, even if it ran alone from now on by the estimate of
        step times, ends with ``"timeout"``, when it arrives or later.
    preempt: a request that finds no seat or no blocks takes those of the running one with the latest deadline, none at
        all counting as latest, if that is later than its own.
    predict: output length, "max_tokens", "quantile" or a function. cost: the estimate of step times, a ``StepCost``.
    """

    lookahead = 0

    def __init__(
        self,
        share: float = 0.1,
        shed: bool = False,
        preempt: bool = False,
        predict: str | Predictor = "max_tokens",
        cost: StepCost | None = None,
        victim: str | VictimRule = "latest_deadline",
    ) -> None:
        super().__init__(victim)
        if not 0 <= share <= 1:
            raise ConfigError(f"deadline's share must be from 0 to 1, got {share!r}")
        self.share, self.shed, self.preempt = share, shed, preempt
        self.cost = StepCost() if cost is None else cost
        self._remaining = RemainingTokens(predict)
        self._urgent: LazyHeap[RequestView] = LazyHeap()
        self._patient: LazyHeap[RequestView] = LazyHeap()
        # Those with a deadline by the latest moment at which they could start, by the estimate when it was last made.
        self._latest_starts: LazyHeap[RequestView] = LazyHeap()
        self._credit = 0.0
        self._num_steps = 0

    def add(self, request: RequestView, now: float) -> None:
        """O(log n)."""
        if request.deadline is None:
            self._patient.push(request.order, request.order, request)
        else:
            self._urgent.push(request.order, (request.deadline, self._latest_start(request)), request)
            if self.shed:
                self._latest_starts.push(request.order, self._latest_start(request), request)

    def remove(self, request: RequestView) -> None:
        """O(log n) amortised."""
        if not request.is_waiting and (request.order in self._urgent or request.order in self._patient):
            self._credit += (self.share - (request.deadline is None)) * bool(self._urgent and self._patient)
        for heap in (self._urgent, self._patient, self._latest_starts):
            heap.discard(request.order)

    def candidates(self, now: float) -> Iterator[RequestView]:
        """By deadline, with the others' share, as long as each one fits."""
        with closing(self._urgent.ascending()) as by_deadline, closing(self._patient.ascending()) as by_arrival:
            alive = (request for request in by_deadline if not self._must_go(request, now))
            urgent, patient = next(alive, None), next(by_arrival, None)
            while request := patient if urgent is None or (patient and self._credit + self.share >= 1) else urgent:
                yield request
                if request.is_waiting:
                    return
                self.remove(request)
                if request is urgent:
                    urgent = next(alive, None)
                else:
                    patient = next(by_arrival, None)

    def __len__(self) -> int:
        return len(self._urgent) + len(self._patient)

    def rank_prefills(self, prefilling: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """By deadline; a share of the steps puts those without one first."""
        others_first = int(self._num_steps * self.share) > int((self._num_steps - 1) * self.share)
        return sorted(
            prefilling, key=lambda r: (others_first and r.deadline is not None, due(r), self._latest_start(r))
        )

    def preempts(self, candidate: RequestView, running: Sequence[RequestView], now: float) -> RequestView | None:
        """The latest deadline, if it is later."""
        if not self.preempt:
            return None
        latest = latest_deadline(running, now)
        return latest if due(latest) > due(candidate) else None

    def doomed(self, now: float) -> Iterator[RequestView]:
        """Those whose latest start is past, by the estimate as it is now."""
        while (first := self._latest_starts.first()) is not None and first[0] < now:
            request = first[1]
            self._latest_starts.push(request.order, self._latest_start(request), request)
            if self._latest_start(request) < now:
                self._latest_starts.discard(request.order)
                yield request

    def on_step(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learns what a step takes."""
        self._num_steps += 1
        self.cost.observe(num_decodes, num_prefill_tokens, seconds)

    def on_finished(self, request: RequestView, now: float) -> None:
        """Lets the predictor learn."""
        self._remaining.observe(request)

    def _latest_start(self, request: RequestView) -> float:
        return due(request) - self._seconds(request)

    def _seconds(self, request: RequestView) -> float:
        return self.cost.seconds(request.num_uncomputed_tokens, self._remaining.output(request))

    def _must_go(self, request: RequestView, now: float) -> bool:
        """Whether ``request`` is to be shed, which the next ``doomed`` will say."""
        if not self.shed or self._latest_start(request) >= now:
            return False
        self._latest_starts.push(request.order, -math.inf, request)
        return True
