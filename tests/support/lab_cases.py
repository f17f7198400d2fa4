"""A small trace, a live engine that runs it in virtual time, and a record of who was scheduled when."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from clock import Clock
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.engine.scheduler import ScheduledStep, Scheduler
from paged_backend.lab.replay import Machine, Policies, Replay
from paged_backend.lab.step_cost import StepCost
from paged_backend.lab.trace import TraceRequest

COST = StepCost(0.008, 0.001, 0.0005, 0.00001)
# Memory for about two of the four that may run, so that some have to give way.
MACHINE = Machine(COST, seats=4, num_blocks=24, block_size=4, max_num_batched_tokens=16)
# What one token takes in a tiny llama.
BYTES_PER_TOKEN = 768

# One step: when, who decodes, who gets how many prompt tokens, who begins and who is preempted, by order of arrival.
Entry = tuple[float, list[int], list[tuple[int, int]], list[int], list[int]]


def small_trace(num_requests: int = 16, seed: int = 0) -> list[TraceRequest]:
    """Requests of three classes that arrive faster than they can be served, half of them with a common beginning."""
    draw = random.Random(seed)
    common, arrival, trace = [draw.randrange(3, 256) for _ in range(12)], 0.0, []
    for index in range(num_requests):
        own = [draw.randrange(3, 256) for _ in range(draw.randint(3, 30))]
        output_length = draw.randint(2, 24)
        prompt = [*common, *own] if index % 2 else own
        trace.append(TraceRequest(arrival, prompt, output_length, priority=draw.randrange(3), deadline_s=1.0))
        arrival += draw.uniform(0.0, 0.05)
    return trace


def watch(scheduler: Scheduler) -> list[Entry]:
    """A list that fills up with what ``scheduler`` plans."""
    schedule, log = scheduler.schedule, []

    def planned(now: float, **options: Any) -> ScheduledStep:
        step = schedule(now, **options)
        prefills = [(request.order, request.num_scheduled_tokens) for request in step.prefills]
        decodes, admitted = ([request.order for request in part] for part in (step.decodes, step.admitted))
        log.append((now, decodes, prefills, admitted, [request.order for request, _ in step.preempted]))
        return step

    scheduler.schedule = planned  # type: ignore[method-assign]
    return log


def live_engine(clock: Clock, scheduler: str, options: Mapping[str, Any], plugins: Sequence[Any] = ()) -> Engine:
    """An engine of a tiny model on MACHINE, whose steps take as long as COST says."""
    engine = Engine(
        make_tiny("llama"),
        clock=clock,
        plugins=plugins,
        scheduler=scheduler,
        scheduler_options=options,
        max_num_seqs=MACHINE.seats,
        block_size=MACHINE.block_size,
        max_num_batched_tokens=MACHINE.max_num_batched_tokens,
        kv_cache_memory=MACHINE.num_blocks * MACHINE.block_size * BYTES_PER_TOKEN,
    )
    assert engine.blocks.pools[0].num_blocks == MACHINE.num_blocks
    executor = engine._served.executor
    run = executor.run

    def timed(step: ScheduledStep, watch: Any) -> Any:
        seconds = COST.of(step) if step else 0.0
        result = run(step, watch)
        clock.now += seconds
        return result

    executor.run = timed  # type: ignore[method-assign]
    return engine


def run_live(engine: Engine, clock: Clock, trace: Sequence[TraceRequest]) -> None:
    """Let the requests of ``trace`` arrive at ``engine`` as they do in a replay."""
    arriving = deque(trace)
    while arriving or engine.has_unfinished_requests():
        now = clock.now
        while arriving and arriving[0].arrival <= now:
            known = arriving.popleft()
            clock.now = known.arrival
            params = SamplingParams(max_tokens=known.output_length, ignore_eos=True)
            request = engine.prepare(
                list(known.prompt),
                params,
                priority=known.priority,
                deadline_s=known.deadline_s,
                client_id=known.client_id,
            )
            clock.now = now
            engine.enqueue(request)
        if engine.has_unfinished_requests():
            engine.step(drain=not arriving)
        elif arriving:
            clock.now = max(now, arriving[0].arrival)


def replayed_schedule(
    trace: Sequence[TraceRequest], policies: Policies, machine: Machine = MACHINE, **options: Any
) -> list[Entry]:
    """What a replay plans, step by step."""
    replay = Replay(trace, machine, policies, **options)
    log = watch(replay.engine.scheduler)
    replay.run()
    replay.engine.blocks.check_integrity()
    return log
