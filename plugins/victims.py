"""Who gives up its blocks when memory runs out: small rules that any scheduling policy can take by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paged_backend.errors import ConfigError
from paged_backend.policies import RequestView, SchedulingPolicy

VictimRule = Callable[[Sequence[RequestView], float], RequestView]


def newest(running: Sequence[RequestView], now: float) -> RequestView:
    """Last in, first out: whoever was admitted last."""
    return running[-1]


def least_computed(running: Sequence[RequestView], now: float) -> RequestView:
    """Whoever has the fewest tokens to compute again; the newest of equals."""
    return min(reversed(running), key=lambda request: request.num_computed_tokens)


def lowest_priority(running: Sequence[RequestView], now: float) -> RequestView:
    """The least urgent class, which has the largest number; the newest in it."""
    return max(reversed(running), key=lambda request: request.priority)


def latest_deadline(running: Sequence[RequestView], now: float) -> RequestView:
    """Whoever has most time, which without a deadline is for ever; the newest of equals."""
    return max(reversed(running), key=due)


def due(request: RequestView) -> float:
    """The deadline, infinity without one."""
    return math.inf if request.deadline is None else request.deadline


VICTIMS: dict[str, VictimRule] = {
    "newest": newest,
    "least_computed": least_computed,
    "lowest_priority": lowest_priority,
    "latest_deadline": latest_deadline,
}


class ChoosesVictim(SchedulingPolicy):
    """A mix-in whose option ``victim`` names one of the rules above, or is a function like them."""

    def __init__(self, victim: str | VictimRule = "newest") -> None:
        rule = VICTIMS.get(victim) if isinstance(victim, str) else victim
        # A class can be called too, but what it makes is no request.
        if isinstance(rule, type) or not callable(rule):
            raise ConfigError(
                f"victim={victim!r:.200} is unknown; choose from {', '.join(VICTIMS)}, or pass a function"
            )
        self._victim = rule

    def victim(self, running: Sequence[RequestView], now: float) -> RequestView:
        """What the option says."""
        return self._victim(running, now)
