"""store_kv in Triton: a program for each token and part of its heads."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from paged_backend.kernels.kv_layout import LayerCache
from paged_backend.kernels.triton.cache import as_stored, cache_rows, store_rows
from paged_backend.kernels.triton.support import jit, next_power_of_2, tl, triton_operation

# Elements of a token that one program stores: few enough to stay in registers whatever the number of heads.
_ELEMENTS_PER_PROGRAM = 4096


@jit
def _store_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slot_mapping_ptr,
    num_kv_heads,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    held = heads < num_kv_heads
    rows = cache_rows(slot // BLOCK_SIZE, slot % BLOCK_SIZE, heads, num_kv_heads, BLOCK_SIZE)
    heads = heads.to(tl.int64)[:, None]
    key_dims = tl.arange(0, BLOCK_KEY_DIM)[None, :]
    key = tl.load(
        key_ptr + token * stride_key_token + heads * stride_key_head + key_dims,
        mask=held[:, None] & (key_dims < KEY_DIM),
        other=0.0,
    )
    store_rows(key, key_cache_ptr, key_scale_ptr, rows, held, KEY_DIM, BLOCK_KEY_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)[None, :]
    value = tl.load(
        value_ptr + token * stride_value_token + heads * stride_value_head + value_dims,
        mask=held[:, None] & (value_dims < VALUE_DIM),
        other=0.0,
    )
    store_rows(value, value_cache_ptr, value_scale_ptr, rows, held, VALUE_DIM, BLOCK_VALUE_DIM)


def store_kv(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
    """As the operation of this name."""
    _launch(key, value, cache.key, cache.value, slot_mapping, cache.key_scale, cache.value_scale)


@triton_operation("store_kv", mutates=("key_cache", "value_cache", "key_scale", "value_scale"))
def _launch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (key, value))
    num_tokens, num_kv_heads, key_dim = key.shape
    if not num_tokens:
        return
    value_dim = value.shape[2]
    block_key_dim, block_value_dim = next_power_of_2(key_dim), next_power_of_2(value_dim)
    fitting = max(1, _ELEMENTS_PER_PROGRAM // max(block_key_dim, block_value_dim))
    block_heads = min(next_power_of_2(num_kv_heads), fitting)
    _store_kv_kernel[(num_tokens, -(-num_kv_heads // block_heads))](
        key,
        value,
        as_stored(key_cache),
        as_stored(value_cache),
        key_scale,
        value_scale,
        slot_mapping,
        num_kv_heads,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        BLOCK_SIZE=key_cache.shape[2],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_KEY_DIM=block_key_dim,
        BLOCK_VALUE_DIM=block_value_dim,
    )


@_launch.register_fake
def _(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale):
    return None
