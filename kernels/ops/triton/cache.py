"""Reading and writing rows of the cache in Triton kernels, quantised ones included.

A float8 cache reaches a kernel as uint8, so that one kernel serves architectures with and without e4m3.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from paged_backend.kernels.triton.support import jit, tl


def as_stored(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels take it: float8 as its bits, everything else unchanged."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@jit
def cache_rows(blocks, offsets, head, num_kv_heads, BLOCK_SIZE: tl.constexpr):
    """Row numbers of a cache seen as [num_blocks * num_kv_heads * block_size, dim], in int64."""
    return (blocks.to(tl.int64) * num_kv_heads + head) * BLOCK_SIZE + offsets


@jit
def decode_e4m3(bits, NATIVE_FLOAT8: tl.constexpr):
    """uint8 to the float32 that e4m3 means by it, except that its two NaNs come out as 480 unless NATIVE_FLOAT8.

    The store kernel writes no NaN: it puts it into the scale.
    """
    if NATIVE_FLOAT8:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # Exponent and mantissa moved into a float16, whose exponent bias is larger by eight; subnormals come out right.
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@jit
def encode_e4m3(numbers):
    """float32 within +-448 to the bits of the nearest e4m3, ties to even.

    In integers, because the conversion is missing before sm_89 and truncates in the interpreter.
    """
    bits = numbers.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Below 2**-6, the smallest normal: added to 2**14 the last bit of a float32 is worth 2**-9, as in e4m3.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    # Half of the last of three mantissa bits, less one unless that bit is odd; then the bias goes from 127 to 7.
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    encoded = tl.where(magnitude < (121 << 23), subnormal, normal)
    return (((bits >> 24) & 0x80) | encoded).to(tl.uint8)


@jit
def load_rows(
    cache_ptr,
    rows,
    held,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Loads [rows, BLOCK_DIM] as DOT_DTYPE, zero past DIM and, if MASKED, where not `held`."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = cache_ptr + rows[:, None] * DIM + dims[None, :]
    if MASKED and DIM != BLOCK_DIM:
        stored = tl.load(pointers, mask=held[:, None] & (dims < DIM)[None, :], other=0)
    elif MASKED:
        stored = tl.load(pointers, mask=held[:, None], other=0)
    elif DIM != BLOCK_DIM:
        stored = tl.load(pointers, mask=(dims < DIM)[None, :], other=0)
    else:
        stored = tl.load(pointers)
    if cache_ptr.dtype.element_ty == tl.uint8:
        return decode_e4m3(stored, NATIVE_FLOAT8).to(DOT_DTYPE)
    return stored.to(DOT_DTYPE)


@jit
def store_rows(tokens, cache_ptr, scale_ptr, rows, heads_held, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Stores [heads, BLOCK_DIM] into the cache, with a scale for each head when the cache is quantised."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = cache_ptr + rows[:, None] * DIM + dims[None, :]
    mask = heads_held[:, None] & (dims < DIM)[None, :]
    element: tl.constexpr = cache_ptr.dtype.element_ty
    if element == tl.int8 or element == tl.uint8:
        largest: tl.constexpr = 127.0 if element == tl.int8 else 448.0
        numbers = tokens.to(tl.float32)
        # A maximum passes NaN over; the sum carries it, and turns infinity into it, so that the scale shows both.
        scale = tl.div_rn(tl.max(tl.abs(numbers), 1), largest) + tl.sum(numbers * 0.0, 1)
        scaled = tl.div_rn(numbers, tl.where(scale == 0.0, 1.0, scale)[:, None])
        scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
        if element == tl.int8:
            # Added to 1.5 * 2**23 the last bit of a float32 is worth one: the sum rounds to it, ties to even.
            tl.store(pointers, ((scaled + 12582912.0) - 12582912.0).to(tl.int8), mask=mask)
        else:
            tl.store(pointers, encode_e4m3(scaled), mask=mask)
        tl.store(scale_ptr + rows, scale, mask=heads_held)
    else:
        tl.store(pointers, tokens.to(element), mask=mask)
