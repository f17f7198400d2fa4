"""Requests are sent when they are due, and answered one by one or together."""

from __future__ import annotations

from paged_backend.lab.open_loop import serve
from paged_backend.lab.run import Run
from paged_backend.lab.simulation import VirtualServer
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.virtual_engine import VirtualEngine
from paged_backend.plugins.batches import Window
from paged_backend.plugins.eviction import Lru
from paged_backend.plugins.fifo import Fifo
from paged_backend.policies import SchedulingPolicy


def run(
    *requests: TraceRequest, together: bool = False, policy: SchedulingPolicy | None = None, blocks: int = 20
) -> Run:
    """Through an engine of two seats whose steps take a second."""
    engine = VirtualEngine(
        Fifo() if policy is None else policy,
        Lru,
        lambda step: 1.0,
        num_blocks=blocks,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    return serve(VirtualServer(engine), requests, together=together)


def request(arrival: float, prompt: int, output: int) -> TraceRequest:
    return TraceRequest(arrival, range(1000 * prompt, 1001 * prompt), output)


def test_times_count_from_when_a_request_was_due():
    # It falls due within a step, and joins the next one.
    first, second = run(request(0.0, 4, 3), request(0.5, 5, 1)).outcomes
    assert (first.first_token, first.finished) == (1.0, 3.0)
    assert (second.arrival, second.first_token, second.finished) == (0.5, 2.0, 2.0)


def test_nothing_happens_until_somebody_is_due():
    late = run(request(0.0, 4, 1), request(10.0, 5, 2)).outcomes[1]
    assert (late.first_token, late.finished) == (11.0, 12.0)


def test_held_answers_come_when_nobody_runs():
    outcomes = run(request(0.0, 4, 1), request(0.0, 5, 4), together=True).outcomes
    assert [outcome.first_token for outcome in outcomes] == [1.0, 1.0]
    assert [outcome.finished for outcome in outcomes] == [4.0, 4.0]


def test_a_policy_that_holds_requests_back_is_waited_for():
    window = Window(batch=2, window_ms=3000)
    outcomes = run(request(0.0, 4, 1), request(9.0, 5, 1), policy=window).outcomes
    assert [outcome.first_token for outcome in outcomes] == [4.0, 10.0]


def test_memory_is_what_requests_hold_after_each_step():
    memory = run(request(0.0, 4, 2)).memory
    # A block for the prompt and one for what follows; then nothing.
    assert [tuple(moment) for moment in memory] == [(1.0, 8, 4), (2.0, 0, 0)]


def test_what_is_computed_again_counts_as_waste():
    requests = [request(0.0, 8, 12), request(0.0, 9, 12)]
    tight, roomy = run(*requests, blocks=7), run(*requests)
    assert tight.num_preemptions > 0
    assert tight.useful_tokens == roomy.useful_tokens == roomy.computed_tokens == 8 + 11 + 9 + 11
    assert tight.computed_tokens > tight.useful_tokens
