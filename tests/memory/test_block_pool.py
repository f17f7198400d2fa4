"""Which block is given out next, and what a pool knows of each of its blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from block_checks import assert_all_available
from managed_blocks import compute, make_manager, make_request, no_policy_errors, start

from paged_backend.errors import IntegrityError
from paged_backend.memory.block_manager import BlockManager
from paged_backend.plugins.eviction import Lru
from paged_backend.policy.eviction_guard import EvictionGuard


def test_tail_of_a_freed_request_is_evicted_before_its_beginning():
    manager = make_manager("full", 6)
    request = make_request([1] * 16, 0)
    start(manager, request)
    compute(manager, request, 10)
    compute(manager, request, 6)
    manager.free(request, 0.0)
    pool = manager.pools[0]
    assert (pool.num_cached, pool.num_free) == (4, 2)
    for _ in range(4):
        pool.allocate(1)
    assert manager.match_prefix(make_request([1] * 16, 1)).num_tokens == 8


def test_free_blocks_without_a_prefix_are_used_before_cached_ones():
    manager = make_manager("full", 6)
    request = make_request([1] * 6, 0)
    start(manager, request)
    compute(manager, request, 6)
    manager.free(request, 0.0)
    for _ in range(5):
        manager.pools[0].allocate(1)
    assert manager.match_prefix(make_request([1] * 6, 1)).num_tokens == 4


def test_integrity_check_notices_a_lost_block():
    manager = make_manager("full", 6)
    manager.pools[0]._free.pop()
    with pytest.raises(IntegrityError, match="in 0 of the states"):
        manager.check_integrity()


def test_evicting_policy_that_answers_nonsense_is_reported_and_overruled():
    class Liar(Lru):
        def evict(self) -> int:
            return 10_000

    errors = []
    manager = make_manager("full", 4)
    pool = manager.pools[0]
    pool.policy = EvictionGuard(Liar(), lambda *args: errors.append(args))
    request = make_request([1] * 12, 0)
    start(manager, request)
    compute(manager, request, 12)
    manager.free(request, 0.0)
    for _ in range(4):
        pool.allocate(1)
    assert len(errors) == 3
    assert pool.num_evictions == 3


def test_parent_is_not_evicted_before_its_descendants_whatever_the_policy_says():
    class HeadFirst(Lru):
        def evict(self) -> int:
            return head

    errors = []
    manager = make_manager("full", 4)
    pool = manager.pools[0]
    pool.policy = EvictionGuard(HeadFirst(), lambda *args: errors.append(args))
    request = make_request([1] * 16, 0)
    start(manager, request)
    compute(manager, request, 12)
    compute(manager, request, 4)
    head = manager._tables[request].blocks[0][0]
    manager.free(request, 0.0)
    pool.allocate(1)
    assert "no block on offer" in errors[0][2]
    assert manager.match_prefix(make_request([1] * 16, 1)).num_tokens == 12


def test_policy_is_offered_a_prefix_from_its_end():
    offered = []

    class Recorder(Lru):
        def add(self, block) -> None:
            offered.append(block.depth)
            super().add(block)

    manager = make_manager("full", 3)
    pool = manager.pools[0]
    pool.policy = EvictionGuard(Recorder(), no_policy_errors)
    request = make_request([1] * 12, 0)
    start(manager, request)
    compute(manager, request, 12)
    manager.free(request, 0.0)
    assert offered == [2]
    pool.allocate(1)
    assert offered == [2, 1]
    pool.allocate(1)
    assert offered == [2, 1, 0]


def cached_manager():
    """A pool of eight blocks that holds three blocks of a prefix that nobody uses."""
    manager = make_manager("full", 8)
    request = make_request([1] * 12, 0)
    start(manager, request)
    compute(manager, request, 12)
    manager.free(request, 0.0)
    return manager, manager.pools[0]


def test_blocks_are_free_then_owned_then_cached_then_shared_again():
    manager, pool = cached_manager()
    assert (pool.num_free, pool.num_cached, pool.num_owned, pool.num_available) == (5, 3, 0, 8)
    request = make_request([1] * 9, 1)
    start(manager, request)
    assert (pool.num_free, pool.num_cached, pool.num_owned, pool.num_available) == (5, 1, 2, 6)
    assert pool.blocks_in_use() == sorted({*range(8)} - set(pool._free))
    manager.check_integrity()


def test_pinned_blocks_that_nobody_uses_are_cached_and_cannot_be_had():
    manager, pool = cached_manager()
    manager.pin([1] * 8)
    assert (pool.num_pinned, pool.num_cached, pool.num_available) == (2, 3, 6)
    manager.check_integrity()
    taken = pool.allocate(6)
    assert pool.num_evictions == 1
    pool.release(taken, 0.0)
    manager.unpin([1] * 8)
    assert_all_available(manager)


def test_a_block_pinned_twice_is_pinned_until_the_last_pin_goes():
    manager, pool = cached_manager()
    manager.pin([1] * 4)
    manager.pin([1] * 8)
    assert pool.num_pinned == 2
    manager.unpin([1] * 8)
    assert (pool.num_pinned, pool.num_available) == (1, 7)
    manager.unpin([1] * 4)
    assert (pool.num_pinned, pool.num_available) == (0, 8)
    manager.check_integrity()


def test_blocks_that_others_use_or_a_pin_keeps_are_not_freed_by_giving_them_back():
    manager, pool = cached_manager()
    manager.pin([1] * 4)
    first, second = make_request([1] * 12, 1), make_request([1] * 9, 2)
    for request in (first, second):
        start(manager, request)
    pinned, shared = manager.tables([second])[0][0, :2].tolist()
    assert (pool.is_shared(pinned), pool.is_available(pinned)) == (True, False)
    assert pool.num_freed_by(Counter({pinned: 2, shared: 1})) == 0
    assert pool.num_freed_by(Counter({pinned: 2, shared: 2})) == 1


@pytest.mark.parametrize("lie", ["num_pinned", "_num_idle_pinned"])
def test_integrity_check_notices_a_pin_that_is_miscounted(lie):
    manager, pool = cached_manager()
    manager.pin([1] * 8)
    setattr(pool, lie, getattr(pool, lie) + 1)
    with pytest.raises(IntegrityError, match="pinned"):
        manager.check_integrity()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "a block is free twice"),
        (lambda pool: pool._ref_counts.__setitem__(pool._free[0], 1), "has 1 references, 0 tables hold it"),
        (lambda pool: pool._offered.clear(), "is not on offer"),
        (lambda pool: pool.tree.nodes()[0].held_children.__setitem__(0, 5), "counts 5 children, not 1"),
        (lambda pool: pool._nodes.__setitem__(next(iter(pool._cached)), None), "its prefix says otherwise"),
    ],
)
def test_integrity_check_notices_each_damage(damage, told):
    manager, pool = cached_manager()
    damage(pool)
    with pytest.raises(IntegrityError, match=told):
        manager.check_integrity()


def test_a_pool_grows_at_its_end_and_shrinks_only_when_it_is_empty():
    manager, pool = cached_manager()
    pool.resize(10)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (7, 3, 10)
    assert set(pool.allocate(7)) == {*range(10)} - {*pool._cached}
    manager.reset()
    pool.resize(2)
    assert pool.allocate(2) == [0, 1]


def prefixes(manager: BlockManager, *beginnings: int) -> None:
    """Cache a prefix of two blocks for each of ``beginnings``, oldest first."""
    for order, token in enumerate(beginnings):
        request = make_request([token] * 8, order)
        start(manager, request)
        compute(manager, request, 8)
        manager.free(request, float(order))


def known(manager: BlockManager, token: int) -> int:
    return manager.match_prefix(make_request([token] * 9, 99)).num_tokens


def test_blocks_that_waiting_requests_begin_with_go_last():
    manager = make_manager("full", 7)
    prefixes(manager, 1, 2, 3)
    manager.expect(make_request([1] * 12, 10))
    manager.pools[0].allocate(5)
    assert [known(manager, token) for token in (1, 2, 3)] == [8, 0, 0]


def test_of_blocks_that_all_wait_for_the_one_wanted_last_goes_first():
    manager = make_manager("full", 7)
    prefixes(manager, 1, 2, 3)
    waiting = [make_request([token] * 12, 10 + token) for token in (3, 1, 2)]
    for request in waiting:
        manager.expect(request)
    manager.check_integrity()
    manager.pools[0].allocate(2)
    assert [known(manager, token) for token in (1, 2, 3)] == [8, 8, 4]
    manager.expect_no_more(waiting[1])
    manager.pools[0].allocate(2)
    assert [known(manager, token) for token in (1, 2, 3)] == [0, 8, 4]


def test_blocks_that_nobody_waits_for_any_more_are_on_offer_again():
    manager = make_manager("full", 5)
    prefixes(manager, 1, 2)
    request = make_request([1] * 12, 10)
    manager.expect(request)
    manager.expect_no_more(request)
    manager.check_integrity()
    manager.pools[0].allocate(3)
    assert [known(manager, token) for token in (1, 2)] == [0, 8]


def test_a_policy_may_say_that_it_spares_nothing():
    manager = make_manager("full", 5)
    manager.pools[0].policy = EvictionGuard(Lru(spares_awaited=False), no_policy_errors)
    prefixes(manager, 1, 2)
    manager.expect(make_request([1] * 12, 10))
    manager.check_integrity()
    manager.pools[0].allocate(3)
    assert [known(manager, token) for token in (1, 2)] == [0, 8]


def test_integrity_check_notices_a_block_that_is_not_spared():
    manager = make_manager("full", 5)
    prefixes(manager, 1)
    manager.expect(make_request([1] * 12, 10))
    pool = manager.pools[0]
    _, block = pool._spared.first()
    pool._spared.discard(block)
    with pytest.raises(IntegrityError, match="spared"):
        manager.check_integrity()
