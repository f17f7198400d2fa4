"""All of an engine but the model: what is planned, booked and told without one."""

from __future__ import annotations

import pytest

from paged_backend.engine.scheduler import ScheduledStep
from paged_backend.lab.virtual_engine import VirtualEngine
from paged_backend.plugins.eviction import Lru
from paged_backend.plugins.fifo import Fifo
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams


def one_second(step: ScheduledStep) -> float:
    return 1.0


def virtual(**options: bool) -> VirtualEngine:
    return VirtualEngine(
        Fifo(), Lru, one_second, num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, **options
    )


def enqueue(engine: VirtualEngine, order: int, output_length: int = 2) -> Request:
    params = SamplingParams(max_tokens=output_length)
    request = Request(str(order), list(range(1, 10)), params, engine.now, order)
    engine.enqueue(request, output_length)
    return request


def run(engine: VirtualEngine) -> None:
    while engine.scheduler.has_work():
        engine.step()


def test_requests_run_to_their_ends_and_give_their_blocks_back():
    engine = virtual()
    requests = [enqueue(engine, order) for order in range(3)]
    run(engine)
    assert [request.output.finish_reason for request in requests] == ["length"] * 3
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    engine.blocks.check_integrity()


def test_no_more_requests_run_at_once_than_there_are_seats():
    engine = virtual()
    for order in range(3):
        enqueue(engine, order)
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)


@pytest.mark.parametrize(("caching", "num_cached"), [(True, 8), (False, 0)])
def test_a_prompt_that_was_seen_is_reused_where_prefixes_are_kept(caching: bool, num_cached: int):
    engine = virtual(enable_prefix_caching=caching)
    enqueue(engine, 0)
    run(engine)
    again = enqueue(engine, 1)
    run(engine)
    assert again.output.metrics.num_cached_tokens == num_cached


def test_the_clock_may_be_set_forward_between_steps():
    engine = virtual()
    engine.now = 5.0
    request = enqueue(engine, 0)
    run(engine)
    assert request.output.metrics.arrival_time == 5.0
    assert (request.output.metrics.finished_time, engine.now) == (7.0, 7.0)


def test_a_token_takes_one_byte_in_its_stats():
    assert virtual().stats().reserved_bytes == 16 * 4
