"""The loop over keys and values that the prefill and decode kernels share: online softmax through a block table."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch

from paged_backend.kernels.attention_variant import AttentionVariant
from paged_backend.kernels.kv_layout import QUANTISED_MAX, LayerCache
from paged_backend.kernels.mask_rule import MaskRule
from paged_backend.kernels.sequences import Sequences
from paged_backend.kernels.triton.cache import cache_rows, load_rows
from paged_backend.kernels.triton.support import interpreted, jit, tl

# Values of RULE, with SPAN as the size of the window or chunk.
FULL, WINDOW, CHUNK = 0, 1, 2


def rule_and_span(mask: MaskRule) -> tuple[int, int]:
    """A mask rule as the kernels take it."""
    return {"full": FULL, "window": WINDOW, "chunk": CHUNK}[mask.kind], mask.size


def launch_arguments(cache: LayerCache, sequences: Sequences, variant: AttentionVariant) -> dict[str, Any]:
    """What both attention launchers take beside queries and where they start, since a custom op takes no objects."""
    rule, span = rule_and_span(variant.mask)
    return {
        "key_cache": cache.key,
        "value_cache": cache.value,
        "key_scale": cache.key_scale,
        "value_scale": cache.value_scale,
        "block_tables": sequences.block_tables,
        "context_lens": sequences.context_lens,
        "max_context_len": sequences.max_context_len,
        "scale": variant.scale,
        "rule": rule,
        "span": span,
        "softcap": variant.softcap,
        "sinks": variant.sinks,
    }


def dot_dtype(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.dtype:
    """In which dtype a kernel multiplies: the query's and the caches', where those are not quantised, promoted."""
    dtype = query.dtype
    for cache in (key_cache, value_cache):
        if cache.dtype not in QUANTISED_MAX:
            dtype = torch.promote_types(dtype, cache.dtype)
    return dtype


def dot_options(dtype: torch.dtype) -> dict[str, Any]:
    """The dtype that a kernel rounds the softmax weights to, and the one it multiplies in."""
    name = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]
    # The interpreter's product of bfloat16 reads the bits of its operands as integers.
    wrong = interpreted and dtype == torch.bfloat16
    return {"ROUND_DTYPE": name, "DOT_DTYPE": tl.float32 if wrong else name}


def element_bits(dtype: torch.dtype, key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    """What the table of tiles knows a product in `dtype` by: 32, 16, or 8 for 16 bits against a quantised cache."""
    return 32 if dtype == torch.float32 else 8 * min(key_cache.dtype.itemsize, value_cache.dtype.itemsize)


def heads_per_program(group: int, most: int) -> tuple[int, int]:
    """Into how many programs the query heads of a KV head are cut, and how many heads each of them takes."""
    parts = -(-group // most)
    return parts, -(-group // parts)


@jit
def first_visible_key(position, span, RULE: tl.constexpr):
    """The earliest key that a query at a position, or at each of several, may see."""
    if RULE == 1:
        return tl.maximum(position - span + 1, 0)
    elif RULE == 2:
        return position // span * span
    else:
        return position * 0


@jit
def start_softmax(sinks_ptr, heads, rows_held, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Running maximum, in powers of two, and sum of the rows: nothing yet, or their sink, which brings no value."""
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=rows_held, other=float("-inf")).to(tl.float32)
        maximum = sinks * 1.4426950408889634
        total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    else:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    return maximum, total


@jit
def attend_keys(
    query,
    accumulator,
    maximum,
    total,
    positions,
    firsts,
    start,
    stop,
    held_from,
    held_to,
    table_ptr,
    kv_head,
    num_kv_heads,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    scale,
    softcap,
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
):
    """Adds the keys from `start` to `stop`, BLOCK_N at a time, to the rows' running softmax.

    query: [BLOCK_M, BLOCK_KEY_DIM]; accumulator: [BLOCK_M, BLOCK_VALUE_DIM], maximum and total: [BLOCK_M], of weights
    that are powers of two; positions and firsts: [BLOCK_M], the last and the first key each row may see.
    If MASKED, only keys from `held_from` up to `held_to` are loaded, tables included, and rows see what they may;
    otherwise every row must be allowed to see every key, and `stop - start` be a multiple of BLOCK_N.
    """
    key_element: tl.constexpr = key_cache_ptr.dtype.element_ty
    value_element: tl.constexpr = value_cache_ptr.dtype.element_ty
    for tile in range(start, stop, BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        held = (keys >= held_from) & (keys < held_to)
        if MASKED:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=held, other=0)
        else:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE)
        rows = cache_rows(blocks, keys % BLOCK_SIZE, kv_head, num_kv_heads, BLOCK_SIZE)
        key = load_rows(key_cache_ptr, rows, held, KEY_DIM, BLOCK_KEY_DIM, MASKED, NATIVE_FLOAT8, DOT_DTYPE)
        # float32 is multiplied as such, never as TF32.
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if key_element == tl.int8 or key_element == tl.uint8:
            scores *= tl.load(key_scale_ptr + rows, mask=held, other=0.0)[None, :]
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)) needs no library of the device; past 2**80 it is 1 already.
            scores = tl.minimum(scores * (2.8853900817779268 / softcap), 80.0)
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
        scores *= 1.4426950408889634
        if MASKED:
            seen = (keys[None, :] >= firsts[:, None]) & (keys[None, :] <= positions[:, None])
            scores = tl.where(seen & held[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet has no maximum to subtract.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(maximum - reference)
        total = total * decay + tl.sum(weights, 1)
        maximum = new_maximum
        value = load_rows(value_cache_ptr, rows, held, VALUE_DIM, BLOCK_VALUE_DIM, MASKED, NATIVE_FLOAT8, DOT_DTYPE)
        if value_element == tl.int8 or value_element == tl.uint8:
            weights *= tl.load(value_scale_ptr + rows, mask=held, other=0.0)[None, :]
        weights = weights.to(ROUND_DTYPE).to(DOT_DTYPE)
        accumulator = tl.dot(weights, value, accumulator * decay[:, None], input_precision="ieee")
    return accumulator, maximum, total
