"""Router: asks a routing policy, checks every answer, and keeps what the policy may know of the replicas."""

from __future__ import annotations

from numbers import Integral

from paged_backend.checks import describe
from paged_backend.policies import ReplicaView, RequestView, RoutingPolicy
from paged_backend.policy.policy_errors import FAILED, ErrorHandler, ask
from paged_backend.policy.prefix_index import PrefixIndex
from paged_backend.request.request import Request


class Replica:
    """What a router knows of one engine; policies see a view."""

    __slots__ = ("num_known_tokens", "num_outstanding_tokens", "num_running", "num_waiting")

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_running = 0
        self.num_outstanding_tokens = 0
        self.num_known_tokens = 0


class Router:
    """Sends requests to the replicas that the policy names.

    The policy sees views, so it cannot change a request or a replica. An exception or an impossible answer is reported
    through ``on_error(policy, method, error)``, and replicas are then taken in turn.

    block_size, num_blocks: of each replica's prefix cache, 0 blocks where it has none.
    """

    def __init__(
        self, policy: RoutingPolicy, num_replicas: int, on_error: ErrorHandler, *, block_size: int, num_blocks: int
    ) -> None:
        self.policy = policy
        self._on_error = on_error
        self._replicas = [Replica() for _ in range(num_replicas)]
        self._views = tuple(map(ReplicaView, self._replicas))
        asks = num_blocks > 0 and bool(getattr(policy, "asks_prefixes", RoutingPolicy.asks_prefixes))
        self.prefixes = PrefixIndex(num_replicas, block_size, num_blocks) if asks else None
        # Of unfinished requests, where they went, and the view that the policy knows them by.
        self._routed: dict[Request, tuple[int, RequestView]] = {}
        self._turn = 0

    def route(self, request: Request) -> int:
        """The place of the replica that ``request`` goes to, which counts it as waiting from now on."""
        beginnings: list[int] = []
        known: dict[int, int] = {}
        if self.prefixes is not None:
            beginnings = self.prefixes.beginnings(request.token_ids, request.cache_salt)
            known = self.prefixes.known(beginnings)
        for place, num_tokens in known.items():
            self._replicas[place].num_known_tokens = num_tokens
        view = request.view
        place = self._checked(ask(self._on_error, self.policy, "route", view, self._views))
        for other in known:
            self._replicas[other].num_known_tokens = 0
        if self.prefixes is not None:
            self.prefixes.add(place, beginnings)
        self._routed[request] = place, view
        replica = self._replicas[place]
        replica.num_waiting += 1
        replica.num_outstanding_tokens += request.max_num_tokens
        return place

    def _checked(self, answer: object) -> int:
        """The policy's answer, or whose turn it is if that is none."""
        count = len(self._replicas)
        if isinstance(answer, Integral) and not isinstance(answer, bool) and 0 <= int(answer) < count:
            return int(answer)
        if answer is not FAILED:
            self._on_error(
                self.policy, "route", f"returned {describe(answer)}; it must be an int from 0 to {count - 1}, a replica"
            )
        self._turn += 1
        return (self._turn - 1) % count

    def tell(self, place: int, num_waiting: int, num_running: int) -> None:
        """How many requests wait and run at a replica now."""
        replica = self._replicas[place]
        replica.num_waiting, replica.num_running = num_waiting, num_running

    def finished(self, request: Request) -> None:
        """``request`` ended; the replica tells its numbers itself."""
        place, view = self._routed.pop(request)
        self._replicas[place].num_outstanding_tokens -= request.max_num_tokens
        ask(self._on_error, self.policy, "on_finished", view, place)
