"""The index tells what was sent where, forgets ends first, and stays within its bounds."""

from __future__ import annotations

import pytest

from paged_backend.policy import prefix_index
from paged_backend.policy.prefix_index import PrefixIndex


def test_what_was_sent_is_known_in_whole_spans_by_those_it_was_sent_to() -> None:
    index = PrefixIndex(3, 4, 10)
    index.add(0, index.beginnings(range(12), None))
    index.add(2, index.beginnings([*range(5), 99, 98, 97], None))
    assert index.known(index.beginnings(range(11), None)) == {0: 8, 2: 4}
    assert index.known(index.beginnings(range(1, 12), None)) == {}


def test_salts_are_kept_apart() -> None:
    index = PrefixIndex(1, 4, 10)
    index.add(0, index.beginnings(range(8), "a"))
    assert index.known(index.beginnings(range(8), "b")) == {}
    assert index.known(index.beginnings(range(8), "a")) == {0: 8}


def test_the_end_of_what_was_sent_longest_ago_is_forgotten_first() -> None:
    index = PrefixIndex(1, 1, 4)
    old, new = index.beginnings([1, 2, 3], None), index.beginnings([7, 8], None)
    index.add(0, old)
    index.add(0, new)
    assert (index.known(old), index.known(new), len(index)) == ({0: 2}, {0: 2}, 4)
    index.add(0, index.beginnings(range(20, 40), None))
    assert (len(index), len(index._holders)) == (4, 4)


def test_many_replicas_are_told_apart_by_more_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_BEGINNINGS", 100)
    index = PrefixIndex(10, 4, 40)
    assert index.span == 16
    for place in range(10):
        index.add(place, index.beginnings(range(place * 1000, place * 1000 + 900), None))
    assert len(index) <= 100
