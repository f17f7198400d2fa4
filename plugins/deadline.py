"""Earliest deadline first, with a share for those that have none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from fractions import Fraction

from paged_backend.checks import checked_flag, checked_number
from paged_backend.plugins.length_prediction import Predictor
from paged_backend.plugins.service_time import LatestStarts, StepCost
from paged_backend.plugins.victims import ChoosesVictim, VictimRule, due
from paged_backend.policies import LazyHeap, RequestView


class Deadline(ChoosesVictim):
    """The earliest deadline goes first, of equals the one with least time to spare, waiting or half-prefilled.

    Guarantee: a request with a deadline never starts before one that waits with an earlier one. While requests with and
    without wait, of any n starts at least ``floor(n * share)`` are of those without, by arrival; of any n steps as many
    compute their prompts first. Whoever is first blocks the others until it fits.

    shed: a waiting request that would miss its deadline even if it started now, with steps as long as those of the
        running batch are, ends with ``"timeout"``.
    preempt: a request that finds no room, and would be lost before anybody ends, takes that of a running one: of one
        without a deadline, or of one with a later deadline that can still be met after it, if no other deadline waits.
        Computing that one's tokens again must take less than what the request itself needs.
    predict: output length, "max_tokens", "quantile" (of the client's last requests) or a function. cost: the estimate
        of step times.
    """

    lookahead = 0

    def __init__(
        self,
        share: float = 0.1,
        shed: bool = False,
        preempt: bool = False,
        predict: str | Predictor = "quantile",
        cost: StepCost | None = None,
        victim: str | VictimRule = "latest_deadline",
    ) -> None:
        super().__init__(victim)
        self.share = checked_number("share", share, 0, 1)
        self.shed = checked_flag("shed", shed)
        self.preempt = checked_flag("preempt", preempt)
        self.latest_starts = LatestStarts(predict, cost)
        self._urgent: LazyHeap[RequestView] = LazyHeap()
        self._patient: LazyHeap[RequestView] = LazyHeap()
        self._running: set[int] = set()
        # Exact, for ten times 0.1 added up is less than 1.
        self._share = Fraction(self.share).limit_denominator(10**9)
        self._credit, self._num_steps = Fraction(0), 0

    def add(self, request: RequestView, now: float) -> None:
        self._stops(request)
        if request.deadline is None:
            self._patient.push(request.order, request.order, request)
        else:
            # Of equals, one that was preempted comes first.
            rank = (request.deadline, request.num_preemptions == 0, self.latest_starts.of(request))
            self._urgent.push(request.order, rank, request)
            if self.shed:
                self.latest_starts.add(request)

    def remove(self, request: RequestView) -> None:
        known = request.order in self._urgent or request.order in self._patient
        if known and not request.is_waiting and self._urgent and self._patient:
            self._credit += self._share - (request.deadline is None)
        if known and not request.is_waiting:
            self._running.update(sample.order for sample in (request, *request.forks))
        for heap in (self._urgent, self._patient, self.latest_starts):
            heap.discard(request.order)

    def candidates(self, now: float) -> Iterator[RequestView]:
        with closing(self._urgent.ascending()) as by_deadline, closing(self._patient.ascending()) as by_arrival:
            alive = (r for r in by_deadline if not (self.shed and self.latest_starts.is_past(r, now)))
            urgent, patient = next(alive, None), next(by_arrival, None)
            while request := patient if urgent is None or (patient and self._credit + self._share >= 1) else urgent:
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
        patient_first = int(self._num_steps * self._share) > int((self._num_steps - 1) * self._share)
        latest = self.latest_starts.of
        return sorted(prefilling, key=lambda r: (patient_first and r.deadline is not None, due(r), latest(r)))

    def preempts(self, candidate: RequestView, running: Sequence[RequestView], now: float) -> RequestView | None:
        """The one with the least to compute again, of those that lose nothing by it."""
        if not self.preempt or not running or candidate.deadline is None:
            return None
        estimate = self.latest_starts
        latest, step_s = estimate.of(candidate), estimate.cost.decode_step_s
        if latest < now or any(now + estimate.remaining.output(r) * step_s <= latest for r in running):
            return None
        needs = estimate.service(candidate)
        patient = [r for r in running if r.deadline is None or self._can_come_back(r, candidate, now + needs)]
        cheapest = min(reversed(patient), key=lambda r: r.num_computed_tokens, default=None)
        if cheapest is None or estimate.cost.seconds(cheapest.num_computed_tokens, 0) >= needs:
            return None
        return cheapest

    def _can_come_back(self, request: RequestView, candidate: RequestView, later: float) -> bool:
        """Whether a running request could start again ``later`` and make its deadline, after the candidate's."""
        again = self.latest_starts.cost.seconds(request.num_computed_tokens, 0)
        alone = len(self._urgent) == 1
        return alone and due(request) > due(candidate) and self.latest_starts.of(request) - again > later

    def doomed(self, now: float) -> Iterator[RequestView]:
        return self.latest_starts.past(now)

    def on_step(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        self.latest_starts.cost.observe(num_decodes, num_prefill_tokens, seconds)

    def on_finished(self, request: RequestView, now: float) -> None:
        self._stops(request)
        self.latest_starts.remaining.observe(request)

    def _stops(self, request: RequestView) -> None:
        self._running.discard(request.order)
        if not self._running:
            self.latest_starts.cost.idle()
