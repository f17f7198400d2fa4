"""Classes of requests: the urgent ones first."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.checks import checked_amount, checked_flag
from paged_backend.plugins.victims import ChoosesVictim, VictimRule, lowest_priority
from paged_backend.policies import KeyedPolicy, RequestView


class Priority(ChoosesVictim, KeyedPolicy):
    """A smaller ``priority`` goes first, as in vLLM; first come, first served within a class.

    Guarantee: of two waiting requests the one of the smaller class starts first, of one class the earlier arrival,
    preempted or not; its prompt also gets the token budget first. A large request at the head blocks the rest.

    preempt: an urgent request that finds no seat or no blocks takes those of the newest request of the least urgent
        class, as long as that one is less urgent than itself; the set-aside request keeps its tokens.
    aging_s: this many seconds of waiting count as much as one class. A request of class p then starts before every
        request of class q < p that arrives more than ``(p - q) * aging_s`` after it: nothing starves.
    """

    lookahead = 0

    def __init__(
        self, preempt: bool = False, aging_s: float | None = None, victim: str | VictimRule = "lowest_priority"
    ) -> None:
        super().__init__(victim)
        self.preempt = checked_flag("preempt", preempt)
        self.aging_s = None if aging_s is None else checked_amount("aging_s", aging_s, positive=True)

    def key(self, request: RequestView) -> float:
        """The class; with aging, all waiting requests gain at the same rate, so their order never changes."""
        if self.aging_s is None:
            return request.priority
        return request.priority + request.arrival_time / self.aging_s

    def rank_prefills(self, prefilling: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """By the same key; equals in order of admission."""
        return sorted(prefilling, key=self.key)

    def preempts(self, candidate: RequestView, running: Sequence[RequestView], now: float) -> RequestView | None:
        """The newest of the least urgent class, if ``candidate`` is more urgent."""
        if not self.preempt:
            return None
        least_urgent = lowest_priority(running, now)
        return least_urgent if least_urgent.priority > candidate.priority else None
