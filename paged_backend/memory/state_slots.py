"""StateSlots: whose recurrent state lies in which slot, and which prefixes keep theirs as a snapshot."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from paged_backend.errors import IntegrityError
from paged_backend.memory.prefix_tree import PrefixNode, PrefixTree
from paged_backend.request.request import Request

# Where the state of no tokens is read from.
NO_SLOT = -1
# A running request has the state that its next pass reads, and the one that this pass writes.
SLOTS_PER_SEAT = 2


class Span(NamedTuple):
    """Tokens ``first`` to ``end`` of a request, which lead from the state in slot ``source`` to that in ``target``."""

    first: int
    end: int
    source: int
    target: int


@dataclass
class _Seat:
    """One request's slots.

    slot: its state after all tokens that were computed. stops: numbers of tokens after which its state is wanted as a
    snapshot. planned: the spans of the pass to come. passed: from ``commit`` to ``keep``, slots of the states at its
    stops within the last pass, by tokens. latest: the prefix whose snapshot it took last while it decoded.
    """

    slot: int
    stops: frozenset[int] = frozenset()
    planned: list[Span] = field(default_factory=list)
    passed: dict[int, int] = field(default_factory=dict)
    latest: PrefixNode | None = None


class StateSlots:
    """Knows tokens and slots, not tensors.

    A pass reads a request's slot and writes another one, so that nothing is lost when it fails. As no slot is written
    twice, forks share one, and a prefix keeps one as its snapshot, without a copy. Snapshots have an order of their
    own: those that running requests just left go first, then those that were longest unused, then those that waiting
    requests begin with; pinned ones stay.

    num_snapshots: how many prefixes may keep their state. num_made: most slots that were in use at once.
    """

    def __init__(self, num_snapshots: int, tree: PrefixTree) -> None:
        self.num_snapshots = num_snapshots
        self.num_evictions = 0
        self._tree = tree
        tree.on_lost_snapshot = self._forget
        self.reset()

    def reset(self) -> None:
        """Every slot free, no snapshot."""
        self._seats: dict[Request, _Seat] = {}
        self._snapshots: OrderedDict[PrefixNode, int] = OrderedDict()
        self._counts: Counter[int] = Counter()
        self._free: list[int] = []
        self.num_made = 0

    @property
    def num_kept(self) -> int:
        """Prefixes that have a snapshot."""
        return len(self._snapshots)

    @property
    def num_held(self) -> int:
        """Slots in use, by requests and for snapshots."""
        return self.num_made - len(self._free)

    # A request's life

    def begin(self, request: Request, node: PrefixNode | None, stops: Iterable[int]) -> None:
        """``request`` goes on from the snapshot of ``node``, or from nothing."""
        slot = NO_SLOT
        if node is not None:
            slot = self._snapshots[node]
            self._counts[slot] += 1
            self._snapshots.move_to_end(node)
            for seat in self._seats.values():
                if seat.latest is node:
                    # Others begin alike, so it stays when its request has gone on.
                    seat.latest = None
        self._seats[request] = _Seat(slot, frozenset(stops))

    def plan(self, request: Request, count: int) -> list[Span]:
        """The spans of the next ``count`` tokens of ``request``, cut where a snapshot is wanted.

        What was planned before is given up.
        """
        seat = self._seats[request]
        self._give_up_plan(seat)
        first, source = request.num_computed_tokens, seat.slot
        last = first + count
        ends: list[int] = []
        for stop in sorted(stop for stop in seat.stops if first < stop < last):
            if self._make_room(len(ends)):
                ends.append(stop)
        for end in [*ends, last]:
            span = Span(first, end, source, self._take())
            seat.planned.append(span)
            first, source = end, span.target
        return list(seat.planned)

    def commit(self, request: Request) -> bool:
        """The planned pass succeeded, and its tokens are counted; returns whether a state is to be kept now."""
        seat = self._seats[request]
        if seat.planned:
            self._release(seat.slot)
            *before, last = seat.planned
            seat.slot = last.target
            seat.passed = {span.end: span.target for span in before}
            seat.planned = []
        return bool(seat.passed) or self._is_due(request, seat)

    def _is_due(self, request: Request, seat: _Seat) -> bool:
        """Whether the state is wanted as it is now: at a stop, and while it decodes at every end of a block."""
        done = request.num_computed_tokens
        return done in seat.stops or self._is_turn(request)

    def _is_turn(self, request: Request) -> bool:
        done = request.num_computed_tokens
        return done >= request.num_prompt_tokens and done % self._tree.block_size == 0

    def keep(self, request: Request, node: PrefixNode | None) -> None:
        """Keep what ``commit`` told of, on the path of prefixes that ends in ``node``; without one nothing is kept."""
        seat, size = self._seats[request], self._tree.block_size
        if node is not None and node.depth * size == request.num_computed_tokens and self._is_due(request, seat):
            self._keep_last(request, seat, node)
        while node is not None and node.depth and seat.passed:
            slot = seat.passed.pop(node.depth * size, None)
            if slot is not None:
                self._keep(node, slot)
                self._release(slot)
            node = node.parent
        for slot in seat.passed.values():
            self._release(slot)
        seat.passed = {}

    def _keep_last(self, request: Request, seat: _Seat, node: PrefixNode) -> None:
        if seat.latest is not None and seat.latest is not node:
            # Only the last end of a block matters, to a request that goes on from all of this one.
            before, seat.latest = seat.latest, None
            if before.snapshot is not None and not before.snapshot_pins:
                self._drop(before)
        if self._keep(node, seat.slot) and self._is_turn(request):
            seat.latest = node
            # Nobody goes on from here before the request has ended.
            self._snapshots.move_to_end(node, last=False)

    def fork(self, parent: Request, child: Request) -> None:
        """``child`` goes on from where ``parent`` is."""
        slot = self._seats[parent].slot
        self._counts[slot] += 1
        self._seats[child] = _Seat(slot)

    def free(self, request: Request) -> None:
        """``request`` needs its slots no more."""
        seat = self._seats.pop(request)
        self._give_up_plan(seat)
        self._release(seat.slot)
        if seat.latest is not None and seat.latest.snapshot is not None:
            self._snapshots.move_to_end(seat.latest)

    # Snapshots

    def _keep(self, node: PrefixNode, slot: int) -> bool:
        """Let ``node`` keep ``slot``; whether it had none and there was room."""
        if node.snapshot is not None:
            self._snapshots.move_to_end(node)
            return False
        if not self._make_room():
            return False
        self._counts[slot] += 1
        node.snapshot = self._snapshots[node] = slot
        return True

    def _make_room(self, num_more: int = 0) -> bool:
        """Whether one more slot, beside ``num_more``, may be kept for a snapshot, after whatever may go went."""
        on_their_way = num_more + sum(len(seat.passed) + max(0, len(seat.planned) - 1) for seat in self._seats.values())
        while len(self._snapshots) + on_their_way >= self.num_snapshots:
            idle = [node for node in self._snapshots if not node.snapshot_pins]
            if not idle:
                return False
            victim = next((node for node in idle if not node.num_awaiting), idle[0])
            self._drop(victim)
            self.num_evictions += 1
        return True

    def _drop(self, node: PrefixNode) -> None:
        self._forget(node)
        self._tree.prune(node)

    def _forget(self, node: PrefixNode) -> None:
        self._release(self._snapshots.pop(node))
        node.snapshot = None

    # Slots

    def _take(self) -> int:
        if not self._free:
            self._free.append(self.num_made)
            self.num_made += 1
        slot = self._free.pop()
        self._counts[slot] = 1
        return slot

    def _release(self, slot: int) -> None:
        if slot == NO_SLOT:
            return
        self._counts[slot] -= 1
        if not self._counts[slot]:
            del self._counts[slot]
            self._free.append(slot)

    def _give_up_plan(self, seat: _Seat) -> None:
        for span in seat.planned:
            self._release(span.target)
        seat.planned = []

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise IntegrityError unless each slot is free or has as many owners as are counted."""
        if set(requests) != self._seats.keys():
            raise IntegrityError("a request has blocks without a state, or a state without blocks")
        owners: Counter[int] = Counter(self._snapshots.values())
        for seat in self._seats.values():
            owners.update([seat.slot, *seat.passed.values(), *(span.target for span in seat.planned)])
        del owners[NO_SLOT]
        if owners != self._counts:
            raise IntegrityError(f"slots are said to have {dict(self._counts)} owners, they have {dict(owners)}")
        if sorted([*owners, *self._free]) != list(range(self.num_made)):
            raise IntegrityError("a slot is lost, or free and in use")
        if len(self._snapshots) > self.num_snapshots:
            raise IntegrityError(f"{len(self._snapshots)} snapshots are kept, at most {self.num_snapshots} may be")
        kept = {node: node.snapshot for node in self._tree.nodes() if node.snapshot is not None}
        if kept != self._snapshots:
            raise IntegrityError("a prefix has a snapshot that is not in the books, or the books one without a prefix")


def deepest_snapshot(node: PrefixNode) -> PrefixNode:
    """The last node on the way to ``node`` that has a snapshot, else the root."""
    while node.parent is not None and node.snapshot is None:
        node = node.parent
    return node
