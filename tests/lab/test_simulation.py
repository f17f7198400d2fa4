"""A simulated bench runs padded batches and the engine's own scheduler on one clock."""

from __future__ import annotations

import pytest

from paged_backend.lab.bench import Bench, Measured


def of(simulated: Bench, name: str) -> Measured:
    return next(measured for measured in simulated.measured if measured.mode.name == name)


def test_every_request_is_answered_in_every_mode(simulated):
    for measured in simulated.measured:
        for run in (measured.saturated, measured.arriving):
            assert len(run.outcomes) == 48
            assert all(o.arrival < o.first_token <= o.finished <= run.seconds for o in run.outcomes)


def test_all_modes_serve_the_same_requests(simulated):
    shapes = {
        tuple((o.num_prompt_tokens, o.num_output_tokens) for o in m.saturated.outcomes) for m in simulated.measured
    }
    arrivals = {tuple(o.arrival for o in m.arriving.outcomes) for m in simulated.measured}
    assert len(shapes) == len(arrivals) == 1


def test_the_rate_is_what_static_batches_of_stock_can_do(simulated):
    assert simulated.rate == pytest.approx(48 / of(simulated, "stock-static").saturated.seconds)


def test_batches_are_answered_as_a_whole_but_for_the_continuous_mode(simulated):
    for name in ("stock-static", "static"):
        assert len({o.finished for o in of(simulated, name).saturated.outcomes}) == 6
    assert len({o.finished for o in of(simulated, "continuous").saturated.outcomes}) > 20


def test_padding_is_told_from_batching(simulated):
    assert of(simulated, "stock-static").saturated.waste > 0.2
    assert of(simulated, "static").saturated.waste == of(simulated, "continuous").saturated.waste == 0.0
    static, ours, continuous = (
        of(simulated, name).saturated.seconds for name in ("stock-static", "static", "continuous")
    )
    assert continuous < ours < static
