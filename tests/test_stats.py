"""Numbers that follow from others: slots from blocks, waste from what is filled, overhead from the parts of a step."""

from __future__ import annotations

import dataclasses

import pytest

from paged_backend.stats import GroupStats, StepStats

GROUP = GroupStats(
    rule="full",
    num_layers=2,
    block_size=16,
    num_blocks=10,
    num_owned_blocks=4,
    num_cached_blocks=3,
    num_free_blocks=3,
    num_filled_slots=50,
    bytes_per_token=8,
    num_evictions=0,
    mean_allocated_slots=40.0,
    mean_filled_slots=32.5,
)


def test_slots_are_those_of_the_blocks():
    assert (GROUP.num_reserved_slots, GROUP.num_allocated_slots, GROUP.num_cached_slots) == (160, 64, 48)


def test_what_is_allocated_and_not_filled_is_wasted():
    assert GROUP.num_wasted_slots == 14
    assert GROUP.mean_wasted_slots == 7.5


def test_the_overhead_of_a_step_is_all_but_its_forward_pass():
    whole = [field.name for field in dataclasses.fields(StepStats) if not field.name.endswith("_s")]
    step = StepStats(
        **dict.fromkeys(whole, 0), schedule_s=0.1, batch_s=0.02, forward_s=9.0, sample_s=0.003, update_s=0.0004
    )
    assert step.overhead_s == pytest.approx(0.1234)
