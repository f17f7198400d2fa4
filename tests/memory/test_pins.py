"""Pinned prefixes stay, leave room to work, and go when they are taken back."""

from __future__ import annotations

import pytest
from block_checks import assert_all_available
from managed_blocks import MAX_CHUNK, compute, make_manager, make_request, start

from paged_backend.errors import RequestRefused
from paged_backend.sampling_params import SamplingParams


def test_a_pin_outlives_a_longer_one_though_nothing_of_it_is_computed_yet():
    manager = make_manager("full", 20)
    manager.pin([1] * 4, None)
    manager.pin([1] * 8, None)
    manager.unpin([1] * 8, None)
    request = make_request([1] * 9, 0)
    start(manager, request)
    compute(manager, request, 9)
    manager.free(request, 0.0)
    manager.check_integrity()
    (pool,) = manager.pools
    assert pool.num_pinned == 1
    assert pool.num_available == pool.num_blocks - 1
    manager.unpin([1] * 4, None)
    assert_all_available(manager)


def test_a_pin_that_is_refused_leaves_a_shorter_one_in_place():
    manager = make_manager("full", 6)
    manager.pin([1] * 4, None)
    with pytest.raises(RequestRefused, match="unpin another"):
        manager.pin([1] * 20, None)
    assert [node.tokens for node in manager.tree.nodes()] == [(1, 1, 1, 1)]
    manager.check_integrity()


def test_pinned_prefix_survives_traffic_of_many_times_the_cache():
    manager = make_manager("full", 12)
    assert manager.pin([1] * 10, None) == 8
    for order in range(40):
        request = make_request([1] * 9 if order == 0 else [2 + order] * 30, order)
        assert manager.can_admit(request, manager.match_prefix(request), [0], 0)
        start(manager, request)
        while request.num_uncomputed_tokens:
            compute(manager, request, min(MAX_CHUNK, request.num_uncomputed_tokens))
        manager.free(request, float(order))
        manager.check_integrity()
    assert manager.match_prefix(make_request([1] * 9, 99)).num_tokens == 8
    assert manager.unpin([1] * 10, None)
    assert not manager.unpin([1] * 10, None)
    assert manager.pools[0].num_available == 12


def test_pins_cannot_take_the_room_that_requests_need():
    manager = make_manager("full", 12)
    assert manager.shortage(48) is None
    manager.pin([1] * 24, None)
    with pytest.raises(RequestRefused, match="at most 6"):
        manager.pin([2] * 4, None)
    assert manager.shortage(24) is None
    assert "6 of them pinned" in manager.shortage(25)


def test_pinned_blocks_are_room_for_a_request_that_begins_with_them():
    manager = make_manager("full", 12)
    manager.pin([1] * 24, None)
    own = manager.num_pinned_of([1] * 20 + [2] * 10, None)
    assert own == 5
    assert manager.shortage(44, own) is None
    assert "1 of them pinned" in manager.shortage(45, own)
    # The last token of a prompt is always computed, and another salt is another beginning.
    assert manager.num_pinned_of([1] * 24, None) == 5
    assert manager.num_pinned_of([1] * 25, "salt") == 0


@pytest.mark.parametrize("layout", ["full and window", "window"])
def test_pinned_blocks_beside_windows_are_no_room_for_those_that_begin_with_them(layout):
    manager = make_manager(layout, 24)
    manager.pin([1] * 24, None)
    assert manager.num_pinned_of([1] * 30, None) == 0


def test_pin_is_refused_for_what_begins_otherwise_alone():
    manager = make_manager("full", 12)
    same, other = make_request([1] * 25, 0), make_request([2] * 25, 1)
    for request in (same, other):
        request.params = SamplingParams(max_tokens=20)
    assert manager.pin([1] * 24, None, [same]) == 24
    manager.unpin([1] * 24, None)
    with pytest.raises(RequestRefused, match="an unfinished request could not fit"):
        manager.pin([1] * 24, None, [same, other])
    assert manager.pools[0].num_pinned == 0


def test_pin_outlives_a_reset():
    manager = make_manager("full", 12)
    manager.pin([1] * 8, None)
    manager.reset()
    for order, tokens in enumerate([[1] * 9, [2] * 40]):
        request = make_request(tokens, order)
        start(manager, request)
        while request.num_uncomputed_tokens:
            compute(manager, request, min(MAX_CHUNK, request.num_uncomputed_tokens))
        manager.free(request, 0.0)
    assert manager.match_prefix(make_request([1] * 9, 9)).num_tokens == 8
