"""copy_blocks: whole blocks of every cache, sources read before targets are written."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels import copy_blocks


@pytest.mark.parametrize("as_tensor", [False, True], ids=["lists", "tensors"])
def test_whole_blocks_are_copied_in_every_cache_and_the_others_stay(as_tensor):
    caches = [torch.randn(6, 2, 4, 8), torch.randint(-128, 128, (6, 2, 4, 3), dtype=torch.int8), torch.randn(6, 2, 4)]
    before = [cache.clone() for cache in caches]
    source, target = ([0, 3], [5, 1])
    copy_blocks(caches, torch.tensor(source) if as_tensor else source, torch.tensor(target) if as_tensor else target)
    for cache, old in zip(caches, before, strict=True):
        assert cache[[5, 1]].equal(old[[0, 3]])
        assert cache[[0, 2, 3, 4]].equal(old[[0, 2, 3, 4]])


def test_float8_caches_are_copied():
    cache = torch.randn(3, 1, 2, 4).to(torch.float8_e4m3fn)
    copy_blocks([cache], [0], [2])
    assert cache[2].float().equal(cache[0].float())


def test_a_block_may_be_source_of_one_copy_and_target_of_another():
    cache = torch.arange(3.0).view(3, 1, 1, 1)
    copy_blocks([cache], [0, 1], [1, 2])
    assert cache.flatten().tolist() == [0, 0, 1]


def test_nothing_to_copy_is_no_error():
    cache = torch.ones(2, 1, 1, 1)
    copy_blocks([cache], [], [])
    assert cache.eq(1).all()


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"equal length, got \(2,\) and \(1,\)"):
        copy_blocks([], [0, 1], [2])
