"""How far apart clients come is counted while both wait, and not before or after."""

from __future__ import annotations

from collections import Counter

from paged_backend.lab.service_gap import MAX_CLIENTS, ServiceGap, clients_of


def test_the_gap_between_clients_counts_only_while_both_wait() -> None:
    gap = ServiceGap(Counter(a=2, b=2))
    gap.waits("a")
    gap.look()
    gap.serve("a", 100.0)
    gap.look()
    assert gap.largest == 0
    gap.waits("b")
    gap.look()
    gap.serve("a", 7.0)
    gap.look()
    gap.serve("b", 10.0)
    gap.look()
    assert gap.largest == 10
    gap.waits("a", -1)
    gap.look()
    gap.serve("b", 1000.0)
    gap.look()
    assert gap.largest == 10


def test_requests_of_no_client_are_those_of_one() -> None:
    assert clients_of([None, "a", None]) == {"": 2, "a": 1}
    gap = ServiceGap(clients_of([None, "a"]))
    for client in (None, "a"):
        gap.waits(client)
    gap.look()
    gap.serve(None, 4.0)
    gap.look()
    assert gap.largest == 4


def test_of_many_clients_those_with_the_most_requests_are_compared() -> None:
    gap = ServiceGap(Counter({f"{n}": 100 - n for n in range(MAX_CLIENTS + 1)}))
    for client in ("0", "1", f"{MAX_CLIENTS}"):
        gap.waits(client)
    gap.look()
    gap.serve(f"{MAX_CLIENTS}", 50.0)
    gap.look()
    assert gap.largest == 0
    gap.serve("1", 3.0)
    gap.look()
    assert gap.largest == 3
