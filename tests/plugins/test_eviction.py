"""Eviction policies: which cached block goes first."""

from __future__ import annotations

import random

import pytest
from block_checks import assert_all_blocks_are_back
from hypothesis import given, settings
from hypothesis import strategies as st
from model_free import ModelFree

from paged_backend.errors import ConfigError
from paged_backend.plugins.eviction import Arc, Fifo, Gdsf, Lru, Slru
from paged_backend.plugins.fifo import Fifo as FirstCome
from paged_backend.policies import CachedBlock
from paged_backend.policy.plugin_manager import PluginManager

EVICTIONS = sorted(PluginManager(load_entry_points=False).names("eviction"))


def block(
    id: int, last_used: float = 0.0, depth: int = 0, hits: int = 0, created: int = 0, contents: int = 0
) -> CachedBlock:
    return CachedBlock(id, depth, hits, created, last_used, contents=contents)


def drop(policy) -> int:
    """Which block goes; the engine's part played."""
    id = policy.evict()
    policy.remove(block(id))
    return id


def order_of(policy, blocks) -> list[int]:
    """The ids in the order in which the policy drops them."""
    known = {entry.id: entry for entry in blocks}
    for entry in blocks:
        policy.add(entry)
    order = []
    while known:
        order.append(policy.evict())
        policy.remove(known.pop(order[-1]))
    return order


def test_lru_drops_the_longest_unused_and_of_those_the_end_of_the_prefix():
    blocks = [block(0, 5.0), block(1, 2.0, depth=0), block(2, 2.0, depth=3), block(3, 9.0)]
    assert order_of(Lru(), blocks) == [2, 1, 0, 3]


def test_fifo_drops_the_first_computed_however_often_it_is_used():
    assert order_of(Fifo(), [block(0, 9.0, hits=9, created=1), block(1, created=3), block(2, created=2)]) == [0, 2, 1]


def test_slru_drops_what_was_never_reused_before_what_was():
    blocks = [block(0, 1.0, hits=1), block(1, 8.0), block(2, 2.0, hits=7), block(3, 9.0)]
    assert order_of(Slru(protected=1.0), blocks) == [1, 3, 0, 2]


def test_slru_spares_no_more_than_its_protected_share():
    blocks = [block(n, float(n), hits=1) for n in range(10)] + [block(10, 3.5), block(11, 4.5)]
    assert order_of(Slru(protected=0.5), blocks)[:4] == [0, 1, 2, 3]


def test_gdsf_weighs_uses_against_age():
    policy = Gdsf()
    assert order_of(policy, [block(0, 1.0, hits=3), block(1, 2.0, hits=0), block(2, 3.0, hits=1)]) == [1, 2, 0]
    # What was dropped last had a value of 4, so a block that comes in now starts above one that was used three times.
    policy.add(block(3, 4.0, hits=0))
    assert policy._blocks.first()[0][0] == 5


def test_gdsf_takes_the_age_of_a_blocks_last_use_not_of_when_it_is_offered():
    policy = Gdsf()
    policy.add(block(0, 1.0, hits=3))
    assert drop(policy) == 0
    # A parent, used when its child was and offered as that went, is as old as the child; this one came later.
    policy.add(block(1, 1.0, hits=3))
    policy.add(block(2, 2.0, hits=1))
    assert drop(policy) == 1


def test_arc_drops_from_what_was_seen_once_while_that_is_more_than_half():
    blocks = [block(0, 1.0, hits=1), block(1, 8.0), block(2, 2.0, hits=7), block(3, 9.0), block(4, 10.0)]
    assert order_of(Arc(), blocks) == [1, 0, 3, 2, 4]


def test_arc_knows_contents_that_come_back_though_their_block_is_another():
    policy = Arc()
    policy.add(block(0, contents=7))
    assert drop(policy) == 0
    policy.add(block(1, 1.0, contents=7))
    policy.add(block(2, 0.5, contents=8))
    # Dropping them was a mistake, so what was seen once has all the room now, though it is older.
    assert [drop(policy), drop(policy)] == [1, 2]


