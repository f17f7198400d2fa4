"""How keys and values lie in the cache, which of them a query may see, and how to read them back."""

from __future__ import annotations

import torch

# The largest magnitude of each quantised cache dtype; a slot's scale maps its largest element here.
QUANTISED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def check_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    """Raises ValueError unless caches and scales have the shapes, dtypes and layout every kernel relies on."""
    if key_cache.dim() != 4 or value_cache.dim() != 4 or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            "key_cache and value_cache must be [num_blocks, num_kv_heads, block_size, dim] and agree in all but dim, "
            f"got {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("key_cache and value_cache must be contiguous")
    for name, cache, scale in (("key", key_cache, key_scale), ("value", value_cache, value_scale)):
        if cache.dtype in QUANTISED_MAX:
            if (
                scale is None
                or scale.shape != cache.shape[:3]
                or scale.dtype != torch.float32
                or not scale.is_contiguous()
            ):
                raise ValueError(
                    f"{name}_cache is {cache.dtype} and needs {name}_scale, contiguous float32 {tuple(cache.shape[:3])}"
                )
        elif scale is not None:
            raise ValueError(f"{name}_scale is for int8 and float8_e4m3fn caches, {name}_cache is {cache.dtype}")


def check_rule(window: int | None, chunk: int | None) -> None:
    """Raises ValueError unless the mask rule is none, a positive window or a positive chunk."""
    if window is not None and chunk is not None:
        raise ValueError(f"a layer has one mask rule, got window={window} and chunk={chunk}")
    for name, size in (("window", window), ("chunk", chunk)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def first_visible(position: int, window: int | None, chunk: int | None) -> int:
    """The earliest key position that a query at `position` may see."""
    if window is not None:
        return max(0, position - window + 1)
    if chunk is not None:
        return position // chunk * chunk
    return 0


def visible(
    query_positions: torch.Tensor, key_positions: torch.Tensor, window: int | None, chunk: int | None
) -> torch.Tensor:
    """Whether each query may see each key: causal, and within the window or chunk if there is one.

    The two position tensors broadcast against each other; the result is bool of their common shape.
    """
    mask = key_positions <= query_positions
    if window is not None:
        mask &= key_positions > query_positions - window
    if chunk is not None:
        mask &= key_positions // chunk == query_positions // chunk
    return mask


def rows_of_blocks(blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Numbers the (block, head) pairs of a batch for `gather_rows`.

    blocks: int64 [batch, n]. Returns int64 [batch, num_kv_heads, n].
    """
    return blocks[:, None, :] * num_kv_heads + torch.arange(num_kv_heads, device=blocks.device)[:, None]


def gather_rows(cache: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Copies blocks out of a cache, head by head, in table order.

    cache: [num_blocks, num_kv_heads, block_size, dim]; scale: float32 [num_blocks, num_kv_heads, block_size] or None;
    rows: what `rows_of_blocks` returns, [batch, num_kv_heads, n].
    Returns [batch, num_kv_heads, n * block_size, dim], in float32 when the cache has scales.
    """
    batch, num_kv_heads, _ = rows.shape
    block_size, dim = cache.shape[2:]
    # One row per block and head copies whole, and lands head by head without a transposition afterwards.
    gathered = cache.view(-1, block_size * dim).index_select(0, rows.flatten()).view(batch, num_kv_heads, -1, dim)
    if scale is None:
        return gathered
    scales = scale.view(-1, block_size).index_select(0, rows.flatten()).view(batch, num_kv_heads, -1, 1)
    return gathered.float() * scales
