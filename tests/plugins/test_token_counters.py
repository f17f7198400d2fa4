"""Who received least, and what those who come back are owed."""

from __future__ import annotations

import pytest

from paged_backend.plugins.token_counters import MANY_CLIENTS, TokenCounters


def waiting(*names: str | None, weights: dict[str | None, float] | None = None) -> TokenCounters:
    counters = TokenCounters(weights or {})
    for name in names:
        counters.join(name)
    return counters


def test_the_client_that_received_least_is_served_first():
    counters = waiting("a", "b")
    counters.charge("a", 5)
    assert counters.least_served() == "b"
    counters.charge("b", 6)
    assert counters.least_served() == "a"


def test_equal_counters_go_to_the_client_seen_first():
    assert waiting("b", "a").least_served() == "b"


def test_service_counts_by_weight():
    counters = waiting("a", "b", weights={"a": 4.0})
    counters.charge("a", 8)
    counters.charge("b", 3)
    assert counters.least_served() == "a"


def test_requests_without_a_client_count_as_one_client():
    counters = waiting(None, "a")
    counters.charge(None, 1)
    assert counters.least_served() == "a"


def test_a_client_that_comes_back_has_earned_nothing_by_its_absence():
    counters = waiting("a")
    counters.charge("a", 10)
    counters.join("b")
    counters.charge("b", 1)
    assert counters.least_served() == "a"


def test_where_nobody_waits_a_return_is_lifted_to_whoever_left_last():
    counters = waiting("a")
    counters.charge("a", 10)
    counters.leave("a")
    counters.join("b")
    counters.join("a")
    counters.charge("b", 1)
    assert counters.least_served() == "a"


def test_a_client_that_left_is_not_served():
    counters = waiting("a", "b")
    counters.charge("b", 9)
    counters.leave("a")
    assert counters.least_served() == "b"


def test_without_a_client_that_waits_there_is_none_to_serve():
    with pytest.raises(LookupError, match="nobody waits"):
        waiting().least_served()


def test_clients_that_would_be_lifted_anyway_are_forgotten():
    counters = waiting("a")
    counters.charge("a", 1.0)
    for number in range(3 * MANY_CLIENTS):
        counters.charge(str(number), 0.5)
    assert len(counters) <= MANY_CLIENTS + 4


def test_clients_that_are_ahead_are_never_forgotten():
    counters = waiting("a")
    counters.charge("greedy", 100.0)
    for number in range(3 * MANY_CLIENTS):
        counters.charge(str(number), 0.0)
    counters.join("greedy")
    counters.charge("a", 50.0)
    assert counters.least_served() == "a"
