"""Replay: the requests of a trace through the scheduler of engines, on a virtual clock."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paged_backend.checks import checked_amount, checked_int, describe
from paged_backend.config import MAX_BLOCK_SIZE, MAX_NUM_SEQS, MAX_TOKENS
from paged_backend.errors import ConfigError
from paged_backend.lab.service_gap import OUTPUT_COST, PROMPT_COST, ServiceGap, clients_of
from paged_backend.lab.step_cost import StepCost
from paged_backend.lab.trace import TraceRequest, checked_time
from paged_backend.lab.usage import Usage
from paged_backend.lab.virtual_engine import VirtualEngine
from paged_backend.lab.yardsticks import Yardsticks
from paged_backend.outputs import FinishReason, RequestOutput
from paged_backend.policies import SchedulingPolicy
from paged_backend.policy.plugin_manager import PluginManager
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams
from paged_backend.stats import EngineStats

LengthKnowledge = Literal["oracle", "max", "quantile"]
LENGTH_KNOWLEDGE = ("oracle", "max", "quantile")
# How many times as long as in a batch that is half full a request may take, and the seconds on top.
DEADLINES = {"tight": 2.0, "loose": 5.0}
DEADLINE_SLACK_S = 0.5


@dataclass(frozen=True)
class Machine:
    """What requests run on. cost: of its steps. num_blocks: of memory. Raises ConfigError for what cannot be."""

    cost: StepCost
    seats: int = 48
    num_blocks: int = 16384
    block_size: int = 16
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        checked_int("seats", self.seats, 1, MAX_NUM_SEQS)
        checked_int("memory", self.num_blocks, 1, MAX_TOKENS)
        checked_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        checked_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_TOKENS)


@dataclass(frozen=True)
class Policies:
    """Which policies decide, by name, a yardstick's too, or import path, with their options."""

    scheduler: str = "fifo"
    eviction: str = "lru"
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    eviction_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request; times in seconds since the trace began, None for what never happened.

    reason: why it ended, ``"refused"`` for one that could never fit.
    """

    arrival: float
    first_token: float | None
    finished: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    deadline: float | None
    client_id: str | None
    reason: FinishReason | Literal["refused"]


@dataclass(frozen=True)
class Replayed:
    """What became of a trace under some policies.

    outcomes: in order of arrival. seconds: from the first arrival to the last end. usage: of memory over time.
    service_gap: see ServiceGap; None with fewer than two clients. stats: the engine's, whose policy errors tell of
    policies that broke their contracts.
    """

    policies: Policies
    outcomes: list[Outcome]
    seconds: float
    usage: Usage
    service_gap: float | None
    stats: EngineStats


def replay(
    trace: Sequence[TraceRequest],
    machine: Machine,
    policies: Policies = Policies(),
    *,
    length_knowledge: LengthKnowledge = "oracle",
    deadline: float | str | None = None,
) -> Replayed:
    """Let the requests of ``trace`` arrive as they did, and run as the policies say.

    length_knowledge: what policies are told of the lengths of outputs: ``"oracle"`` the true ones, as ``max_tokens``;
    ``"max"`` the trace's ``max_tokens``, else its longest output; ``"quantile"`` that too, and policies with an option
    ``predict`` learn from what ended. deadline: of requests that have none in the trace, ``"tight"``, ``"loose"`` or a
    multiple of the time that a request takes when half of the seats are taken, half a second more.

    The same arguments give the same result. Raises ConfigError and UnknownPolicy for what cannot be used.
    """
    return Replay(trace, machine, policies, length_knowledge=length_knowledge, deadline=deadline).run()


def at_load(trace: Sequence[TraceRequest], machine: Machine, load: float) -> list[TraceRequest]:
    """``trace`` at another pace, such that so much more arrives than the machine can do: 1 is all that it can.

    What it can do is taken from a replay in which all requests are there at once, first come, first served.
    """
    return at_loads(trace, machine, [load])[0]


def at_loads(trace: Sequence[TraceRequest], machine: Machine, loads: Sequence[float]) -> list[list[TraceRequest]]:
    """``trace`` at several loads."""
    return paced(trace, loads, lambda at_once: replay(at_once, machine).seconds)


def paced(
    trace: Sequence[TraceRequest], loads: Sequence[float], seconds_of: Callable[[list[TraceRequest]], float]
) -> list[list[TraceRequest]]:
    """``trace`` at several loads of what can do it in ``seconds_of`` it, were all requests there at once."""
    loads = [checked_amount("load", load, positive=True) for load in loads]
    span = trace[-1].arrival
    if not span:
        raise ConfigError("the trace's requests arrive all at once, so that no load can be made of them")
    capacity_s = seconds_of([replace(request, arrival=0.0) for request in trace])
    return [
        [replace(request, arrival=checked_time(request.arrival * capacity_s / load / span)) for request in trace]
        for load in loads
    ]


class Arrivals:
    """The requests of a trace on their way to one engine or to several equal ones, and what is known of them.

    unfinished: those that came and have not ended, by id. clients: how many requests each has.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        machine: Machine,
        policies: Policies,
        *,
        length_knowledge: LengthKnowledge = "oracle",
        deadline: float | str | None = None,
    ) -> None:
        if length_knowledge not in LENGTH_KNOWLEDGE:
            raise ConfigError(
                f"length_knowledge={describe(length_knowledge)} is unknown; choose from {', '.join(LENGTH_KNOWLEDGE)}"
            )
        self.trace = trace
        self.machine = machine
        self.policies = policies
        self.learns_lengths = length_knowledge == "quantile"
        self._knows_lengths = length_knowledge == "oracle"
        self._deadline = _multiple(deadline)
        self._longest = max(request.output_length for request in trace)
        self.plugins = PluginManager(
            [Yardsticks(trace, machine.cost, machine.seats, machine.block_size, self._has_yet_to_begin)]
        )
        # Nothing listens to a replay.
        self.listeners = PluginManager(load_entry_points=False)
        self.clients = clients_of([request.client_id for request in trace])
        self.unfinished: dict[str, Request] = {}
        self._to_come = deque(enumerate(trace))

    def __len__(self) -> int:
        """How many have yet to come."""
        return len(self._to_come)

    @property
    def next_time(self) -> float:
        """When the next one comes; only to be asked where one does."""
        return self._to_come[0][1].arrival

    def take(self) -> tuple[int, TraceRequest]:
        """The next one, with its place in the trace."""
        return self._to_come.popleft()

    def _has_yet_to_begin(self, order: int) -> bool:
        if order >= len(self.trace) - len(self._to_come):
            return True
        request = self.unfinished.get(str(order))
        return request is not None and request.is_waiting

    def request(self, order: int, known: TraceRequest) -> Request:
        """What an engine gets to know of the one at this place."""
        most = (
            known.output_length if self._knows_lengths else max(known.output_length, known.max_tokens or self._longest)
        )
        deadline_s = known.deadline_s
        if deadline_s is None and self._deadline is not None:
            machine = self.machine
            deadline_s = DEADLINE_SLACK_S + self._deadline * machine.cost.alone(
                len(known.prompt), known.output_length, machine.seats // 2, machine.max_num_batched_tokens
            )
        return Request(
            str(order),
            known.prompt,
            SamplingParams(max_tokens=most),
            known.arrival,
            order,
            priority=known.priority,
            deadline=None if deadline_s is None else known.arrival + deadline_s,
            client_id=known.client_id,
            cache_salt=known.cache_salt,
        )


