"""rotary_store_kv in Triton: a program for each token and part of its heads."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from paged_backend.kernels.kv_layout import LayerCache
from paged_backend.kernels.triton.cache import as_stored, cache_rows, store_rows
from paged_backend.kernels.triton.support import jit, next_power_of_2, tl, triton_operation

# Elements that one program rotates.
_ELEMENTS_PER_PROGRAM = 2048


@jit
def _load_rotated(
    tokens_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    heads_held,
    stride_head,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Heads of one token, [heads, BLOCK_DIM], rotated, in the dtype of `tokens_ptr`."""
    dims = tl.arange(0, BLOCK_DIM)
    turning = dims < ROTARY_DIM
    if INTERLEAVED:
        partners = dims ^ 1
        sign = tl.where(dims % 2 == 0, -1.0, 1.0)
    else:
        partners = tl.where(dims < ROTARY_DIM // 2, dims + ROTARY_DIM // 2, dims - ROTARY_DIM // 2)
        sign = tl.where(dims < ROTARY_DIM // 2, -1.0, 1.0)
    cos = tl.load(cos_ptr + dims, mask=turning, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + dims, mask=turning, other=0.0).to(tl.float32) * sign
    rows = tokens_ptr + heads.to(tl.int64)[:, None] * stride_head
    mask = heads_held[:, None] & (dims < DIM)[None, :]
    tokens = tl.load(rows + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(rows + partners[None, :], mask=heads_held[:, None] & turning[None, :], other=0.0).to(tl.float32)
    return (tokens * cos[None, :] + partner * sin[None, :]).to(tokens_ptr.dtype.element_ty)


@jit
def _rotary_store_kv_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    rotated_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slot_mapping_ptr,
    num_heads,
    num_kv_heads,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cos,
    stride_sin,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(num_heads, BLOCK_HEADS)
    cos_ptr += token * stride_cos
    sin_ptr += token * stride_sin
    key_dims = tl.arange(0, BLOCK_KEY_DIM)
    # The first programs of a token take its queries, the rest its keys and values.
    if part < query_parts:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        held = heads < num_heads
        rotated = _load_rotated(
            query_ptr + token * stride_query_token,
            cos_ptr,
            sin_ptr,
            heads,
            held,
            stride_query_head,
            KEY_DIM,
            ROTARY_DIM,
            BLOCK_KEY_DIM,
            INTERLEAVED,
        )
        rows = token * num_heads + heads
        pointers = rotated_ptr + rows[:, None] * KEY_DIM + key_dims[None, :]
        tl.store(pointers, rotated, mask=held[:, None] & (key_dims < KEY_DIM)[None, :])
        return
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = (part - query_parts) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    held = heads < num_kv_heads
    rows = cache_rows(slot // BLOCK_SIZE, slot % BLOCK_SIZE, heads, num_kv_heads, BLOCK_SIZE)
    rotated = _load_rotated(
        key_ptr + token * stride_key_token,
        cos_ptr,
        sin_ptr,
        heads,
        held,
        stride_key_head,
        KEY_DIM,
        ROTARY_DIM,
        BLOCK_KEY_DIM,
        INTERLEAVED,
    )
    store_rows(rotated, key_cache_ptr, key_scale_ptr, rows, held, KEY_DIM, BLOCK_KEY_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)[None, :]
    value = tl.load(
        value_ptr + token * stride_value_token + heads.to(tl.int64)[:, None] * stride_value_head + value_dims,
        mask=held[:, None] & (value_dims < VALUE_DIM),
        other=0.0,
    )
    store_rows(value, value_cache_ptr, value_scale_ptr, rows, held, VALUE_DIM, BLOCK_VALUE_DIM)


def rotary_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """As the operation of this name."""
    stored = (cache.key, cache.value, slot_mapping, interleaved, cache.key_scale, cache.value_scale)
    rotated: torch.Tensor = _launch(query, key, value, cos, sin, *stored)
    return rotated


@triton_operation("rotary_store_kv", mutates=("key_cache", "value_cache", "key_scale", "value_scale"))
def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> torch.Tensor:
    query, key, value, cos, sin = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value, cos, sin)
    )
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    rotated = query.new_empty(num_tokens, num_heads, key_dim)
    if not num_tokens:
        return rotated
    block_key_dim, block_value_dim = next_power_of_2(key_dim), next_power_of_2(value_dim)
    fitting = max(1, _ELEMENTS_PER_PROGRAM // max(block_key_dim, block_value_dim))
    block_heads = min(next_power_of_2(max(num_heads, num_kv_heads)), fitting)
    parts = -(-num_heads // block_heads) + -(-num_kv_heads // block_heads)
    _rotary_store_kv_kernel[(num_tokens, parts)](
        query,
        key,
        value,
        cos,
        sin,
        rotated,
        as_stored(key_cache),
        as_stored(value_cache),
        key_scale,
        value_scale,
        slot_mapping,
        num_heads,
        num_kv_heads,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cos.stride(0),
        sin.stride(0),
        BLOCK_SIZE=key_cache.shape[2],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        ROTARY_DIM=cos.shape[-1],
        BLOCK_HEADS=block_heads,
        BLOCK_KEY_DIM=block_key_dim,
        BLOCK_VALUE_DIM=block_value_dim,
        INTERLEAVED=interleaved,
    )
    return rotated


@_launch.register_fake
def _(query, *_):
    return query.new_empty(query.shape)
