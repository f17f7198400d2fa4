"""LayerCache: only tensors that every kernel can read make a cache."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels import LayerCache, empty_cache

SLOTS = (3, 2, 4)
KEY, VALUE, SCALE = torch.zeros(*SLOTS, 8), torch.zeros(*SLOTS, 6), torch.zeros(SLOTS)
QUANTISED = KEY.to(torch.int8), VALUE.to(torch.int8)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ((KEY, VALUE[:1]), "agree in all but dim"),
        ((KEY[0], VALUE[0]), "must be .*num_blocks"),
        ((KEY[..., ::2], VALUE), "must be contiguous"),
        ((KEY, VALUE, SCALE), "key_scale is for int8 and float8_e4m3fn caches, key is torch.float32"),
        (QUANTISED, "key is torch.int8 and needs key_scale"),
        ((*QUANTISED, SCALE), "value is torch.int8 and needs value_scale"),
        ((*QUANTISED, SCALE, SCALE.double()), "needs value_scale, contiguous float32"),
        ((*QUANTISED, SCALE[..., :1], SCALE), r"needs key_scale, contiguous float32 \(3, 2, 4\)"),
    ],
)
def test_tensors_that_kernels_cannot_read_are_refused(tensors, reason):
    with pytest.raises(ValueError, match=reason):
        LayerCache(*tensors)


@pytest.mark.parametrize(("dtype", "num_tensors"), [(torch.float16, 2), (torch.int8, 4), (torch.float8_e4m3fn, 4)])
def test_an_empty_cache_has_the_size_asked_for_and_scales_where_it_is_quantised(dtype, num_tensors):
    cache = empty_cache(3, 2, 4, 8, 6, dtype, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    assert (cache.num_kv_heads, cache.block_size, cache.key_dim, cache.value_dim) == (2, 4, 8, 6)
    assert cache.key.dtype == dtype
    assert len(cache.tensors()) == num_tensors
    assert all(len(tensor) == 3 for tensor in cache.tensors())
