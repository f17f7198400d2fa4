"""The built-in routing policies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from paged_backend.checks import checked_int, checked_number
from paged_backend.hookspecs import hookimpl
from paged_backend.policies import ReplicaView, RequestView, RoutingPolicy


class Random(RoutingPolicy):
    """Any replica, each as likely as the others; the same ones for the same ``seed``. O(1)."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(checked_int("seed", seed, 0))

    def route(self, request: RequestView, replicas: Sequence[ReplicaView]) -> int:
        """One that is drawn."""
        return self._draw.randrange(len(replicas))


class RoundRobin(RoutingPolicy):
    """One replica after the other. O(1)."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: RequestView, replicas: Sequence[ReplicaView]) -> int:
        """The one whose turn it is."""
        chosen, self._next = self._next % len(replicas), self._next + 1
        return chosen


class LeastLoaded(RoutingPolicy):
    """The replica with the fewest outstanding tokens, the first of several. O(replicas)."""

    def route(self, request: RequestView, replicas: Sequence[ReplicaView]) -> int:
        """The one with the least to do."""
        outstanding = [replica.num_outstanding_tokens for replica in replicas]
        return outstanding.index(min(outstanding))


class PrefixAffinity(RoutingPolicy):
    """The replica that knows most of the prompt, unless its load exceeds ``factor`` times the mean.

    Load is counted in outstanding tokens. Whoever is above the bound is passed over for the one that knows next most,
    as keys are in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv:1608.01350); of
    those that know as much, and where nobody knows anything, the one with the least load gets the request. So no load
    comes above ``factor`` times the mean but by a single request. Near a ``factor`` of 1 loads are even and prefixes
    are found seldom, far above it it is the other way round. O(replicas).
    """

    asks_prefixes = True

    def __init__(self, factor: float = 1.25) -> None:
        self.factor = checked_number("factor", factor, 1, math.inf)

    def route(self, request: RequestView, replicas: Sequence[ReplicaView]) -> int:
        """Of those within the bound the one that knows most."""
        outstanding = [replica.num_outstanding_tokens for replica in replicas]
        # The least load is within it, whatever rounding does to the mean.
        most = max(min(outstanding), self.factor * sum(outstanding) / len(replicas))
        best, best_key = 0, (1, math.inf)
        for place, (load, replica) in enumerate(zip(outstanding, replicas, strict=True)):
            if load <= most and (key := (-replica.num_known_tokens, load)) < best_key:
                best, best_key = place, key
        return best


@hookimpl
def register_routers(register: Callable[[str, Any], None]) -> None:
    """Offer the policies of this module."""
    register("random", Random)
    register("round_robin", RoundRobin)
    register("least_loaded", LeastLoaded)
    register("prefix_affinity", PrefixAffinity)