class ReplayEngine:
    """A VirtualEngine that some of the requests of a trace come to, and what becomes of these."""

    def __init__(self, arrivals: Arrivals) -> None:
        machine, policies, plugins = arrivals.machine, arrivals.policies, arrivals.plugins
        self._arrivals = arrivals
        self.virtual = VirtualEngine(
            _scheduler(plugins, policies, learns=arrivals.learns_lengths),
            plugins.eviction_factory(policies.eviction, policies.eviction_options),
            machine.cost.of,
            num_blocks=machine.num_blocks,
            block_size=machine.block_size,
            max_num_seqs=machine.seats,
            max_num_batched_tokens=machine.max_num_batched_tokens,
            enable_prefix_caching=machine.enable_prefix_caching,
            plugins=arrivals.listeners,
        )
        self.outcomes: dict[int, Outcome] = {}
        self._usage = Usage(machine.num_blocks)
        self._gap = ServiceGap(arrivals.clients) if len(arrivals.clients) > 1 else None

    def refuses(self, order: int, known: TraceRequest) -> bool:
        """Whether a request could never fit, which is booked as its outcome."""
        if self.virtual.blocks.shortage(len(known.prompt) + known.output_length) is None:
            return False
        self.outcomes[order] = Outcome(
            known.arrival, None, None, len(known.prompt), 0, None, known.client_id, "refused"
        )
        return True

    def enqueue(self, request: Request, output_length: int) -> None:
        """A request comes that generates so many tokens."""
        self._arrivals.unfinished[request.request_id] = request
        self.virtual.enqueue(request, output_length)
        if self._gap is not None:
            self._gap.waits(request.client_id)

    def step(self) -> list[Request]:
        """One step; returns the requests that ended."""
        engine, arrivals = self.virtual, self._arrivals
        stepped = engine.step(drain=not arrivals)
        self._usage.record(engine.now, engine.blocks.pools[0].num_owned, engine.blocks.pools[0].num_cached)
        if self._gap is not None:
            self._watch_service(stepped.step.admitted, stepped.step.preempted, stepped.outputs)
        ended: list[Request] = []
        if stepped.stats.num_finished:
            for output in stepped.outputs:
                if output.finish_reason is not None:
                    ended.append(arrivals.unfinished.pop(output.request_id))
                    self._end(ended[-1])
        held_until = engine.scheduler.held_until
        if held_until is not None:
            # The policy keeps everybody back, until then or until somebody comes.
            engine.now = min(held_until, arrivals.next_time)
        return ended

    def _watch_service(
        self, admitted: Sequence[Request], preempted: Sequence[tuple[Request, int]], outputs: Sequence[RequestOutput]
    ) -> None:
        gap = self._gap
        assert gap is not None
        for request in admitted:
            gap.waits(request.client_id, -1)
            if request.num_preemptions == 0:
                gap.serve(request.client_id, PROMPT_COST * request.num_prompt_tokens)
        for request, _ in preempted:
            gap.waits(request.client_id)
        for output in outputs:
            client = self._arrivals.unfinished[output.request_id].client_id
            gap.serve(client, OUTPUT_COST * len(output.new_token_ids))
            if output.finish_reason == "timeout":
                gap.waits(client, -1)
        gap.look()

    def _end(self, request: Request) -> None:
        output, metrics = request.output, request.output.metrics
        assert output.finish_reason is not None
        self.outcomes[request.order] = Outcome(
            request.arrival_time,
            metrics.first_token_time,
            metrics.finished_time,
            request.num_prompt_tokens,
            len(output.token_ids),
            request.deadline,
            request.client_id,
            output.finish_reason,
        )

    def result(self, seconds: float) -> Replayed:
        """What became of those that came here; ``seconds`` since the trace began."""
        return Replayed(
            self._arrivals.policies,
            [self.outcomes[order] for order in sorted(self.outcomes)],
            seconds,
            self._usage,
            None if self._gap is None else self._gap.largest,
            self.virtual.stats(),
        )


