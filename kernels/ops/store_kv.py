"""store_kv: writes the keys and values of a step's tokens into their slots."""

from __future__ import annotations

import torch

from paged_backend.kernels.dispatch import implementation, implements
from paged_backend.kernels.kv_layout import QUANTISED_MAX, check_cache


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
    for name, tensor, cache in (("key", key, key_cache), ("value", value, value_cache)):
        expected = (slot_mapping.shape[0], cache.shape[1], cache.shape[3])
        if tensor.shape != expected:
            raise ValueError(f"{name} must be [num_tokens, num_kv_heads, dim] = {expected}, got {tuple(tensor.shape)}")
    run = implementation("store_kv", backend, key)
    run(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


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
