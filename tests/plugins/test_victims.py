"""Victim rules: who pays when memory runs out."""

from __future__ import annotations

import random

import pytest
from model_free import ModelFree

from paged_backend.errors import ConfigError
from paged_backend.plugins.batches import Static
from paged_backend.plugins.deadline import Deadline
from paged_backend.plugins.fair import Fair
from paged_backend.plugins.fifo import Fifo
from paged_backend.plugins.priority import Priority
from paged_backend.plugins.starvation_aware import StarvationAware
from paged_backend.plugins.victims import VICTIMS
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams


def view(order: int, computed: int, priority: int, deadline: float | None):
    request = Request(str(order), [1] * 50, SamplingParams(), 0.0, order, priority=priority, deadline=deadline)
    request.num_computed_tokens = computed
    return request.view


RUNNING = [view(0, 9, 1, 3.0), view(1, 4, 5, None), view(2, 4, 5, None), view(3, 20, 0, 9.0)]


@pytest.mark.parametrize(
    ("rule", "order"), [("newest", 3), ("least_computed", 2), ("lowest_priority", 2), ("latest_deadline", 2)]
)
def test_rule_picks_the_newest_of_those_that_fit_it(rule, order):
    assert VICTIMS[rule](RUNNING, 0.0).order == order


@pytest.mark.parametrize("policy", [Fifo, StarvationAware, Deadline, Priority, Fair])
def test_every_policy_takes_a_rule_by_name_or_as_a_function(policy):
    assert policy(victim="least_computed").victim(RUNNING, 0.0).order == 2
    assert policy(victim=lambda running, now: running[0]).victim(RUNNING, 0.0).order == 0
    with pytest.raises(ConfigError, match="newest"):
        policy(victim="oldest")


@pytest.mark.parametrize(
    "policy", [Fifo(), StarvationAware(), Deadline(), Deadline(preempt=True), Priority(preempt=True), Fair(), Static(3)]
)
def test_a_preempted_request_resumes_before_later_arrivals_of_equal_rank(policy):
    engine = ModelFree(policy, num_blocks=10, block_size=2, max_num_seqs=3)
    for _ in range(2):
        engine.add(4, 14, deadline=50.0)
    for _ in range(3):
        engine.step()
    later = engine.add(4, 14, deadline=50.0)
    engine.run()
    starts = engine.start_orders
    preempted = next(order for order in (0, 1) if starts.count(order) > 1)
    assert starts.index(preempted, starts.index(preempted) + 1) < starts.index(later.order)
    engine.assert_sound()


def recomputed(victim: str) -> int:
    engine = ModelFree(Fifo(victim=victim), num_blocks=60, block_size=4, max_num_seqs=16, budget=64)
    engine.blocks.enable_prefix_caching = False
    rng = random.Random(0)
    for _ in range(150):
        engine.add(rng.randint(4, 60), rng.randint(4, 60))
    engine.run()
    engine.assert_sound()
    assert engine.scheduler.num_preemptions > 20
    return engine.scheduler.num_recomputed_tokens


def test_least_computed_wastes_fewer_tokens_than_newest():
    assert recomputed("least_computed") < recomputed("newest")