class Replay:
    """One trace on its way through a VirtualEngine, which is ``engine``."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        machine: Machine,
        policies: Policies,
        *,
        length_knowledge: LengthKnowledge = "oracle",
        deadline: float | str | None = None,
    ) -> None:
        self._arrivals = Arrivals(trace, machine, policies, length_knowledge=length_knowledge, deadline=deadline)
        self._replayed = ReplayEngine(self._arrivals)
        self.engine = self._replayed.virtual

    def run(self) -> Replayed:
        """Until the last request has ended."""
        engine, arrivals = self.engine, self._arrivals
        with uncollected():
            while arrivals or engine.requests:
                while arrivals and arrivals.next_time <= engine.now:
                    order, known = arrivals.take()
                    if not self._replayed.refuses(order, known):
                        self._replayed.enqueue(arrivals.request(order, known), known.output_length)
                if engine.requests:
                    self._replayed.step()
                elif arrivals:
                    engine.now = max(engine.now, arrivals.next_time)
        return self._replayed.result(engine.now)


@contextmanager
def uncollected() -> Generator[None]:
    """Without searches for garbage: a replay leaves none, and a cache's books are large to search."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _multiple(deadline: float | str | None) -> float | None:
    if deadline is None:
        return None
    if isinstance(deadline, str):
        if deadline in DEADLINES:
            return DEADLINES[deadline]
        try:
            deadline = float(deadline)
        except ValueError as error:
            raise ConfigError(
                f"deadline={describe(deadline)} is unknown; choose from {', '.join(DEADLINES)}, or give a multiple"
            ) from error
    return checked_amount("deadline", deadline, positive=True)


def _scheduler(plugins: PluginManager, policies: Policies, *, learns: bool) -> SchedulingPolicy:
    options = dict(policies.scheduler_options)
    if learns and "predict" not in options and plugins.takes_option("scheduler", policies.scheduler, "predict"):
        options["predict"] = "quantile"
    return plugins.scheduler(policies.scheduler, options)
