"""Moore and Hodgson's rule does as many jobs in time as any choice could."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from paged_backend.lab.moore_hodgson import most_in_time

Job = tuple[float, float]


def are_in_time(jobs: list[Job], now: float) -> bool:
    """Whether all of them are, the earliest due first, which is the best order for that."""
    for due, work in sorted(jobs):
        now += work
        if now > due:
            return False
    return True


def most_by_trying(jobs: list[Job], now: float) -> int:
    return max(n for n in range(len(jobs) + 1) for some in combinations(jobs, n) if are_in_time(list(some), now))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_of_six_jobs_makes_more_of_them(seed: int) -> None:
    draw = random.Random(seed)
    now = draw.choice([0, 3])
    jobs: list[Job] = [(draw.randint(1, 20), draw.randint(1, 9)) for _ in range(6)]
    chosen = most_in_time(jobs, now)
    assert are_in_time([jobs[place] for place in chosen], now)
    assert len(set(chosen)) == most_by_trying(jobs, now)


def test_the_chosen_come_in_order_of_their_due_dates() -> None:
    assert most_in_time([(9, 1), (3, 1), (6, 1)]) == [1, 2, 0]


def test_the_longest_is_left_out_though_it_is_due_first() -> None:
    assert most_in_time([(5, 5), (6, 2), (7, 2)]) == [1, 2]


def test_of_no_jobs_none_are_chosen() -> None:
    assert most_in_time([]) == []
