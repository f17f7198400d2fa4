"""rotary_store_kv: rotary position embedding of queries and keys, with the keys going straight into their slots."""

from __future__ import annotations

import torch

from paged_backend.kernels.dispatch import Backend, implementation, reference
from paged_backend.kernels.kv_layout import LayerCache
from paged_backend.kernels.store_kv import check_tokens


def rotary_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    backend: str | Backend = "auto",
) -> torch.Tensor:
    """Rotates queries and keys by their positions, stores keys and values as `store_kv` does, returns the queries.

    query: [num_tokens, num_heads, key_dim], key: [num_tokens, num_kv_heads, key_dim], value: [num_tokens, num_kv_heads,
    value_dim], any strides; cos, sin: [num_tokens, rotary_dim] as transformers' rotary embeddings give them, each angle
    twice; dims from rotary_dim on stay as they are. Dim d turns with d + rotary_dim / 2, or, if `interleaved`, with its
    neighbour. Cache and slot_mapping: see `store_kv`.

    Returns the rotated query, contiguous; a padding token's is rotated too, and only its key and value go nowhere. The
    rotation is in float32 and rounds once, where a model that rotates in a half precision rounds three times.
    Raises ValueError for shapes or dtypes that do not fit and for a backend that does not exist.
    """
    check_tokens(key, value, cache, slot_mapping)
    if query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
        raise ValueError(f"query {tuple(query.shape)} and key {tuple(key.shape)} must agree in tokens and dim")
    rotary_dim = cos.shape[-1]
    if cos.shape != sin.shape or cos.shape != (key.shape[0], rotary_dim) or rotary_dim > key.shape[2] or rotary_dim % 2:
        raise ValueError(
            f"cos and sin must be [{key.shape[0]}, rotary_dim] with an even rotary_dim of at most {key.shape[2]}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    run = implementation("rotary_store_kv", backend, query)
    return run(query, key, value, cos, sin, cache, slot_mapping, interleaved)


@reference("rotary_store_kv")
def _rotary_store_kv_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    store = implementation("store_kv", "reference", key)
    rotated = _rotate(key, cos, sin, interleaved)
    store(rotated, value, cache, slot_mapping)
    return _rotate(query, cos, sin, interleaved)


def _rotate(tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    rotary_dim = cos.shape[-1]
    turning = tokens[..., :rotary_dim].float()
    if interleaved:
        partner = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        partner = torch.cat((-turning[..., rotary_dim // 2 :], turning[..., : rotary_dim // 2]), -1)
    turned = turning * cos[:, None].float() + partner * sin[:, None].float()
    return torch.cat((turned.to(tokens.dtype), tokens[..., rotary_dim:]), -1)
