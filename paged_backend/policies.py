"""What a plugin implements: who goes first, what leaves the cache, how big a block is, which engine gets a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from paged_backend.lazy_heap import LazyHeap as LazyHeap
from paged_backend.request.view import RequestView as RequestView

if TYPE_CHECKING:
    import torch


class SchedulingPolicy(ABC):
    """Owns the order of the waiting requests; the engine decides how much fits and checks every answer.

    One object serves one engine. It reads requests through views that cannot be changed, and must not call the engine.
    Times are seconds of the engine's clock. Ten thousand waiting requests are normal: ``add`` and ``remove`` should
    cost O(log n), ``candidates`` should be lazy.

    lookahead: how many requests that do not fit may be passed over for one behind them in a step; each passing counts
    in ``RequestView.overtaken``. 0 means that whoever is first blocks the rest until it fits.
    """

    lookahead: int = 8

    @abstractmethod
    def add(self, request: RequestView, now: float) -> None:
        """``request`` waits from now on: it is new, or was preempted (``request.num_preemptions`` is above 0)."""

    @abstractmethod
    def remove(self, request: RequestView) -> None:
        """``request`` no longer waits: it was admitted, or it ends; ``request.is_waiting`` is False when admitted."""

    @abstractmethod
    def candidates(self, now: float) -> Iterator[RequestView]:
        """The waiting requests, best first. The engine takes what fits and may stop at any point.

        ``add`` and ``remove`` are called only once the engine is done iterating. Whether the request yielded last was
        admitted shows in its ``is_waiting`` when the next one is asked for. Requests that are not yielded are held
        back; see ``next_wakeup``. Requests that choose their tokens together (``Lockstep``) are admitted together: when
        the first of them is, the others follow before anybody else, and only then other locksteps.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many requests wait, those held back included."""

    def rank_prefills(self, prefilling: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """Who gets the step's token budget first, among requests whose prompt is not computed yet.

        They come in order of admission; a waiting request that would begin now may stand at the end, so that it can be
        ranked before a half-computed prompt. All of them are wanted, each once. Default: as they come.
        """
        return prefilling

    def victim(self, running: Sequence[RequestView], now: float) -> RequestView:
        """Who of ``running`` (in order of admission) gives up its blocks when memory runs out. Default: the newest."""
        return running[-1]

    def preempts(self, candidate: RequestView, running: Sequence[RequestView], now: float) -> RequestView | None:
        """A running request to set aside so that ``candidate`` can run though seats or blocks are taken.

        Asked again, with the rest of ``running``, until ``candidate`` fits; with None before that nobody is set aside.
        Default: None.
        """
        return None

    def next_wakeup(self, now: float) -> float | None:
        """When ``candidates`` will yield somebody though nothing arrives; asked when nothing runs and none was yielded.

        A time after ``now`` and within a minute of the first such answer; the engine sleeps until then, unless it
        knows that nothing more will come. Default: None, and the engine starts the earliest arrivals. So it does for
        good, without asking again, once a policy has held everybody back and has no such time when that one came.
        """
        return None

    def doomed(self, now: float) -> Iterable[RequestView]:
        """Waiting requests to give up: they end with ``"timeout"``. Asked at every step. Default: none."""
        return ()

    def on_tokens(self, request: RequestView, num_tokens: int, now: float) -> None:  # noqa: B027
        """A step computed ``num_tokens`` tokens of ``request``; with ``num_uncomputed_tokens`` 0 it generates one."""

    def on_step(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:  # noqa: B027
        """A step took ``seconds`` for this many decoded requests and prompt tokens."""

    def on_finished(self, request: RequestView, now: float) -> None:  # noqa: B027
        """``request`` ended for whatever reason; called after ``remove`` if it still waited."""


class KeyedPolicy(SchedulingPolicy):
    """Orders waiting requests by a key that is fixed while a request waits: a policy in ten lines.

    Ties go to the earlier arrival. A preempted request keeps its place among arrivals, so it comes back ahead of later
    arrivals with an equal key.
    """

    @abstractmethod
    def key(self, request: RequestView) -> Any:
        """What to sort by, smallest first; asked once each time the request begins to wait."""

    @cached_property
    def _waiting(self) -> LazyHeap[RequestView]:
        return LazyHeap()

    def add(self, request: RequestView, now: float) -> None:
        """O(log n)."""
        self._waiting.push(request.order, self.key(request), request)

    def remove(self, request: RequestView) -> None:
        """O(log n) amortised."""
        self._waiting.discard(request.order)

    def candidates(self, now: float) -> Generator[RequestView]:
        """O(log n) for each one asked for."""
        return self._waiting.ascending()

    def __len__(self) -> int:
        return len(self._waiting)


class CachedBlock(NamedTuple):
    """A block that no request uses but whose contents may be reused.

    id: the block's number, unique within its policy. depth: full blocks before it in its prefix. hits: how often
    its contents were reused. created: position by the time its contents were first computed, smaller is older.
    last_used: seconds. priority: that of the request that used it last. contents: a number that stands for its tokens
    and all before them, so what was dropped is known when it is computed again; while one engine runs, different for
    different contents up to chance, which a hash leaves.
    """

    id: int
    depth: int
    hits: int
    created: int
    last_used: float
    priority: int = 0
    contents: int = 0


class EvictionPolicy(ABC):
    """Owns the order of the cached blocks that may be dropped; one object per KV group.

    The engine offers a block when no request uses it and nothing cached hangs on it, so a prefix goes end first and
    any order is a sound one. Every call is per block and should cost O(1) or O(log n).

    spares_awaited: whether blocks that waiting requests begin with are kept back as long as others are on offer.
    """

    spares_awaited: bool = True

    @abstractmethod
    def add(self, block: CachedBlock) -> None:
        """The block may be dropped from now on."""

    @abstractmethod
    def remove(self, block: CachedBlock) -> None:
        """The block is in use again, pinned, or gone."""

    @abstractmethod
    def evict(self) -> int:
        """The id of the block to drop next. The engine answers with ``remove`` once it is gone."""


class KeyedEviction(EvictionPolicy):
    """Drops the block with the smallest key; the key is fixed while the block is on offer."""

    @abstractmethod
    def key(self, block: CachedBlock) -> Any:
        """What to sort by, smallest goes first; asked when the block is added."""

    @cached_property
    def _blocks(self) -> LazyHeap[CachedBlock]:
        return LazyHeap()

    def add(self, block: CachedBlock) -> None:
        """O(log n)."""
        self._blocks.push(block.id, self.key(block), block)

    def remove(self, block: CachedBlock) -> None:
        """O(log n) amortised."""
        self._blocks.discard(block.id)

    def evict(self) -> int:
        """O(log n) amortised."""
        first = self._blocks.first()
        if first is None:
            raise LookupError("no block is on offer")
        return first[1].id


@dataclass(frozen=True)
class ModelShape:
    """What a block-size rule may want to know. num_layers counts attention layers; dims are those of the first.

    decode_seconds: measures the model's own decode attention: ``decode_seconds(block_size, context_len, num_seqs)`` is
    the seconds that one layer takes, the mean of all, for one step of ``num_seqs`` requests with ``context_len`` tokens
    each. A machine does other work too, so measure sizes in turn, several times.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    decode_seconds: Callable[[int, int, int], float]
    max_positions: int | None = None


