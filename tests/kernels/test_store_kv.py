"""store_kv: what lands in which slot, and that nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import rounded

from paged_backend.kernels import LayerCache, store_kv

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE = 5, 3, 7


def make_tokens(num_tokens: int, key_dim: int = 16, value_dim: int = 24, dtype: torch.dtype = torch.float32):
    """Keys and values with heads first in memory, as a model's projections leave them, and shuffled slots."""
    generator = torch.Generator().manual_seed(num_tokens)
    key = torch.randn(NUM_KV_HEADS, num_tokens, key_dim, generator=generator).to(dtype).transpose(0, 1)
    value = torch.randn(NUM_KV_HEADS, num_tokens, value_dim, generator=generator).to(dtype).transpose(0, 1)
    return key, value, torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]


def make_caches(key_dim: int = 16, value_dim: int = 24, dtype: torch.dtype = torch.float32, fill: float = torch.nan):
    shape = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE)
    return torch.full((*shape, key_dim), fill).to(dtype), torch.full((*shape, value_dim), fill).to(dtype)


def read(cache: torch.Tensor, slot: int) -> torch.Tensor:
    return cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE]


@pytest.mark.parametrize("num_tokens", [1, 6, 7, 8, 35])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_token_lands_in_its_slot_and_no_other_slot_changes(backend, num_tokens, cache_dtype):
    key, value, slots = make_tokens(num_tokens)
    key_cache, value_cache = make_caches(dtype=cache_dtype)
    store_kv(key, value, LayerCache(key_cache, value_cache), slots, backend=backend)
    for token, slot in enumerate(slots.tolist()):
        assert read(key_cache, slot).equal(rounded(key[token], cache_dtype, backend))
        assert read(value_cache, slot).equal(rounded(value[token], cache_dtype, backend))
    for slot in set(range(NUM_BLOCKS * BLOCK_SIZE)) - set(slots.tolist()):
        assert read(key_cache, slot).isnan().all()
        assert read(value_cache, slot).isnan().all()


def test_padding_tokens_are_not_stored(backend):
    key, value, slots = make_tokens(8)
    slots[[0, 5, 7]] = -1
    key_cache, value_cache = make_caches()
    store_kv(key, value, LayerCache(key_cache, value_cache), slots, backend=backend)
    assert (~key_cache.isnan()).all(-1).all(1).sum() == 5
    assert read(key_cache, int(slots[1])).equal(key[1])


def test_nothing_but_padding_stores_nothing(backend):
    key, value, _ = make_tokens(3)
    key_cache, value_cache = make_caches()
    store_kv(key, value, LayerCache(key_cache, value_cache), torch.full((3,), -1), backend=backend)
    assert key_cache.isnan().all()
    assert value_cache.isnan().all()


def test_no_tokens_at_all_store_nothing(backend):
    key, value, _ = make_tokens(1)
    key_cache, value_cache = make_caches()
    store_kv(key[:0], value[:0], LayerCache(key_cache, value_cache), torch.zeros(0, dtype=torch.long), backend=backend)
    assert key_cache.isnan().all()


# Half a step of 127 for int8; half of the last of three mantissa bits for e4m3.
@pytest.mark.parametrize(("cache_dtype", "bound"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2**-4)], ids=str)
def test_a_quantised_slot_is_within_half_a_step_of_its_token(backend, cache_dtype, bound):
    key, value, slots = make_tokens(20)
    key[3] *= 1000
    value[4] = 0
    key_cache, value_cache = make_caches(dtype=cache_dtype, fill=0)
    scales = [torch.full((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE), torch.nan) for _ in range(2)]
    store_kv(key, value, LayerCache(key_cache, value_cache, *scales), slots, backend=backend)
    for tensor, cache, scale in ((key, key_cache, scales[0]), (value, value_cache, scales[1])):
        for token, slot in enumerate(slots.tolist()):
            stored = read(cache, slot).float() * scale[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE, None]
            largest = tensor[token].abs().amax(-1, keepdim=True)
            assert ((stored - tensor[token]).abs() <= bound * largest * 1.001).all()
        assert scale.isnan().sum() == scale.numel() - 20 * NUM_KV_HEADS


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_slot_depends_on_its_token_alone(backend, cache_dtype):
    key, value, slots = make_tokens(9)
    caches = []
    for steps in ([slice(0, 9)], [slice(0, 2), slice(2, 9)]):
        stored = (*make_caches(dtype=cache_dtype, fill=0), *torch.zeros(2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE))
        for step in steps:
            store_kv(key[step], value[step], LayerCache(*stored), slots[step], backend=backend)
        caches.append(stored)
    for whole, parts in zip(*caches, strict=True):
        assert whole.float().equal(parts.float())


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_backend_quantises_to_the_very_same_bits(backend, cache_dtype):
    key, value, slots = make_tokens(30)
    stored = []
    for name in (backend, "reference"):
        caches = make_caches(dtype=cache_dtype, fill=0)
        scales = torch.zeros(2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE)
        store_kv(key, value, LayerCache(*caches, *scales), slots, backend=name)
        stored.append((*(cache.view(torch.int8) for cache in caches), scales))
    for actual, expected in zip(*stored, strict=True):
        assert actual.equal(expected)


# The interpreter computes with numpy, which warns of what a GPU does silently.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_slot_does_not_hide_what_was_not_finite(backend, cache_dtype, bad):
    key, value, slots = make_tokens(4)
    key[2, 1, 5] = bad
    key_cache, value_cache = make_caches(dtype=cache_dtype, fill=0)
    scales = torch.zeros(2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE)
    store_kv(key, value, LayerCache(key_cache, value_cache, *scales), slots, backend=backend)
    block, offset = divmod(int(slots[2]), BLOCK_SIZE)
    read_back = key_cache[block, 1, offset].float() * scales[0, block, 1, offset]
    assert read_back[5].isnan() or read_back[5].isinf()
    assert scales[0].isfinite().sum() == scales[0].numel() - 1
    assert scales[1].isfinite().all()


def test_shapes_that_do_not_fit_are_refused_with_the_numbers():
    key, value, slots = make_tokens(4)
    key_cache, value_cache = make_caches()
    with pytest.raises(ValueError, match=r"key must be .* = \(4, 3, 16\), got \(4, 2, 16\)"):
        store_kv(key[:, :2], value, LayerCache(key_cache, value_cache), slots)
    with pytest.raises(ValueError, match=r"value must be .* = \(4, 3, 24\), got \(3, 3, 24\)"):
        store_kv(key, value[:3], LayerCache(key_cache, value_cache), slots)