def test_arc_gives_room_to_the_side_from_which_it_dropped_too_early():
    policy = Arc()
    for hits in (0, 1):
        for n in range(4):
            policy.add(block(n, float(n), hits=hits, contents=n))
        for _ in range(4):
            drop(policy)
        # What was dropped comes back: it was right to keep it.
        for n in range(4):
            policy.add(block(n, 10.0 + n, contents=n))
        policy.add(block(4, 20.0, contents=99 + hits))
        # All but one were seen before; those that were seen once are to stay, and then those that were seen again.
        assert policy.evict() == (4 if hits else 0)
        for n in range(5):
            policy.remove(block(n))


def test_arc_remembers_no_more_than_its_share():
    policy = Arc()
    for n in range(500):
        policy.add(block(n % 10, float(n), contents=n))
        drop(policy)
    assert len(policy._gone_once) + len(policy._gone_again) == 40


def test_contents_that_are_computed_again_are_known_and_told_from_others():
    offered: list[CachedBlock] = []

    class Watcher(Lru):
        def add(self, block):
            super().add(block)
            offered.append(block)

    engine = ModelFree(FirstCome(), num_blocks=6, eviction=Watcher, max_num_seqs=1)
    ends = []
    for start, salt in [(1, None), (2, None), (1, "salt")] * 2:
        engine.add([start] + [9] * 15, 1, cache_salt=salt)
        engine.run()
        ends.append(next(block.contents for block in reversed(offered) if block.depth == 3))
    assert engine.scheduler.num_cached_tokens == 0
    # The last blocks hold the same tokens; what stands before them, or their salt, is not the same.
    assert ends[:3] == ends[3:]
    assert len(set(ends)) == 3


def test_reused_blocks_are_no_longer_dropped():
    for name in EVICTIONS:
        policy = PluginManager(load_entry_points=False).eviction_factory(name, {})()
        entries = [block(n, float(n), created=n) for n in range(4)]
        for entry in entries:
            policy.add(entry)
        policy.remove(entries[0])
        assert policy.evict() != 0


@pytest.mark.parametrize("name", EVICTIONS)
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 4)), min_size=1, max_size=40),
    st.integers(24, 40),
)
def test_every_eviction_policy_keeps_the_books_right(name, requests, num_blocks):
    make = PluginManager(load_entry_points=False).eviction_factory(name, {})
    engine = ModelFree(FirstCome(), num_blocks=num_blocks, eviction=make)
    for prefix, length, output in requests:
        engine.add([1 + prefix] * length + [99], output)
        engine.step()
        engine.blocks.check_integrity()
    engine.run()
    engine.assert_sound()
    assert_all_blocks_are_back(engine)


def cached_tokens(make) -> int:
    """Prompt tokens not computed again: a few popular beginnings among many prompts that come once."""
    engine = ModelFree(FirstCome(), num_blocks=80, eviction=make, max_num_seqs=2)
    rng = random.Random(0)
    hot = [[1000 + n] * 32 for n in range(4)]
    for _ in range(400):
        if rng.random() < 0.3:
            engine.add([*rng.choice(hot), rng.randrange(10**6, 10**7)], 2)
        else:
            engine.add([rng.randrange(10**6, 10**7) for _ in range(40)], 2)
        engine.run()
    engine.assert_sound()
    return engine.scheduler.num_cached_tokens


def test_a_scan_does_not_push_out_what_is_reused():
    lru = cached_tokens(Lru)
    assert cached_tokens(lambda: Slru(protected=0.8)) > 1.2 * lru
    assert cached_tokens(Slru) > 1.05 * lru
    assert cached_tokens(Gdsf) > 1.1 * lru
    assert cached_tokens(Arc) > 1.2 * lru


@pytest.mark.parametrize("protected", [-0.1, 1.1])
def test_the_protected_share_is_from_0_to_1(protected):
    with pytest.raises(ConfigError):
        Slru(protected)
