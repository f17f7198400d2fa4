"""Costs of steps are found again from steps, and read as they were written."""

from __future__ import annotations

import random
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from paged_backend.errors import ConfigError
from paged_backend.lab.step_cost import PRESETS, StepCost, step_cost
from paged_backend.stats import StepStats

COST = StepCost(0.008, 0.00025, 0.00005, 0.0000001)


def steps_of(cost: StepCost, count: int = 60, noise: float = 0.0) -> list[StepStats]:
    draw, steps = random.Random(0), []
    for step in range(count):
        decodes, prefill, context = (
            draw.randrange(1, 40),
            draw.choice([0, 0, draw.randrange(500)]),
            draw.randrange(9000),
        )
        seconds = cost.seconds(decodes, prefill, context) * draw.uniform(1 - noise, 1 + noise)
        steps.append(
            StepStats(
                step,
                0.0,
                0,
                decodes,
                decodes,
                prefill,
                context,
                decodes,
                0,
                0,
                0.0,
                0.0,
                0.75 * seconds,
                0.0,
                0.25 * seconds,
            )
        )
    return steps


def test_a_fit_finds_the_costs_that_steps_were_made_of() -> None:
    assert astuple(StepCost.fit(steps_of(COST))) == pytest.approx(astuple(COST), rel=1e-6)


def test_a_fit_of_noisy_steps_comes_near() -> None:
    assert astuple(StepCost.fit(steps_of(COST, 500, noise=0.1)))[:3] == pytest.approx(astuple(COST)[:3], rel=0.1)


def test_what_would_cost_less_than_nothing_costs_nothing() -> None:
    shorter_with_context = [replace(s, forward_s=s.forward_s - 2e-7 * s.num_context_tokens) for s in steps_of(COST)]
    fitted = StepCost.fit(shorter_with_context)
    assert fitted.context_token_s == 0
    assert min(astuple(fitted)) >= 0


def test_steps_that_are_all_alike_tell_nothing() -> None:
    with pytest.raises(ConfigError, match="60 steps do not tell the costs of decodes, prompt tokens and context apart"):
        StepCost.fit([steps_of(COST)[0]] * 60)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(COST.to_json())
    assert step_cost(str(path)) == COST
    assert step_cost("gpu-7b") == PRESETS["gpu-7b"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "costs: not JSON"),
        ("[1]", r"costs: must be a JSON object of fixed_s, decode_s, prefill_token_s, context_token_s in seconds"),
        ('{"fixed_s": 1, "decode_s": 1}', "costs: must be a JSON object"),
        (
            '{"fixed_s": 1, "decode_s": -1, "prefill_token_s": 1}',
            "costs: decode_s must be a finite number of at least 0",
        ),
        ('{"fixed_s": 0, "decode_s": 0, "prefill_token_s": 0}', "a step must take time"),
    ],
)
def test_costs_that_cannot_be_are_refused_in_words(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        StepCost.from_json(text, "costs")


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="device 'abacus' is unknown; choose from gpu-7b, cpu-135m"):
        step_cost("abacus")


def test_the_time_alone_is_that_of_the_steps_it_takes() -> None:
    cost, others, budget, prompt, output = StepCost(1.0, 0.1, 0.01, 0.0), 3, 100, 250, 4
    prefills = sum(cost.seconds(others, tokens) for tokens in (100, 100, 50))
    assert cost.alone(prompt, output, others, budget) == pytest.approx(prefills + 3 * cost.seconds(others + 1, 0))
