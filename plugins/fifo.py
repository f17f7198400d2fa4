"""First come, first served."""

from __future__ import annotations

from paged_backend.plugins.victims import ChoosesVictim
from paged_backend.policies import KeyedPolicy, RequestView


class Fifo(ChoosesVictim, KeyedPolicy):
    """First come, first served.

    Guarantee: a request never starts before one that arrived earlier and still waits. A preempted request goes before
    all later arrivals. A large request at the head blocks the rest until it fits, so nothing is ever overtaken.
    """

    lookahead = 0

    def key(self, request: RequestView) -> int:
        """Arrival."""
        return request.order
