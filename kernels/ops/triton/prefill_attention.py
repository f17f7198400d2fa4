"""prefill_attention in Triton: a program for each tile of queries and each KV head."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from paged_backend.kernels.attention_variant import AttentionVariant
from paged_backend.kernels.kv_layout import LayerCache
from paged_backend.kernels.sequences import Sequences
from paged_backend.kernels.triton.attention import (
    attend_keys,
    dot_dtype,
    dot_options,
    element_bits,
    first_visible_key,
    heads_per_program,
    launch_arguments,
    start_softmax,
)
from paged_backend.kernels.triton.cache import as_stored
from paged_backend.kernels.triton.support import (
    architecture,
    converts_float8,
    jit,
    next_power_of_2,
    tl,
    triton_operation,
)
from paged_backend.kernels.triton.tuning import prefill_tiles


@jit
def _prefill_attention_kernel(
    query_ptr,
    output_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    sinks_ptr,
    scale,
    softcap,
    span,
    num_seqs,
    num_kv_heads,
    stride_query_token,
    stride_query_head,
    stride_table,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    RULE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
):
    # Rows are pairs of token and head of the group, so that a key is loaded once for all the heads that share it.
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    # Sequence s owns the tiles from cu_seqlens_q[s] // TOKENS + s on, at least as many as it needs: the last sequence
    # that starts at or before this tile is found without the host knowing any length, as in vLLM's unified attention.
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    first_token = tl.load(cu_seqlens_q_ptr + sequence)
    query_len = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_token
    tile -= first_token // TOKENS + sequence
    tiles = tl.cdiv(query_len, TOKENS)
    if tile >= tiles:
        return
    # The last tokens see most keys; starting with them leaves short work for the end.
    first_row = (tiles - 1 - tile) * TOKENS
    last_row = tl.minimum(first_row + TOKENS, query_len) - 1
    context_len = tl.load(context_lens_ptr + sequence)
    before = context_len - query_len

    pairs = tl.arange(0, BLOCK_M)
    tokens = first_row + pairs // HEADS
    group_rows = tl.program_id(1) % PARTS * HEADS + pairs % HEADS
    heads = kv_head * GROUP + group_rows
    rows_held = (pairs < TOKENS * HEADS) & (tokens <= last_row) & (group_rows < GROUP)
    # Rows without a token repeat the last one, so that they widen no range.
    positions = before + tl.minimum(tokens, last_row)
    firsts = first_visible_key(positions, span, RULE)
    lowest = first_visible_key(before + first_row, span, RULE)
    stop = before + last_row + 1

    key_dims = tl.arange(0, BLOCK_KEY_DIM)
    rows = (first_token + tokens).to(tl.int64)
    query = tl.load(
        query_ptr
        + rows[:, None] * stride_query_token
        + heads.to(tl.int64)[:, None] * stride_query_head
        + key_dims[None, :],
        mask=rows_held[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)
    maximum, total = start_softmax(sinks_ptr, heads, rows_held, HAS_SINKS, BLOCK_M)
    accumulator = tl.zeros([BLOCK_M, BLOCK_VALUE_DIM], tl.float32)
    table_ptr = block_tables_ptr + tl.cast(sequence, tl.int64) * stride_table

    # Keys in three stretches: before all rows see every key of a tile (windows and chunks only), while they do, after.
    start = lowest // BLOCK_N * BLOCK_N
    all_from = tl.cdiv(first_visible_key(before + last_row, span, RULE), BLOCK_N) * BLOCK_N
    all_to = (before + first_row + 1) // BLOCK_N * BLOCK_N
    all_to = tl.maximum(all_from, all_to)
    for stretch in tl.static_range(1 if RULE == 0 else 0, 3):
        accumulator, maximum, total = attend_keys(
            query,
            accumulator,
            maximum,
            total,
            positions,
            firsts,
            start if stretch == 0 else (all_from if stretch == 1 else all_to),
            tl.minimum(all_from, stop) if stretch == 0 else (all_to if stretch == 1 else stop),
            lowest,
            stop,
            table_ptr,
            kv_head,
            num_kv_heads,
            key_cache_ptr,
            value_cache_ptr,
            key_scale_ptr,
            value_scale_ptr,
            scale,
            softcap,
            stretch != 1,
            HAS_SOFTCAP,
            BLOCK_SIZE,
            KEY_DIM,
            VALUE_DIM,
            BLOCK_N,
            BLOCK_KEY_DIM,
            BLOCK_VALUE_DIM,
            ROUND_DTYPE,
            DOT_DTYPE,
            NATIVE_FLOAT8,
        )
    attended = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    output_rows = rows * num_kv_heads * GROUP + heads
    tl.store(
        output_ptr + output_rows[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(output_ptr.dtype.element_ty),
        mask=rows_held[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


def prefill_attention(
    query: torch.Tensor, cache: LayerCache, sequences: Sequences, variant: AttentionVariant
) -> torch.Tensor:
    """As the operation of this name."""
    assert sequences.cu_seqlens_q is not None
    attended: torch.Tensor = _launch(
        query, cu_seqlens_q=sequences.cu_seqlens_q, **launch_arguments(cache, sequences, variant)
    )
    return attended


@triton_operation("prefill_attention")
def _launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    rule: int,
    span: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    max_context_len: int | None,
) -> torch.Tensor:
    query = query if query.stride(2) == 1 else query.contiguous()
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    value_dim, group = value_cache.shape[3], num_heads // num_kv_heads
    num_seqs = context_lens.shape[0]
    output = query.new_zeros(num_tokens, num_heads, value_dim)
    if not (num_tokens and num_seqs):
        return output
    block_key_dim, block_value_dim = max(16, next_power_of_2(key_dim)), max(16, next_power_of_2(value_dim))
    dtype = dot_dtype(query, key_cache, value_cache)
    arch = architecture(query.device)
    bits = element_bits(dtype, key_cache, value_cache)
    tiles = prefill_tiles(arch, bits, max(block_key_dim, block_value_dim))
    parts, heads = heads_per_program(group, tiles.block_m)
    _prefill_attention_kernel[(num_tokens // (tiles.block_m // heads) + num_seqs, num_kv_heads * parts)](
        query,
        output,
        as_stored(key_cache),
        as_stored(value_cache),
        key_scale,
        value_scale,
        block_tables,
        cu_seqlens_q,
        context_lens,
        sinks,
        scale,
        softcap or 0.0,
        span,
        num_seqs,
        num_kv_heads,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        GROUP=group,
        PARTS=parts,
        HEADS=heads,
        RULE=rule,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        BLOCK_SIZE=block_size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_KEY_DIM=block_key_dim,
        BLOCK_VALUE_DIM=block_value_dim,
        NATIVE_FLOAT8=converts_float8(arch),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **dot_options(dtype),
    )
    return output


@_launch.register_fake
def _(query, key_cache, value_cache, *_, **__):
    return query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
