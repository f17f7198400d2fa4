"""Pairwise cases: few combinations of options in which every two values of two options meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value each, so that every pair of values of two ``options`` is in one of them at least.

    A full cross shows nothing more of faults that take two values to show. Greedy, and always the same.
    """
    places = list(itertools.combinations(range(len(options)), 2))

    def pairs(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, b, case[a], case[b]) for a, b in places}

    every = list(itertools.product(*(range(len(values)) for values in options)))
    missing = {pair for case in every for pair in pairs(case)}
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        chosen.append(tuple(values[index] for values, index in zip(options, best, strict=True)))
    return chosen
