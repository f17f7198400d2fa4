"""decode_attention: one query per sequence against its cached keys and values."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paged_backend.kernels.dispatch import implementation, implements
from paged_backend.kernels.kv_layout import check_cache, check_rule, first_visible, gather_rows, rows_of_blocks, visible
from paged_backend.kernels.remembered import Remembered
from paged_backend.kernels.softmax_attention import bias_of, softmax_attention
from paged_backend.kernels.triton_attention import (
    attend_keys,
    dot_dtype,
    dot_options,
    element_bits,
    first_visible_key,
    heads_per_program,
    rule_and_span,
    start_softmax,
)
from paged_backend.kernels.triton_cache import as_stored
from paged_backend.kernels.triton_support import (
    architecture,
    converts_float8,
    jit,
    next_power_of_2,
    num_processors,
    tl,
    triton_operation,
)
from paged_backend.kernels.tuning import decode_tiles

# Sequences are gathered in groups of about this many key elements: small enough that the copies stay in the
# second-level cache of a core, large enough that the calls into torch do not show. Measured, see kernels/README.md.
_GATHERED_ELEMENTS = 1 << 19

# A context is split until there are this many programs for each processor, which evens out the last wave of them, but
# not below this many keys each, where starting a program and merging its result would show.
_PROGRAMS_PER_PROCESSOR = 8
_KEYS_PER_SPLIT = 256
_MOST_SPLITS = 64

# Rows of the smallest product that tensor cores have.
_LEAST_ROWS = 16


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    max_context_len: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attends with each sequence's newest token to everything of that sequence its mask rule lets it see.

    query: [num_seqs, num_heads, key_dim], any strides; query head h reads KV head h // (num_heads // num_kv_heads);
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, dim], contiguous, key and value dim may differ,
    quantised caches with key_scale, value_scale: float32 [num_blocks, num_kv_heads, block_size];
    block_tables: int32 [num_seqs, max_blocks]; entries past the context, or for blocks before the window or chunk, are
    never followed and may hold anything;
    context_lens: int32 [num_seqs], tokens of the sequence with the current one, whose key and value are stored already
    and whose position is context_len - 1; 0 marks a padding row, which comes out zero.

    A key at j is visible to the query at i when j <= i and, with a window, i - j < window, with a chunk,
    j // chunk == i // chunk. Scores are scaled, then softcap * tanh(score / softcap) when softcap is given.
    sinks: [num_heads], a logit per head that takes part in the softmax and brings no value (gpt_oss).
    max_context_len: an upper bound of context_lens known to the caller, which spares a device a synchronisation.

    Returns [num_seqs, num_heads, value_dim] in the dtype of query; the softmax is computed in float32.
    Raises ValueError for shapes, dtypes or rules that do not fit and for a backend that does not exist.
    """
    check_cache(key_cache, value_cache, key_scale, value_scale)
    check_rule(window, chunk)
    num_seqs, num_heads, key_dim = query.shape
    if key_dim != key_cache.shape[3] or num_heads % key_cache.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit key_cache {tuple(key_cache.shape)}: "
            "the dims must agree and num_heads be a multiple of num_kv_heads"
        )
    if block_tables.shape[0] != num_seqs or context_lens.shape != (num_seqs,):
        raise ValueError(
            f"block_tables {tuple(block_tables.shape)} and context_lens {tuple(context_lens.shape)} "
            f"must have one row for each of the {num_seqs} queries"
        )
    run = implementation("decode_attention", backend, query)
    return run(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        scale,
        window,
        chunk,
        softcap,
        sinks,
        key_scale,
        value_scale,
        max_context_len,
    )


@implements("decode_attention", "reference")
def _decode_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    max_context_len: int | None,
) -> torch.Tensor:
    num_seqs, num_heads, key_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    plan = _plans(block_tables, tuple(context_lens.tolist()), num_kv_heads, block_size, key_dim, window, chunk)
    output = query.new_zeros(num_seqs, num_heads, value_cache.shape[3])
    for batch in plan:
        attended = softmax_attention(
            query.index_select(0, batch.sequences).view(-1, num_kv_heads, num_heads // num_kv_heads, 1, key_dim),
            gather_rows(key_cache, key_scale, batch.rows),
            gather_rows(value_cache, value_scale, batch.rows),
            batch.bias,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        output[batch.sequences] = attended.reshape(-1, num_heads, attended.shape[-1]).to(output.dtype)
    return output


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences of similar length that are gathered and attended together."""

    sequences: torch.Tensor  # int64 [batch], rows of the query
    rows: torch.Tensor  # int64 [batch, num_kv_heads, n], see rows_of_blocks
    bias: torch.Tensor  # float32 [batch, 1, n * block_size], see bias_of


def _plan(
    block_tables: torch.Tensor,
    context_lens: tuple[int, ...],
    num_kv_heads: int,
    block_size: int,
    key_dim: int,
    window: int | None,
    chunk: int | None,
) -> list[_Batch]:
    device = block_tables.device
    # The first table entry that each sequence's query can see, and how many there are from there on.
    firsts = [first_visible(length - 1, window, chunk) // block_size for length in context_lens]
    counts = [-(-length // block_size) - first for length, first in zip(context_lens, firsts, strict=True)]
    order = sorted((index for index, length in enumerate(context_lens) if length), key=counts.__getitem__)
    plan = []
    for batch in _batches(order, counts, num_kv_heads * block_size * key_dim):
        width = counts[batch[-1]]
        sequences, first, count, length = (
            torch.tensor([row[index] for index in batch], device=device)[:, None]
            for row in (range(len(counts)), firsts, counts, context_lens)
        )
        entries = torch.arange(width, device=device).expand(len(batch), -1)
        # Entries past the context may hold anything; block 0 always exists, and what it holds is hidden.
        blocks = block_tables[sequences, torch.where(entries < count, first + entries, 0)].long()
        blocks = torch.where(entries < count, blocks, 0)
        key_positions = first * block_size + torch.arange(width * block_size, device=device)
        bias = bias_of(visible(length - 1, key_positions, window, chunk))
        plan.append(_Batch(sequences[:, 0], rows_of_blocks(blocks, num_kv_heads), bias[:, None]))
    return plan


def _batches(order: list[int], counts: list[int], block_elements: int) -> Iterator[list[int]]:
    """Cuts sequences in ascending order of their counts of blocks into batches that stay small."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * counts[index] * block_elements > _GATHERED_ELEMENTS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


# Every layer of a step with one mask rule asks for the same plan.
_plans = Remembered(_plan)


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


@triton_operation("decode_attention")
def _decode_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
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
    rule, span = rule_and_span(window, chunk)
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


@_decode_attention_triton.register_fake
def _(query, key_cache, value_cache, *_):
    return query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
