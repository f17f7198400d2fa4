"""The built-in routers choose what they say, and refuse options that cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paged_backend.errors import ConfigError
from paged_backend.plugins.routers import LeastLoaded, PrefixAffinity, Random, RoundRobin, register_routers
from paged_backend.policies import ReplicaView, RoutingPolicy

REQUEST = SimpleNamespace(max_num_tokens=10)


def replicas(*loads: int, known: tuple[int, ...] = ()) -> list[ReplicaView]:
    found = []
    for place, load in enumerate(loads):
        tokens = known[place] if known else 0
        numbers = {"num_waiting": 0, "num_running": 0, "num_outstanding_tokens": load, "num_known_tokens": tokens}
        found.append(ReplicaView(SimpleNamespace(**numbers)))
    return found


def chosen(policy: RoutingPolicy, views: list[ReplicaView], times: int = 1) -> list[int]:
    return [policy.route(REQUEST, views) for _ in range(times)]  # type: ignore[arg-type]


def test_round_robin_takes_each_in_turn() -> None:
    assert chosen(RoundRobin(), replicas(9, 0, 0), 4) == [0, 1, 2, 0]


def test_random_draws_the_same_for_the_same_seed_and_leaves_nobody_out() -> None:
    first, again, other = (chosen(Random(seed), replicas(0, 0, 0), 50) for seed in (1, 1, 2))
    assert first == again != other
    assert set(first) == {0, 1, 2}


def test_least_loaded_takes_the_first_of_those_with_the_least_to_do() -> None:
    assert chosen(LeastLoaded(), replicas(5, 3, 3)) == [1]


def test_prefix_affinity_takes_whoever_knows_most_within_the_bound() -> None:
    assert chosen(PrefixAffinity(1.25), replicas(100, 90, 110, known=(16, 32, 64))) == [2]
    assert chosen(PrefixAffinity(1.05), replicas(100, 90, 110, known=(16, 32, 64))) == [1]


def test_prefix_affinity_takes_the_least_loaded_where_all_know_as_much() -> None:
    assert chosen(PrefixAffinity(), replicas(100, 90, 95, known=(16, 16, 16))) == [1]
    assert chosen(PrefixAffinity(1), replicas(7, 7, 7)) == [0]


def test_a_view_cannot_be_changed() -> None:
    (view,) = replicas(3)
    with pytest.raises(AttributeError, match="routing policies read replicas"):
        view.num_waiting = 5
    with pytest.raises(AttributeError, match="routing policies read replicas"):
        del view.num_waiting


@pytest.mark.parametrize(("make", "options"), [(PrefixAffinity, {"factor": 0.5}), (Random, {"seed": "x"})])
def test_an_option_that_cannot_be_is_refused_by_name(make, options) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))} must be "):
        make(**options)


def test_every_name_leads_to_a_routing_policy() -> None:
    found: dict = {}
    register_routers(found.__setitem__)
    assert found.keys() == {"random", "round_robin", "least_loaded", "prefix_affinity"}
    assert all(isinstance(make(), RoutingPolicy) for make in found.values())
