"""Placement: the requests of a trace over several equal engines, sent where a routing policy says."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_backend.checks import checked_int
from paged_backend.lab.replay import (
    Arrivals,
    LengthKnowledge,
    Machine,
    Outcome,
    Policies,
    Replayed,
    ReplayEngine,
    paced,
    uncollected,
)
from paged_backend.lab.trace import TraceRequest
from paged_backend.policy.policy_errors import PolicyErrors
from paged_backend.policy.router import Router
from paged_backend.request.request import Request

MAX_REPLICAS = 10_000
# What may happen at one moment, in this order; requests arrive in between.
_ENDS, _BEGINS = 0, 1


@dataclass(frozen=True)
class Routing:
    """Which routing policy decides, by name or import path, with its options."""

    router: str = "prefix_affinity"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Placed:
    """What became of a trace over replicas.

    outcomes: in order of arrival. places: of each, the replica that it went to, None for one that could never fit.
    seconds: from the first arrival to the last end. replicas: what each of them did. policy_errors: of the router.
    """

    routing: Routing
    outcomes: list[Outcome]
    places: list[int | None]
    seconds: float
    replicas: list[Replayed]
    policy_errors: dict[str, int]

    @property
    def policies(self) -> Policies:
        """Those of every replica."""
        return self.replicas[0].policies


def place(
    trace: Sequence[TraceRequest],
    machine: Machine,
    num_replicas: int,
    routing: Routing = Routing(),
    policies: Policies = Policies(),  # noqa: B008
    *,
    length_knowledge: LengthKnowledge = "oracle",
    deadline: float | str | None = None,
) -> Placed:
    """Let the requests of ``trace`` arrive at ``num_replicas`` engines like ``machine``, and run as the policies say.

    The rest is as for ``replay``, which one replica is the same as. Yardsticks know the whole trace, wherever its
    requests go. Raises ConfigError and UnknownPolicy for what cannot be used.
    """
    return Placement(
        trace, machine, num_replicas, routing, policies, length_knowledge=length_knowledge, deadline=deadline
    ).run()


def at_load(trace: Sequence[TraceRequest], machine: Machine, num_replicas: int, load: float) -> list[TraceRequest]:
    """``trace`` at another pace, such that so much more arrives than the replicas can do: 1 is all that they can.

    What they can do is taken from a placement in which all requests are there at once, each sent to the least loaded.
    """

    def seconds_of(at_once: list[TraceRequest]) -> float:
        return place(at_once, machine, num_replicas, Routing("least_loaded")).seconds

    return paced(trace, [load], seconds_of)[0]


class Placement:
    """One trace on its way through several VirtualEngines, all of them on one clock.

    A step's results are known when it is over: a request that arrives meanwhile is routed by what was known before.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        machine: Machine,
        num_replicas: int,
        routing: Routing,
        policies: Policies,
        *,
        length_knowledge: LengthKnowledge = "oracle",
        deadline: float | str | None = None,
    ) -> None:
        num_replicas = checked_int("replicas", num_replicas, 1, MAX_REPLICAS)
        self._routing = routing
        self._arrivals = Arrivals(trace, machine, policies, length_knowledge=length_knowledge, deadline=deadline)
        self.errors = PolicyErrors(times_answers=False)
        self.router = Router(
            self._arrivals.plugins.router(routing.router, routing.options),
            num_replicas,
            self.errors,
            block_size=machine.block_size,
            num_blocks=machine.num_blocks if machine.enable_prefix_caching else 0,
        )
        self.engines = [ReplayEngine(self._arrivals) for _ in range(num_replicas)]
        # When a replica's step ends or its next one begins, which of both, and whose.
        self._events: list[tuple[float, int, int]] = []
        self._ended: list[list[Request]] = [[] for _ in range(num_replicas)]
        self._is_idle = [True] * num_replicas
        self._places: dict[int, int] = {}
        self._now = 0.0

    def run(self) -> Placed:
        """Until the last request has ended."""
        arrivals, events = self._arrivals, self._events
        with uncollected():
            while arrivals or events:
                if arrivals and (not events or (arrivals.next_time, _BEGINS) <= events[0]):
                    self._now = max(self._now, arrivals.next_time)
                    self._arrive()
                    continue
                self._now, kind, place = heapq.heappop(events)
                (self._end_step if kind == _ENDS else self._begin_step)(place)
        outcomes = {order: outcome for engine in self.engines for order, outcome in engine.outcomes.items()}
        return Placed(
            self._routing,
            [outcomes[order] for order in range(len(outcomes))],
            [self._places.get(order) for order in range(len(outcomes))],
            self._now,
            [engine.result(self._now) for engine in self.engines],
            dict(self.errors.counts),
        )

    def _arrive(self) -> None:
        order, known = self._arrivals.take()
        # What does not fit one replica fits none.
        if self.engines[0].refuses(order, known):
            return
        request = self._arrivals.request(order, known)
        place = self._places[order] = self.router.route(request)
        engine = self.engines[place]
        if self._is_idle[place]:
            self._is_idle[place] = False
            engine.virtual.now = self._now
            heapq.heappush(self._events, (self._now, _BEGINS, place))
        engine.enqueue(request, known.output_length)

    def _begin_step(self, place: int) -> None:
        engine = self.engines[place]
        self._ended[place] = engine.step()
        heapq.heappush(self._events, (engine.virtual.now, _ENDS, place))

    def _end_step(self, place: int) -> None:
        engine = self.engines[place].virtual
        for request in self._ended[place]:
            self.router.finished(request)
        self.router.tell(place, engine.scheduler.num_waiting, len(engine.scheduler.running))
        if engine.requests:
            heapq.heappush(self._events, (self._now, _BEGINS, place))
        else:
            self._is_idle[place] = True
