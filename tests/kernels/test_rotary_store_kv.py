"""rotary_store_kv against transformers' own rotation followed by store_kv."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_halves

from paged_backend.kernels import QUANTISED_MAX, LayerCache, rotary_store_kv, store_kv

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS = 4, 7, 9


def make(group: int = 3, num_kv_heads: int = 2, key_dim: int = 16, value_dim: int = 24, dtype=torch.float32):
    """Queries, keys, values with heads first in memory, and the slots of their tokens."""
    generator = torch.Generator().manual_seed(key_dim)
    query, key, value = (
        torch.randn(heads, NUM_TOKENS, dim, generator=generator).to(dtype).transpose(0, 1)
        for heads, dim in ((group * num_kv_heads, key_dim), (num_kv_heads, key_dim), (num_kv_heads, value_dim))
    )
    return query, key, value, torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:NUM_TOKENS]


def make_angles(rotary_dim: int, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1000 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(NUM_TOKENS)[:, None] * 3.0 * frequencies
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def make_cache(num_kv_heads: int = 2, key_dim: int = 16, value_dim: int = 24, dtype=torch.float32):
    slots = (NUM_BLOCKS, num_kv_heads, BLOCK_SIZE)
    caches = [torch.zeros(*slots, dim, dtype=dtype) for dim in (key_dim, value_dim)]
    return LayerCache(*caches, *(torch.zeros(2, *slots) if dtype in QUANTISED_MAX else ()))


def by_transformers(query, key, cos, sin, interleaved=False):
    rotary_dim = cos.shape[-1]
    apply = apply_interleaved if interleaved else apply_halves
    turned = apply(*(tensor[..., :rotary_dim].transpose(0, 1)[None] for tensor in (query, key)), cos[None], sin[None])
    return tuple(
        torch.cat((part[0].transpose(0, 1), tensor[..., rotary_dim:]), -1)
        for part, tensor in zip(turned, (query, key), strict=True)
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("key_dim", "rotary_dim"), [(16, 16), (80, 80), (80, 32), (24, 6)])
def test_queries_come_back_and_keys_are_stored_rotated(backend, key_dim, rotary_dim, interleaved):
    query, key, value, slots = make(key_dim=key_dim)
    cos, sin = make_angles(rotary_dim, interleaved)
    cache, expected_cache = make_cache(key_dim=key_dim), make_cache(key_dim=key_dim)
    rotated = rotary_store_kv(query, key, value, cos, sin, cache, slots, interleaved=interleaved, backend=backend)
    expected_query, expected_key = by_transformers(query, key, cos, sin, interleaved)
    store_kv(expected_key, value, expected_cache, slots, backend="reference")
    assert_close(rotated, expected_query)
    for actual, expected in zip(cache.tensors(), expected_cache.tensors(), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precisions_are_rotated_in_float32(backend, dtype):
    query, key, value, slots = make(dtype=dtype)
    cos, sin = make_angles(16)
    rotated = rotary_store_kv(query, key, value, cos, sin, make_cache(dtype=dtype), slots, backend=backend)
    assert_close(rotated, by_transformers(query.float(), key.float(), cos, sin)[0].to(dtype))


def test_turning_the_other_way_would_be_noticed(backend):
    query, key, value, slots = make()
    cos, sin = make_angles(16)
    rotated = rotary_store_kv(query, key, value, cos, sin, make_cache(), slots, backend=backend)
    with pytest.raises(AssertionError):
        assert_close(rotated, by_transformers(query, key, cos, -sin)[0])


def test_padding_tokens_are_rotated_but_not_stored(backend):
    query, key, value, slots = make()
    slots[[0, 4]] = -1
    cache = make_cache()
    cos, sin = make_angles(16)
    rotated = rotary_store_kv(query, key, value, cos, sin, cache, slots, backend=backend)
    assert_close(rotated, by_transformers(query, key, cos, sin)[0])
    assert cache.value.ne(0).any(-1).all(1).sum() == NUM_TOKENS - 2


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_caches_get_what_store_kv_would_give_them(backend, cache_dtype):
    query, key, value, slots = make()
    cos, sin = make_angles(16)
    actual, wanted = make_cache(dtype=cache_dtype), make_cache(dtype=cache_dtype)
    rotary_store_kv(query, key, value, cos, sin, actual, slots, backend=backend)
    store_kv(by_transformers(query, key, cos, sin)[1], value, wanted, slots, backend="reference")
    for cache, expected, scale, expected_scale in (
        (actual.key, wanted.key, actual.key_scale, wanted.key_scale),
        (actual.value, wanted.value, actual.value_scale, wanted.value_scale),
    ):
        torch.testing.assert_close(scale, expected_scale)
        # A rotation that differs in its last bit may round to the neighbouring step.
        step = {torch.int8: 1.01 * scale.max(), torch.float8_e4m3fn: 2**-3 * 448 * scale.max()}[cache_dtype]
        difference = cache.float() * scale[..., None] - expected.float() * expected_scale[..., None]
        assert difference.abs().max() <= step
        assert (difference.abs() > 1e-5).float().mean() < 0.01


def test_angles_that_do_not_fit_are_refused():
    query, key, value, slots = make()
    cos, sin = make_angles(16)
    with pytest.raises(ValueError, match="even rotary_dim of at most 16"):
        rotary_store_kv(query, key, value, cos[:, :7], sin[:, :7], make_cache(), slots)
    with pytest.raises(ValueError, match="agree in tokens and dim"):
        rotary_store_kv(query[:-1], key, value, cos, sin, make_cache(), slots)
