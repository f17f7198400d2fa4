"""store_kv: writes the keys and values of a step's tokens into their slots."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from paged_backend.kernels.dispatch import implementation, implements
from paged_backend.kernels.kv_layout import QUANTISED_MAX, check_cache
from paged_backend.kernels.triton_cache import as_stored, cache_rows, store_rows
from paged_backend.kernels.triton_support import jit, next_power_of_2, tl, triton_operation

# Elements of a token that one program stores: few enough to stay in registers whatever the number of heads.
_ELEMENTS_PER_PROGRAM = 4096


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Stores each token's key and value in the slot that `slot_mapping` names, in place.

    key: [num_tokens, num_kv_heads, key_dim], value: [num_tokens, num_kv_heads, value_dim], any strides;
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, dim], contiguous, of a float dtype (converted to) or
    int8 or float8_e4m3fn with key_scale, value_scale: float32 [num_blocks, num_kv_heads, block_size];
    slot_mapping: int64 [num_tokens], block * block_size + offset, -1 for a padding token that is not stored.

    A quantised slot has a scale of its own for each head, so what it holds depends on its token alone, never on
    what else was stored, in which chunks, or after which preemption.

    Raises ValueError for shapes or dtypes that do not fit and for a backend that does not exist.
    """
    check_cache(key_cache, value_cache, key_scale, value_scale)
    check_tokens(key, value, key_cache, value_cache, slot_mapping)
    run = implementation("store_kv", backend, key)
    run(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def check_tokens(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Raises ValueError unless keys and values fit their caches and have a slot each."""
    for name, tensor, cache in (("key", key, key_cache), ("value", value, value_cache)):
        expected = (slot_mapping.shape[0], cache.shape[1], cache.shape[3])
        if tensor.shape != expected:
            raise ValueError(f"{name} must be [num_tokens, num_kv_heads, dim] = {expected}, got {tuple(tensor.shape)}")


@implements("store_kv", "reference")
def _store_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    block_size = key_cache.shape[2]
    if slot_mapping.lt(0).any():
        stored = slot_mapping >= 0
        key, value, slot_mapping = key[stored], value[stored], slot_mapping[stored]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for tensor, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        if scale is not None:
            tensor, slot_scale = quantise(tensor, cache.dtype)
            scale[blocks, :, offsets] = slot_scale
        cache[blocks, :, offsets] = tensor.to(cache.dtype)


def quantise(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales the last dimension of `tensor` into the range of `dtype`.

    Returns the quantised tensor and its float32 scales, without the last dimension; quantised * scale gives it back.
    """
    tensor = tensor.float()
    largest = QUANTISED_MAX[dtype]
    scale = tensor.abs().amax(-1) / largest
    scaled = (tensor / torch.where(scale == 0, 1, scale)[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


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


@triton_operation("store_kv", mutates=("key_cache", "value_cache", "key_scale", "value_scale"))
def _store_kv_triton(
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


@_store_kv_triton.register_fake
def _(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale):
    return None
