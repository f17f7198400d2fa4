"""OpenLoop: requests are sent when they are due, however busy whoever serves them is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from paged_backend.engine.scheduler import Scheduler
from paged_backend.lab.replay import Outcome
from paged_backend.lab.run import KVMoment, Run, useful_tokens
from paged_backend.lab.trace import TraceRequest
from paged_backend.memory.block_manager import BlockManager
from paged_backend.outputs import RequestOutput
from paged_backend.stats import EngineStats

OnFinished = Callable[[int], None]


class Server(Protocol):
    """An engine as the loop drives it, idle when it begins. Times are seconds since then."""

    @property
    def blocks(self) -> BlockManager: ...

    @property
    def scheduler(self) -> Scheduler: ...

    def clock(self) -> float:
        """The time."""

    def wait_until(self, moment: float) -> None:
        """Let time pass."""

    def add(self, request: TraceRequest) -> str:
        """Queue a request that generates as many tokens as it did; returns its id."""

    def step(self, drain: bool) -> Sequence[RequestOutput]:
        """One step; what got a token or ended."""

    def held_until(self) -> float | None:
        """When to step again if the policy holds everybody back, else None."""

    def first_token_time(self, output: RequestOutput) -> float:
        """When the first token was there."""

    def stats(self) -> EngineStats:
        """Numbers since the engine began."""


def serve(
    server: Server, trace: Sequence[TraceRequest], *, together: bool, on_finished: OnFinished = lambda count: None
) -> Run:
    """``trace`` to its end, each request when it is due.

    together: whether answers are held until nobody runs, as those of a batch are that is answered as a whole. What
    falls due within a step joins after it; its time counts from when it was due. Raises what a request failed with.
    """
    before = server.stats()
    arriving = deque(enumerate(trace))
    orders: dict[str, int] = {}
    computed: list[RequestOutput] = []
    answered: dict[str, tuple[RequestOutput, float]] = {}
    memory: list[KVMoment] = []
    while arriving or len(answered) < len(orders):
        now = server.clock()
        while arriving and arriving[0][1].arrival <= now:
            order, request = arriving.popleft()
            orders[server.add(request)] = order
        if len(answered) == len(orders):
            server.wait_until(arriving[0][1].arrival)
            continue
        for output in server.step(not arriving):
            if output.error is not None:
                raise output.error
            if output.finished:
                computed.append(output)
        now = server.clock()
        memory.append(_memory(server.blocks, now))
        if computed and not (together and server.scheduler.running):
            answered.update((output.request_id, (output, now)) for output in computed)
            on_finished(len(computed))
            computed = []
        held_until = server.held_until()
        if held_until is not None:
            server.wait_until(min(held_until, arriving[0][1].arrival) if arriving else held_until)
    outcomes = []
    for request_id, order in sorted(orders.items(), key=lambda item: item[1]):
        (output, finished), request = answered[request_id], trace[order]
        first, counts = server.first_token_time(output), (len(request.prompt), len(output.token_ids))
        outcomes.append(Outcome(request.arrival, first, finished, *counts, None, request.client_id, "length"))
    after, useful = server.stats(), useful_tokens(outcomes)
    return Run(
        outcomes,
        server.clock(),
        memory,
        useful + after.num_recomputed_tokens - before.num_recomputed_tokens,
        useful,
        after.num_preemptions - before.num_preemptions,
        after.num_cached_tokens - before.num_cached_tokens,
    )


def _memory(blocks: BlockManager, now: float) -> KVMoment:
    allocated = [pool.num_owned * blocks.block_size for pool in blocks.pools]
    filled = [slots - blocks.num_unfilled_slots(g) for g, slots in enumerate(allocated)]
    return KVMoment(now, sum(allocated), sum(filled))
