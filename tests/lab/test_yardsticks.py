"""Yardsticks know the trace, keep to their rules, and are names in replays only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab_cases import watch

from paged_backend.errors import UnknownPolicy
from paged_backend.lab.replay import Machine, Policies, Replay
from paged_backend.lab.step_cost import StepCost
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.yardsticks import EVICTIONS, SCHEDULERS
from paged_backend.policy.plugin_manager import PluginManager

# A prompt token takes as long as a decode beside its share of the fixed time.
MACHINE = Machine(StepCost(0.0, 0.1, 0.1), seats=1, num_blocks=1000, block_size=4, max_num_batched_tokens=100)


def trace_of(*lengths: tuple[int, int], deadlines: tuple[float, ...] = ()) -> list[TraceRequest]:
    """Requests that are there at once, of so many prompt and output tokens; none shares tokens with another."""
    return [
        TraceRequest(0.0, range(1000 * n, 1000 * n + prompt), output, deadline_s=deadlines[n] if deadlines else None)
        for n, (prompt, output) in enumerate(lengths)
    ]


def order_of(trace: list[TraceRequest], scheduler: str, machine: Machine = MACHINE, **options: str) -> list[int]:
    """Who began in which order."""
    run = Replay(trace, machine, Policies(scheduler), **options)  # type: ignore[arg-type]
    log = watch(run.engine.scheduler)
    assert run.run().stats.policy_errors == {}
    return [order for entry in log for order in entry[3]]


@pytest.mark.parametrize("length_knowledge", ["oracle", "max", "quantile"])
def test_oracle_sjf_starts_the_least_prompt_and_output_first_whatever_others_are_told(length_knowledge: str) -> None:
    trace = trace_of((10, 30), (25, 10), (5, 3), (2, 40))
    assert order_of(trace, "oracle_sjf", length_knowledge=length_knowledge) == [2, 1, 0, 3]


def test_oracle_sjf_counts_the_fixed_time_of_steps_by_the_seats_that_share_it() -> None:
    trace = trace_of((40, 2), (10, 10))
    few = replace(MACHINE, cost=StepCost(1.0, 0.1, 0.1))
    assert order_of(trace, "oracle_sjf", few) == [0, 1]
    assert order_of(trace, "oracle_sjf", replace(few, seats=50, max_num_batched_tokens=1)) == [1, 0]


def test_fifo_shed_gives_up_who_cannot_be_in_time_and_starts_the_others_by_arrival() -> None:
    trace = trace_of((10, 20), (10, 20), (10, 5), (10, 5), (10, 5), deadlines=(9.0, 4.0, 9.0, 4.6, 9.0))
    assert order_of(trace, "fifo_shed") == [0, 2, 4]


def test_moore_hodgson_leaves_the_longest_out_for_two_that_are_due_later() -> None:
    # Steps have been seen by the time that the first one ends; the long one is due first and could be in time alone.
    trace = trace_of((1, 20), (1, 50), (1, 25), (1, 25), deadlines=(3.0, 8.0, 9.0, 9.5))
    assert order_of(trace, "deadline") == [0, 1, 2, 3]
    assert order_of(trace, "moore_hodgson")[:3] == [0, 2, 3]


def test_moore_hodgson_starts_by_deadline_while_all_can_be_in_time() -> None:
    trace = trace_of((1, 5), (1, 5), (1, 5), deadlines=(90.0, 80.0, 70.0))
    assert order_of(trace, "moore_hodgson") == [2, 1, 0]


def test_engines_do_not_know_the_names() -> None:
    plugins = PluginManager(load_entry_points=False)
    for kind, names in (("scheduler", SCHEDULERS), ("eviction", EVICTIONS)):
        for name in names:
            assert name not in plugins.names(kind)
    with pytest.raises(UnknownPolicy, match="unknown scheduler 'oracle_sjf'"):
        PluginManager().scheduler("oracle_sjf", {})