class BlockSize(int):
    """A block size that says why it was chosen; a rule may return one in place of a plain int.

    reason: goes to ``EngineStats.block_size_reason``. Raises TypeError if it is no text.
    """

    reason: str

    def __new__(cls, size: int, reason: str) -> BlockSize:
        """``size`` in tokens."""
        if not isinstance(reason, str):
            raise TypeError(f"a block size's reason must be a text, got {reason!r}")
        self = super().__new__(cls, size)
        self.reason = reason
        return self


BlockSizeRule = Callable[[ModelShape, "torch.device"], int]


def _read(name: str) -> Any:
    return property(attrgetter(f"_replica.{name}"))


class ReplicaView:
    """One of the engines that a request may go to, live, with nothing to change: assigning raises AttributeError.

    One object per replica, at the same place among all replicas for good.

    num_waiting, num_running: its requests, those that were sent to it since it last told included.
    num_outstanding_tokens: what its unfinished requests come to at most, prompts and answers, computed ones included.
    num_known_tokens: how many of the prompt tokens of the request that is routed now it should find in its cache, as
    far as what was sent there before tells; 0 where the policy does not ask for it.
    """

    __slots__ = ("_replica",)
    # The Replica, whose module knows this one.
    _replica: Any

    num_waiting: int = _read("num_waiting")
    num_running: int = _read("num_running")
    num_outstanding_tokens: int = _read("num_outstanding_tokens")
    num_known_tokens: int = _read("num_known_tokens")

    def __init__(self, replica: Any) -> None:
        object.__setattr__(self, "_replica", replica)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set: routing policies read replicas")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} cannot be deleted: routing policies read replicas")

    def __repr__(self) -> str:
        return (
            f"ReplicaView(waiting={self.num_waiting}, running={self.num_running}, "
            f"outstanding={self.num_outstanding_tokens}, known={self.num_known_tokens})"
        )


class RoutingPolicy(ABC):
    """Decides which of several engines, equal replicas, gets a request; who asks checks every answer.

    One object serves one group of replicas. A thousand of them are normal, and ``replicas`` is the same sequence at
    every call.

    asks_prefixes: whether it reads ``ReplicaView.num_known_tokens``, which takes an index of all prompts to know.
    """

    asks_prefixes: bool = False

    @abstractmethod
    def route(self, request: RequestView, replicas: Sequence[ReplicaView]) -> int:
        """The place among ``replicas`` of the one that ``request`` goes to, from 0 on. It has just arrived."""

    def on_finished(self, request: RequestView, replica: int) -> None:  # noqa: B027
        """``request`` ended for whatever reason; ``replica`` is the place of the one that it went to."""
