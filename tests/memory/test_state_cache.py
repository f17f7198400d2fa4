"""Slots of recurrent states: read, written, grown."""

from __future__ import annotations

import torch

from paged_backend.memory.state_cache import StateCache, StateSpec

CPU = torch.device("cpu")
SPECS = [StateSpec("a", (2, 3), torch.float32, CPU), StateSpec("b", (4,), torch.bfloat16, CPU)]


def test_a_slot_holds_what_was_written_into_it_and_no_other_does():
    cache = StateCache(SPECS)
    cache.grow(4)
    cache.pools[0].zero_()
    rows = torch.randn(2, 2, 3)
    cache.write(0, torch.tensor([3, 1]), rows)
    assert torch.equal(cache.read(0, torch.tensor([1, 3])), rows.flip(0))
    assert not cache.pools[0][[0, 2]].any()


def test_what_was_read_can_be_written_over():
    cache = StateCache(SPECS)
    cache.grow(1)
    cache.pools[1].fill_(2)
    cache.read(1, torch.tensor([0])).zero_()
    assert (cache.pools[1] == 2).all()


def test_states_are_kept_in_their_own_dtype():
    cache = StateCache(SPECS)
    cache.grow(1)
    cache.write(1, torch.tensor([0]), torch.full((1, 4), 1.5, dtype=torch.float32))
    assert cache.read(1, torch.tensor([0])).dtype == torch.bfloat16


def test_growing_keeps_contents_and_takes_memory_for_every_state():
    cache = StateCache(SPECS)
    assert (cache.num_slots, cache.num_bytes, cache.bytes_per_slot) == (0, 0, 2 * 3 * 4 + 4 * 2)
    cache.grow(2)
    before = [pool.copy_(torch.rand_like(pool)).clone() for pool in cache.pools]
    cache.grow(3)
    assert cache.num_slots >= 3
    assert all(torch.equal(pool[:2], old) for pool, old in zip(cache.pools, before, strict=True))
    pools = cache.pools
    cache.grow(1)
    assert cache.pools is pools
    cache.clear()
    assert cache.num_slots == 0
