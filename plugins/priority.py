"""Classes of requests: the urgent ones first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from paged_backend.checks import checked_amount, checked_flag, checked_number
from paged_backend.plugins.length_prediction import Predictor, RemainingTokens
from paged_backend.plugins.service_time import StepCost
from paged_backend.plugins.victims import ChoosesVictim, VictimRule
from paged_backend.policies import KeyedPolicy, RequestView

# Tokens that may be computed again before any share of what began is asked for.
BURST = 4096


class Priority(ChoosesVictim, KeyedPolicy):
    """A smaller ``priority`` goes first, as in vLLM; first come, first served within a class.

    Guarantee: of two waiting requests the one of the smaller class starts first, of one class the earlier arrival,
    preempted or not; its prompt also gets the token budget first. A large request at the head blocks the rest.

    preempt: an urgent request that finds no seat or no blocks takes those of a running request that is less urgent, and
        so comes behind it: of the last of the least urgent class for which that pays. It does if the time to compute
        its tokens again is less than the wait until somebody ends, though it holds up all that run and all as urgent
        that wait, or with aging all that wait. The set-aside request keeps its tokens.
    recompute: so nobody is set aside whose tokens, with those of all that were preempted before, would be more than
        this share of the prompt tokens of all that began, and 4,096. It bounds what urgent requests cost the others,
        however many come; with math.inf nothing does.
    aging_s: this many seconds of waiting count as much as one class. A request of class p then starts before every
        request of class q < p that arrives more than ``(p - q) * aging_s`` after it: nothing starves. Aged so, classes
        decide everything: who starts, who is set aside and who pays when memory runs out.
    predict: output length, "max_tokens", "quantile" (of the client's last requests) or a function of the request.
    """

    lookahead = 0

    def __init__(
        self,
        preempt: bool = False,
        aging_s: float | None = None,
        recompute: float = 0.04,
        predict: str | Predictor = "quantile",
        victim: str | VictimRule = "lowest_priority",
    ) -> None:
        super().__init__(self._least_urgent if victim == "lowest_priority" else victim)
        self.preempt = checked_flag("preempt", preempt)
        self.aging_s = None if aging_s is None else checked_amount("aging_s", aging_s, positive=True)
        self.recompute = checked_number("recompute", recompute, 0, math.inf)
        self._remaining = RemainingTokens(predict)
        self._cost = StepCost()
        # Tokens of preempted requests, and of the prompts that began.
        self._num_lost = self._num_begun = 0
        # Tokens of those named in the step that is planned, which are counted as lost only once it is.
        self._named_at = -math.inf
        self._num_named = 0
        self._num_waiting: Counter[int] = Counter()

    def key(self, request: RequestView) -> float:
        """The class; with aging, all waiting requests gain at the same rate, so their order never changes."""
        if self.aging_s is None:
            return request.priority
        return request.priority + request.arrival_time / self.aging_s

    def add(self, request: RequestView, now: float) -> None:
        """O(log n)."""
        super().add(request, now)
        self._num_waiting[request.priority] += 1
        if request.num_preemptions:
            self._num_lost += request.num_tokens

    def remove(self, request: RequestView) -> None:
        """O(log n) amortised."""
        if request.order in self._waiting:
            self._num_waiting[request.priority] -= 1
            self._num_waiting += Counter()
            if not request.is_waiting and not request.num_preemptions:
                self._num_begun += request.num_prompt_tokens
        super().remove(request)

    def rank_prefills(self, prefilling: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """By the same key; equals in order of admission."""
        return sorted(prefilling, key=self.key)

    def preempts(self, candidate: RequestView, running: Sequence[RequestView], now: float) -> RequestView | None:
        """The last of the least urgent class that is cheaper to compute again than to wait for, within bounds."""
        if not self.preempt:
            return None
        urgency = self.key(candidate)
        yielding = [r for r in running if r.priority > candidate.priority and self.key(r) > urgency]
        if not yielding:
            return None
        as_urgent = (count for p, count in self._num_waiting.items() if self.aging_s or p <= candidate.priority)
        num_delayed = sum(as_urgent) - 1 + len(running)
        # In output tokens, of which a step computes one for each that runs.
        spared = min(map(self._remaining.output, running)) * len(running)
        delay = self._cost.prompt_weight * num_delayed
        if now != self._named_at:
            self._named_at, self._num_named = now, 0
        allowed = BURST + self.recompute * self._num_begun - self._num_lost - self._num_named
        cheap = [r for r in yielding if delay * r.num_computed_tokens < spared and r.num_tokens <= allowed]
        if not cheap:
            return None
        named = self._least_urgent(cheap, now)
        self._num_named += named.num_tokens
        return named

    def _least_urgent(self, running: Sequence[RequestView], now: float) -> RequestView:
        return max(reversed(running), key=self.key)

    def on_step(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learns what a prompt token costs."""
        self._cost.observe(num_decodes, num_prefill_tokens, seconds)

    def on_finished(self, request: RequestView, now: float) -> None:
        """Lets the predictor learn."""
        self._remaining.observe(request)
