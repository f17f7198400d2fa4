"""LayerCache: how the keys and values of a layer lie in blocks, and how to read and write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# The largest magnitude of each quantised cache dtype; a slot's scale maps its largest element here.
QUANTISED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# Makes a tensor of a shape and dtype whose contents do not matter.
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class LayerCache:
    """One layer's blocks.

    key, value: ``[num_blocks, num_kv_heads, block_size, dim]``, contiguous; key and value dim may differ. Slot s is
    offset ``s % block_size`` of block ``s // block_size``.
    key_scale, value_scale: float32 ``[num_blocks, num_kv_heads, block_size]`` where key and value are int8 or
    float8_e4m3fn, else None. A slot has a scale of its own for each head, so that what is stored for a token never
    depends on the tokens stored after it.

    Read it by name: it may gain fields. Raises ValueError unless shapes, dtypes and layout are what kernels rely on.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        key, value = self.key, self.value
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                "key and value of a cache must be [num_blocks, num_kv_heads, block_size, dim] and agree in all but "
                f"dim, got {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if not (key.is_contiguous() and value.is_contiguous()):
            raise ValueError("key and value of a cache must be contiguous")
        for name, cache, scale in (("key", key, self.key_scale), ("value", value, self.value_scale)):
            if cache.dtype not in QUANTISED_MAX:
                if scale is not None:
                    raise ValueError(f"{name}_scale is for int8 and float8_e4m3fn caches, {name} is {cache.dtype}")
            elif (
                scale is None
                or scale.shape != cache.shape[:3]
                or scale.dtype != torch.float32
                or not scale.is_contiguous()
            ):
                raise ValueError(
                    f"{name} is {cache.dtype} and needs {name}_scale, contiguous float32 {tuple(cache.shape[:3])}"
                )

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    @property
    def key_dim(self) -> int:
        return self.key.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    def tensors(self) -> list[torch.Tensor]:
        """What it consists of; the first dimension of each is num_blocks."""
        return [t for t in (self.key, self.value, self.key_scale, self.value_scale) if t is not None]


def empty_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    allocate: Allocate,
) -> LayerCache:
    """A cache of this size in tensors that `allocate` makes."""
    slots = (num_blocks, num_kv_heads, block_size)
    key, value = allocate((*slots, key_dim), dtype), allocate((*slots, value_dim), dtype)
    if dtype not in QUANTISED_MAX:
        return LayerCache(key, value)
    return LayerCache(key, value, allocate(slots, torch.float32), allocate(slots, torch.float32))


def scatter_slots(cache: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Writes what each token of [num_tokens, num_kv_heads, ...] has into its slot of a cache, or of its scales."""
    block_size = cache.shape[2]
    cache[slots // block_size, :, slots % block_size] = tokens.to(cache.dtype)


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
