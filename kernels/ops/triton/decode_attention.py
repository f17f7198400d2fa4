"""decode_attention in Triton: a program for each KV head and split of a context, and one that merges the splits."""

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
    num_processors,
    tl,
    triton_operation,
)
from paged_backend.kernels.triton.tuning import decode_tiles

# A context is split until there are this many programs for each processor, which evens out the last wave of them, but
# not below this many keys each, where starting a program and merging its result would show.
_PROGRAMS_PER_PROCESSOR = 8
_KEYS_PER_SPLIT = 256
_MOST_SPLITS = 64

# Rows of the smallest product that tensor cores have.
_LEAST_ROWS = 16


def num_splits(num_programs: int, max_context_len: int, processors: int) -> int:
    """Into how many parts decode splits each context, when unsplit it would be `num_programs` programs.

    From the batch, the longest context and the size of the device alone, all known without reading device memory.
    """
    for_occupancy = -(-processors * _PROGRAMS_PER_PROCESSOR // max(num_programs, 1))
    worthwhile = -(-max_context_len // _KEYS_PER_SPLIT)
    return max(1, min(for_occupancy, worthwhile, _MOST_SPLITS))


@jit
def _decode_attention_kernel(
    query_ptr,
    output_ptr,
    partial_ptr,
    extremes_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_tables_ptr,
    context_lens_ptr,
    sinks_ptr,
    scale,
    softcap,
    span,
    num_kv_heads,
    stride_query_seq,
    stride_query_head,
    stride_table,
    NUM_SPLITS: tl.constexpr,
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
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // PARTS
    split = tl.program_id(2)
    program_rows = tl.arange(0, BLOCK_M)
    group_rows = tl.program_id(1) % PARTS * HEADS + program_rows
    heads = kv_head * GROUP + group_rows
    rows_held = (program_rows < HEADS) & (group_rows < GROUP)
    context_len = tl.load(context_lens_ptr + sequence)
    position = tl.maximum(context_len - 1, 0)
    first = first_visible_key(position, span, RULE)
    # Whole tiles of keys for each split, counted from the tile that holds the first visible key.
    base = first // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(tl.maximum(context_len - base, 0), BLOCK_N)
    tiles_per_split = tl.cdiv(tiles, NUM_SPLITS)
    start = base + split * tiles_per_split * BLOCK_N
    stop = tl.minimum(start + tiles_per_split * BLOCK_N, context_len)

    key_dims = tl.arange(0, BLOCK_KEY_DIM)
    query = tl.load(
        query_ptr + sequence * stride_query_seq + heads.to(tl.int64)[:, None] * stride_query_head + key_dims[None, :],
        mask=rows_held[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)
    # A sink is in the softmax once, however many splits there are.
    first_split = program_rows < tl.where(split == 0, BLOCK_M, 0)
    maximum, total = start_softmax(sinks_ptr, heads, rows_held & first_split, HAS_SINKS, BLOCK_M)
    accumulator = tl.zeros([BLOCK_M, BLOCK_VALUE_DIM], tl.float32)
    accumulator, maximum, total = attend_keys(
        query,
        accumulator,
        maximum,
        total,
        program_rows * 0 + position,
        program_rows * 0 + first,
        start,
        stop,
        first,
        stop,
        block_tables_ptr + sequence * stride_table,
        kv_head,
        num_kv_heads,
        key_cache_ptr,
        value_cache_ptr,
        key_scale_ptr,
        value_scale_ptr,
        scale,
        softcap,
        True,
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
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    rows = sequence * num_kv_heads * GROUP + heads
    output_mask = rows_held[:, None] & (value_dims < VALUE_DIM)[None, :]
    if NUM_SPLITS == 1:
        attended = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
        pointers = output_ptr + rows[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(pointers, attended.to(output_ptr.dtype.element_ty), mask=output_mask)
    else:
        parts = rows * NUM_SPLITS + split
        tl.store(partial_ptr + parts[:, None] * VALUE_DIM + value_dims[None, :], accumulator, mask=output_mask)
        tl.store(extremes_ptr + parts * 2, maximum, mask=rows_held)
        tl.store(extremes_ptr + parts * 2 + 1, total, mask=rows_held)


@jit
def _merge_splits_kernel(
    output_ptr,
    partial_ptr,
    extremes_ptr,
    NUM_SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    splits = tl.arange(0, BLOCK_SPLITS)
    held = splits < NUM_SPLITS
    parts = row * NUM_SPLITS + splits
    maximum = tl.load(extremes_ptr + parts * 2, mask=held, other=float("-inf"))
    total = tl.load(extremes_ptr + parts * 2 + 1, mask=held, other=0.0)
    overall = tl.max(maximum, 0)
    factors = tl.exp2(maximum - tl.where(overall == float("-inf"), 0.0, overall))
    partial = tl.load(
        partial_ptr + parts[:, None] * VALUE_DIM + dims[None, :],
        mask=held[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    weight = tl.sum(total * factors, 0)
    attended = tl.sum(partial * factors[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    tl.store(output_ptr + row * VALUE_DIM + dims, attended.to(output_ptr.dtype.element_ty), mask=dims < VALUE_DIM)


def decode_attention(
    query: torch.Tensor, cache: LayerCache, sequences: Sequences, variant: AttentionVariant
) -> torch.Tensor:
    """As the operation of this name."""
    attended: torch.Tensor = _launch(query, **launch_arguments(cache, sequences, variant))
    return attended


@triton_operation("decode_attention")
def _launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
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
    num_seqs, num_heads, key_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    value_dim, group = value_cache.shape[3], num_heads // num_kv_heads
    output = query.new_empty(num_seqs, num_heads, value_dim)
    if not num_seqs:
        return output
    block_key_dim, block_value_dim = max(16, next_power_of_2(key_dim)), max(16, next_power_of_2(value_dim))
    dtype = dot_dtype(query, key_cache, value_cache)
    arch = architecture(query.device)
    bits = element_bits(dtype, key_cache, value_cache)
    tiles = decode_tiles(arch, bits, max(block_key_dim, block_value_dim))
    parts, heads = heads_per_program(group, tiles.block_m)
    longest = block_tables.shape[1] * block_size if max_context_len is None else max_context_len
    programs = num_seqs * num_kv_heads * parts
    splits = num_splits(programs, min(longest, span or longest), num_processors(query.device))
    rows = num_seqs * num_heads
    partial = query.new_empty((rows, splits, value_dim) if splits > 1 else 0, dtype=torch.float32)
    extremes = query.new_empty((rows, splits, 2) if splits > 1 else 0, dtype=torch.float32)
    _decode_attention_kernel[(num_seqs, num_kv_heads * parts, splits)](
        query,
        output,
        partial,
        extremes,
        as_stored(key_cache),
        as_stored(value_cache),
        key_scale,
        value_scale,
        block_tables,
        context_lens,
        sinks,
        scale,
        softcap or 0.0,
        span,
        num_kv_heads,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        NUM_SPLITS=splits,
        GROUP=group,
        PARTS=parts,
        HEADS=heads,
        RULE=rule,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        BLOCK_SIZE=block_size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_M=max(_LEAST_ROWS, next_power_of_2(heads)),
        BLOCK_N=tiles.block_n,
        BLOCK_KEY_DIM=block_key_dim,
        BLOCK_VALUE_DIM=block_value_dim,
        NATIVE_FLOAT8=converts_float8(arch),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **dot_options(dtype),
    )
    if splits > 1:
        block_dim = min(block_value_dim, 128)
        _merge_splits_kernel[(rows, -(-value_dim // block_dim))](
            output,
            partial,
            extremes,
            NUM_SPLITS=splits,
            VALUE_DIM=value_dim,
            BLOCK_SPLITS=next_power_of_2(splits),
            BLOCK_DIM=block_dim,
        )
    return output


@_launch.register_fake
def _(query, key_cache, value_cache, *_, **__):
    return query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
