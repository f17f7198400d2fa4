"""Calibration runs steps of every mixture on a real engine and fits costs to them."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from tiny_models import make_tiny

from paged_backend import Engine
from paged_backend.lab import calibration
from paged_backend.lab.step_cost import StepCost
from paged_backend.stats import StepStats


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[StepStats]:
    """The steps that a calibration fits, whose costs are made up."""
    seen: list[StepStats] = []

    def fit(given: list[StepStats]) -> StepCost:
        seen.extend(given)
        return StepCost(1.0, 0.0, 0.0)

    monkeypatch.setattr(calibration.StepCost, "fit", fit)
    return seen


def test_calibration_sees_steps_that_tell_all_costs_apart(steps: list[StepStats]) -> None:
    calibration.calibrate(make_tiny("llama", max_position_embeddings=600))
    assert any(step.num_decodes == 32 and not step.num_prefill_tokens for step in steps)
    assert any(step.num_decodes and step.num_prefill_tokens for step in steps)
    assert any(step.num_prefill_tokens > 400 and not step.num_decodes for step in steps)
    assert len(steps) > 90


def test_calibration_keeps_to_what_the_model_and_the_cache_hold() -> None:
    cost = calibration.calibrate(make_tiny("llama"), max_num_seqs=8, kv_cache_memory="192KiB")
    assert min(astuple(cost)) >= 0
    assert cost.seconds(1, 1) > 0


def test_context_counts_the_tokens_that_a_step_reads() -> None:
    collector = calibration.StepCollector()
    with Engine(make_tiny("llama"), plugins=[collector], max_num_batched_tokens=4) as engine:
        engine.generate([[5] * 6], {"max_tokens": 3, "ignore_eos": True})
    assert [step.num_context_tokens for step in collector.steps] == [4, 6, 7, 8]
