"""store_kv: writes the keys and values of a step's tokens into their slots."""

from __future__ import annotations

import torch

from paged_backend.kernels.dispatch import Backend, implementation, reference
from paged_backend.kernels.kv_layout import QUANTISED_MAX, LayerCache, scatter_slots


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    *,
    backend: str | Backend = "auto",
) -> None:
    """Stores each token's key and value in the slot that `slot_mapping` names, in place.

    key: [num_tokens, num_kv_heads, key_dim], value: [num_tokens, num_kv_heads, value_dim], any strides, converted to
    the dtype of the cache or, with scales, quantised;
    slot_mapping: int64 [num_tokens], block * block_size + offset, -1 for a padding token that is not stored.

    Raises ValueError for shapes that do not fit and for a backend that does not exist.
    """
    check_tokens(key, value, cache, slot_mapping)
    implementation("store_kv", backend, key)(key, value, cache, slot_mapping)


def check_tokens(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
    """Raises ValueError unless keys and values fit their caches and have a slot each."""
    num_tokens = slot_mapping.shape[0]
    for name, tensor, held in (("key", key, cache.key), ("value", value, cache.value)):
        expected = (num_tokens, held.shape[1], held.shape[3])
        if tensor.shape != expected:
            raise ValueError(f"{name} must be [num_tokens, num_kv_heads, dim] = {expected}, got {tuple(tensor.shape)}")


@reference("store_kv")
def _store_kv_reference(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
    if slot_mapping.lt(0).any():
        stored = slot_mapping >= 0
        key, value, slot_mapping = key[stored], value[stored], slot_mapping[stored]
    for tokens, held, scale in ((key, cache.key, cache.key_scale), (value, cache.value, cache.value_scale)):
        if scale is not None:
            tokens, slot_scale = quantise(tokens, held.dtype)
            scatter_slots(scale, slot_mapping, slot_scale)
        scatter_slots(held, slot_mapping, tokens)


def quantise(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales the last dimension of `tensor` into the range of `dtype`.

    Returns the quantised tensor and its float32 scales, without the last dimension; quantised * scale gives it back.
    """
    tensor = tensor.float()
    largest = QUANTISED_MAX[dtype]
    scale = tensor.abs().amax(-1) / largest
    scaled = (tensor / torch.where(scale == 0, 1, scale)[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale
