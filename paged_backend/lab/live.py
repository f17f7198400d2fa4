"""Live runs: a workload in real time, through an engine or through stock ``generate``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paged_backend.lab.padded import PaddedServer
from paged_backend.lab.replay import Outcome
from paged_backend.lab.run import KVMoment, Run, useful_tokens
from paged_backend.lab.trace import TraceRequest
from paged_backend.outputs import RequestOutput
from paged_backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine

OnFinished = Callable[[int], None]


def run_on_engine(
    engine: Engine, trace: Sequence[TraceRequest], *, together: bool = False, on_finished: OnFinished = lambda count: None
) -> Run:
    """``trace`` through an idle engine, each request when it is due.

    together: whether answers are held until nobody runs, as those of a batch are that is answered as a whole. What
    falls due within a step joins after it; its time counts from when it was due.
    """
    before, began = engine.stats(), engine.clock()
    arriving = deque(enumerate(trace))
    known: dict[str, tuple[int, TraceRequest]] = {}
    done: list[tuple[RequestOutput, float]] = []
    finished_at: dict[str, float] = {}
    outputs: dict[str, RequestOutput] = {}
    memory: list[KVMoment] = []
    while arriving or known:
        now = engine.clock() - began
        while arriving and arriving[0][1].arrival <= now:
            order, request = arriving.popleft()
            params = SamplingParams(max_tokens=request.output_length, ignore_eos=True, temperature=0.0)
            known[engine.add_request(request.prompt, params)] = (order, request)
        if not engine.has_unfinished_requests:
            _sleep(arriving[0][1].arrival - now)
            continue
        stepped = engine.step(drain=not arriving)
        now = engine.clock() - began
        memory.append(_memory(engine, now))
        for output in stepped:
            if output.error is not None:
                raise output.error
            if output.finished:
                done.append((output, now))
        if done and not (together and engine.scheduler.running):
            for output, _ in done:
                finished_at[output.request_id] = now
                outputs[output.request_id] = output
            on_finished(len(done))
            done = []
        if len(finished_at) == len(known) and not arriving:
            break
        if engine.held_until is not None:
            due = arriving[0][1].arrival if arriving else engine.held_until - began
            _sleep(min(engine.held_until - began, due) - (engine.clock() - began))
    after = engine.stats()
    rows = sorted((order, request, request_id) for request_id, (order, request) in known.items())
    outcomes = [
        Outcome(
            request.arrival,
            (outputs[request_id].metrics.first_token_time or began) - began,
            finished_at[request_id],
            len(request.prompt),
            len(outputs[request_id].token_ids),
            None,
            request.client_id,
            "length",
        )
        for _, request, request_id in rows
    ]
    useful = useful_tokens(outcomes)
    recomputed = after.num_recomputed_tokens - before.num_recomputed_tokens
    return Run(
        outcomes,
        max(finished_at.values()),
        memory,
        useful + recomputed,
        useful,
        after.num_preemptions - before.num_preemptions,
        after.num_cached_tokens - before.num_cached_tokens,
    )


def _memory(engine: Engine, now: float) -> KVMoment:
    blocks = engine.blocks
    allocated = [pool.num_owned * blocks.block_size for pool in blocks.pools]
    filled = [slots - blocks.num_unfilled_slots(g) for g, slots in enumerate(allocated)]
    return KVMoment(now, sum(allocated), sum(filled))


def run_on_stock(
    model: Any,
    trace: Sequence[TraceRequest],
    *,
    batch: int,
    window_s: float | None = None,
    on_finished: OnFinished = lambda count: None,
) -> Run:
    """``trace`` through stock ``generate``, in batches that are padded on the left to their longest."""
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    def sleep_until(moment: float) -> None:
        _sleep(moment - clock())

    def execute(requests: Sequence[TraceRequest]) -> list[float]:
        return _generate(model, requests, clock)

    server = PaddedServer(execute, clock, sleep_until, batch=batch, window_s=window_s, on_finished=on_finished)
    return server.run(trace)


def _generate(model: Any, requests: Sequence[TraceRequest], clock: Callable[[], float]) -> list[float]:
    """When a padded batch began, and when each further token of its rows was there."""
    import torch

    width = max(len(request.prompt) for request in requests)
    longest = max(request.output_length for request in requests)
    input_ids = torch.zeros(len(requests), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, request in enumerate(requests):
        input_ids[row, width - len(request.prompt) :] = torch.as_tensor(list(request.prompt))
        attention_mask[row, width - len(request.prompt) :] = 1
    times = [clock()]

    def note(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        times.append(clock())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        do_sample=False,
        min_new_tokens=longest,
        max_new_tokens=longest,
        pad_token_id=0,
        stopping_criteria=[note],
    )
    return times


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)
