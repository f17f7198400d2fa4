"""What steps cost, learned from the running batch."""

from __future__ import annotations

import random

import pytest

from paged_backend.plugins.service_time import StepCost


def loaded(cost: StepCost, steps: int = 400) -> float:
    """Busy steps of 8 ms, 0.25 ms a decode and 0.05 ms a prompt token; returns their mean seconds."""
    rng, total = random.Random(0), 0.0
    for _ in range(steps):
        num_decodes, num_prompt_tokens = rng.randint(40, 48), rng.choice([0, 0, rng.randint(1, 500)])
        seconds = 0.008 + 0.00025 * num_decodes + 0.00005 * num_prompt_tokens
        cost.observe(num_decodes, num_prompt_tokens, seconds)
        total += seconds
    return total / steps


def test_nothing_is_known_before_a_step_was_seen():
    assert StepCost().seconds(1000, 1000) == 0
    assert StepCost().prompt_weight == 1


def test_a_prompt_token_is_told_from_the_decodes_beside_it():
    cost = StepCost()
    loaded(cost)
    assert cost.prompt_token_s == pytest.approx(0.00005, rel=0.02)


def test_a_decode_step_takes_what_the_steps_of_the_running_batch_take_prompts_included():
    cost = StepCost()
    mean = loaded(cost)
    assert cost.seconds(0, 100) == pytest.approx(100 * mean, rel=0.1)


def test_after_idling_a_request_is_taken_to_run_alone_until_steps_tell_otherwise():
    cost = StepCost()
    loaded(cost)
    cost.idle()
    assert 0.008 < cost.decode_step_s < 0.012
    cost.observe(3, 0, 0.03)
    assert cost.decode_step_s == 0.03


def test_a_prompt_token_weighs_what_it_costs_beside_an_output_token_of_the_batch():
    cost = StepCost()
    loaded(cost)
    assert cost.prompt_weight == pytest.approx(0.00005 / (0.008 / 44 + 0.00025), rel=0.05)


@pytest.mark.parametrize("steps", [[(1, 0, 0.01), (0, 1, 0.001)], [(0, 100, 0.2)], [(4, 100, 0.2)], [(0, 9, 0.0)] * 3])
def test_no_cost_is_negative_or_above_what_all_took(steps):
    cost = StepCost()
    for step in steps:
        cost.observe(*step)
    assert 0 <= cost.prompt_token_s * sum(tokens for _, tokens, _ in steps) <= sum(s for *_, s in steps)
    assert cost.decode_step_s >= 0
    cost.idle()
    assert cost.decode_step_s >= 0
