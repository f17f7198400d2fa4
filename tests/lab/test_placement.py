"""A placement over one replica is a replay, over several it routes by what is known, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab_cases import MACHINE, small_trace

from paged_backend.errors import ConfigError, UnknownPolicy
from paged_backend.lab import placement_report, report
from paged_backend.lab.placement import Placement, Routing, at_load, place
from paged_backend.lab.replay import Policies, replay
from paged_backend.lab.trace import TraceRequest
from paged_backend.policies import RoutingPolicy

ROUTERS = ("random", "round_robin", "least_loaded", "prefix_affinity")


@pytest.mark.parametrize("scheduler", ["fifo", "deadline", "window"])
@pytest.mark.parametrize("router", ROUTERS)
def test_one_replica_tells_the_bytes_that_a_replay_does(router: str, scheduler: str) -> None:
    trace = [*small_trace(), TraceRequest(9.0, range(10_000), 5, client_id="giant")]
    policies = Policies(scheduler)
    placed = place(trace, MACHINE, 1, Routing(router), policies, deadline="tight")
    expected = replay(trace, MACHINE, policies, deadline="tight")
    assert report.to_json(placed.replicas, MACHINE, {}) == report.to_json([expected], MACHINE, {})
    assert placed.outcomes == expected.outcomes
    shared = placement_report.metrics(placed)
    assert {name: shared[name] for name in report.metrics(expected)} == report.metrics(expected)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_ends_on_one_replica_and_its_load_is_gone(router: str) -> None:
    trace = small_trace(40)
    placement = Placement(trace, MACHINE, 3, Routing(router), Policies())
    placed = placement.run()
    assert [outcome.num_output_tokens for outcome in placed.outcomes] == [one.output_length for one in trace]
    assert sum(len(replayed.outcomes) for replayed in placed.replicas) == len(trace)
    assert placed.seconds == max(outcome.finished or 0 for outcome in placed.outcomes)
    for replica in placement.router._views:
        assert (replica.num_waiting, replica.num_running, replica.num_outstanding_tokens) == (0, 0, 0)
    for engine in placement.engines:
        engine.virtual.blocks.check_integrity()


@pytest.mark.parametrize("router", ROUTERS)
def test_the_same_trace_gives_the_same_bytes(router: str) -> None:
    texts = {
        placement_report.to_json([place(small_trace(), MACHINE, 3, Routing(router))], MACHINE, {}) for _ in range(2)
    }
    assert len(texts) == 1


def test_a_step_is_over_before_its_end_is_known() -> None:
    seen = []

    class Watches(RoutingPolicy):
        def route(self, request, replicas):
            seen.append(replicas[0].num_outstanding_tokens)
            return 0

    end = replay([TraceRequest(0.0, range(8), 1)], MACHINE).seconds
    trace = [TraceRequest(time, range(8), 1) for time in (0.0, end, end + 1e-6)]
    placed = place(trace, MACHINE, 2, Routing(Watches))  # type: ignore[arg-type]
    # The second comes as the first ends, the third while the second runs.
    assert seen == [0, 0, 9]
    assert placed.places == [0, 0, 0]


def test_a_router_that_answers_wrongly_is_named_and_replicas_are_taken_in_turn() -> None:
    class Lost(RoutingPolicy):
        def route(self, request, replicas):
            return len(replicas)

    trace = small_trace(6)
    placed = place(trace, MACHINE, 3, Routing(Lost))  # type: ignore[arg-type]
    assert placed.places == [0, 1, 2, 0, 1, 2]
    assert [(name.rpartition(".")[2], count) for name, count in placed.policy_errors.items()] == [("route", 6)]


def test_prefixes_are_found_more_often_where_they_were_sent_before() -> None:
    shared = [TraceRequest(n * 2.0, [1000 * (n % 3) + k for k in range(40)], 2) for n in range(24)]
    rates = [
        placement_report.metrics(place(shared, replace(MACHINE, num_blocks=60), 4, Routing(router)))["prefix_hit_rate"]
        for router in ("round_robin", "prefix_affinity")
    ]
    assert rates[0] < rates[1]


def test_load_is_what_arrives_of_what_all_replicas_can_do() -> None:
    trace = small_trace()
    assert at_load(trace, MACHINE, 2, 1.0)[-1].arrival < at_load(trace, MACHINE, 1, 1.0)[-1].arrival
    with pytest.raises(ConfigError, match="all at once"):
        at_load([replace(request, arrival=0.0) for request in trace], MACHINE, 2, 1.0)


def test_what_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="replicas must be an int from 1 to 10000, got 0"):
        place(small_trace(), MACHINE, 0)
    with pytest.raises(UnknownPolicy, match="unknown router 'best'; choose one of least_loaded, prefix_affinity"):
        place(small_trace(), MACHINE, 2, Routing("best"))
