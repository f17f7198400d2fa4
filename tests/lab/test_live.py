"""Requests in real time, through an engine and through stock ``generate``."""

from __future__ import annotations

import pytest
from tiny_models import make_tiny

from paged_backend.engine.engine import Engine
from paged_backend.lab.live import run_on_engine, run_on_stock
from paged_backend.lab.trace import TraceRequest


@pytest.fixture(scope="module")
def model():
    return make_tiny("llama")


def test_an_engine_is_sent_each_request_when_it_is_due(model):
    trace = [TraceRequest(0.0, [1, 2, 3], 4), TraceRequest(0.2, [4, 5], 3)]
    with Engine(model, max_num_seqs=2, kv_cache_memory="1MiB") as engine:
        run = run_on_engine(engine, trace)
        again = run_on_engine(engine, trace, together=True)
    for one in (run, again):
        assert [o.num_output_tokens for o in one.outcomes] == [4, 3]
        assert one.outcomes[1].first_token > 0.2
    assert run.memory[-1].allocated == 0


def test_held_answers_come_when_nobody_runs(model):
    trace = [TraceRequest(0.0, [1, 2, 3], 2), TraceRequest(0.0, [4, 5], 30)]
    with Engine(model, max_num_seqs=2, kv_cache_memory="1MiB", scheduler="static") as engine:
        run = run_on_engine(engine, trace, together=True)
    assert run.outcomes[0].finished == run.outcomes[1].finished
    assert run.outcomes[0].first_token < run.outcomes[0].finished


def test_stock_generates_as_many_tokens_as_the_longest_wants(model):
    run = run_on_stock(model, [TraceRequest(0.0, [1, 2, 3], 2), TraceRequest(0.0, [4], 5)], batch=2)
    # A moment for each token, and the end.
    assert len(run.memory) == 6
    assert run.memory[0].allocated == 6
    assert run.outcomes[0].finished == run.outcomes[1].finished == run.memory[-1].time
