"""Least work left first, with bounds on how long anybody is held up by it."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Generator
from contextlib import closing

from paged_backend.checks import checked_amount, checked_int, checked_number
from paged_backend.plugins.length_prediction import Predictor, RemainingTokens
from paged_backend.plugins.service_time import StepCost
from paged_backend.plugins.victims import ChoosesVictim, VictimRule
from paged_backend.policies import KeyedPolicy, LazyHeap, RequestView


class StarvationAware(ChoosesVictim, KeyedPolicy):
    """The request with the least work left goes first, until somebody has waited enough; then it goes by arrival.

    Work is counted in output tokens: a request has its predicted output left, for each of its samples, and its prompt,
    of which each token counts ``prompt_cost``. Let ``B`` be the work left of those that wait when a request comes.

    Guarantee: from its arrival to its start the engine computes at most ``stretch * B + slack + R`` and one step, where
    ``R`` is the work left of those that run when it is due, which is below. So it waits a multiple of what stood before
    it, whatever comes later and however short. This supposes that ``prompt_cost`` is given, or learned by then; that
    no output of ``B`` and ``R`` is longer than predicted, or else they grow by that; that nobody is preempted
    meanwhile, or else each one who is adds what it has left; and that the engine keeps nobody in lockstep.

    Why: a request is due once ``(stretch - 1) * B + slack`` is computed since its arrival, or a step later. While
    anybody is due only the earliest arrival may start, and if that does not fit, nobody. So from then on no later
    arrival starts, and until its own start nothing is computed but those that waited when it came, ``B`` in all, and
    those that run already, ``R``.

    max_overtakes: at most this many later arrivals start before anybody. max_wait_s: once a request has waited this
        long, none does. Both hold whether or not it fits. Without them, None, the bound above is the only one.
    predict: output length, "max_tokens", "quantile" (of the client's last requests) or a function of the request.
    prompt_cost: None learns it from what steps take.

    A preempted request that does not fit is not passed over.
    """

    def __init__(
        self,
        stretch: float = 3.0,
        slack: float = 2000.0,
        max_overtakes: int | None = None,
        max_wait_s: float | None = None,
        predict: str | Predictor = "quantile",
        prompt_cost: float | None = None,
        victim: str | VictimRule = "newest",
    ) -> None:
        super().__init__(victim)
        self.stretch = checked_number("stretch", stretch, 1, math.inf)
        self.slack = checked_number("slack", slack, 0, math.inf)
        self.max_overtakes = math.inf if max_overtakes is None else checked_int("max_overtakes", max_overtakes, 0)
        self.max_wait_s = math.inf if max_wait_s is None else checked_number("max_wait_s", max_wait_s, 0, math.inf)
        self.prompt_cost = None if prompt_cost is None else checked_amount("prompt_cost", prompt_cost)
        self._remaining = RemainingTokens(predict)
        self._cost = StepCost()
        # All work computed so far; those that wait, by how much that is when they are due; their work when they came.
        self._computed = 0.0
        self._due: LazyHeap[RequestView] = LazyHeap()
        self._work: dict[int, float] = {}
        self._work_waiting = 0.0
        # Orders of those that wait, ascending, with their requests. A start adds 1 to the nearest earlier order, and
        # counts for everybody before it too: how often a request was overtaken is the sum from itself on.
        self._orders: list[int] = []
        self._requests: dict[int, RequestView] = {}
        self._overtakes: dict[int, int] = {}
        self._total = 0

    def key(self, request: RequestView) -> float:
        """Work left."""
        output = self._remaining.output(request) * (1 + len(request.forks))
        return self._prompt_weight() * request.num_uncomputed_tokens + output

    def add(self, request: RequestView, now: float) -> None:
        """O(log n)."""
        work = self.key(request)
        self._waiting.push(request.order, work, request)
        insort(self._orders, request.order)
        self._requests[request.order] = request
        self._overtakes[request.order] = 0
        due = self._computed + (self.stretch - 1) * self._work_waiting + self.slack
        self._due.push(request.order, due, request)
        self._work[request.order] = work
        self._work_waiting += work

    def remove(self, request: RequestView) -> None:
        """O(log n)."""
        super().remove(request)
        self._leave(request)

    def candidates(self, now: float) -> Generator[RequestView]:
        """Least work left first; the earliest arrival as long as anybody is at a bound."""
        offered = set()
        with closing(super().candidates(now)) as nearest:
            while self._orders:
                earliest = self._requests[self._orders[0]]
                at_bound = self._is_at_bound(earliest, now)
                request = earliest if at_bound else next((r for r in nearest if r.order in self._requests), None)
                if request is None or request.order in offered:
                    return
                offered.add(request.order)
                yield request
                if not request.is_waiting:
                    self._leave(request)
                elif at_bound or request.num_preemptions:
                    return

    def _is_at_bound(self, earliest: RequestView, now: float) -> bool:
        """Whether nobody may overtake any longer; the earliest has waited longest and been overtaken most."""
        if self._total >= self.max_overtakes or now - earliest.arrival_time >= self.max_wait_s:
            return True
        first_due = self._due.first()
        return first_due is not None and first_due[0] <= self._computed

    def _leave(self, request: RequestView) -> None:
        """Take a request off the books; if it started, everybody before it was overtaken."""
        if self._requests.pop(request.order, None) is None:
            return
        self._due.discard(request.order)
        work = self._work.pop(request.order)
        # Nothing is left of nobody, whatever the sum was rounded to.
        self._work_waiting = self._work_waiting - work if self._work else 0.0
        index = bisect_left(self._orders, request.order)
        del self._orders[index]
        count = self._overtakes.pop(request.order) + (not request.is_waiting)
        if index:
            self._overtakes[self._orders[index - 1]] += count
            self._total += not request.is_waiting
        else:
            self._total -= count - (not request.is_waiting)

    def _prompt_weight(self) -> float:
        return self._cost.prompt_weight if self.prompt_cost is None else self.prompt_cost

    def on_step(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Counts the work, and learns what it costs."""
        self._cost.observe(num_decodes, num_prefill_tokens, seconds)
        self._computed += num_decodes + self._prompt_weight() * num_prefill_tokens

    def on_finished(self, request: RequestView, now: float) -> None:
        """Lets the predictor learn."""
        self._remaining.observe(request)
