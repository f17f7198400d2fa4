"""Rows of a cache in Triton kernels: where they lie, what is read past their ends, and float8 taken apart by hand."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels.triton import support as triton_support
from paged_backend.kernels.triton.cache import as_stored, cache_rows, decode_e4m3, encode_e4m3, load_rows, store_rows
from paged_backend.kernels.triton.support import jit, tl

interpreted = pytest.mark.skipif(
    not triton_support.interpreted, reason="runs where TRITON_INTERPRET=1 is set, see test_interpreter.py"
)


def test_float8_is_given_to_kernels_as_its_bits_and_all_else_as_it_is():
    cache = torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn)
    stored = as_stored(cache)
    assert stored.dtype == torch.uint8
    assert stored.data_ptr() == cache.data_ptr()
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        other = torch.zeros(3, dtype=dtype)
        assert as_stored(other) is other


@jit
def _encode_kernel(numbers_ptr, bits_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bits_ptr + offsets, encode_e4m3(tl.load(numbers_ptr + offsets)))


@jit
def _decode_kernel(bits_ptr, numbers_ptr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(numbers_ptr + offsets, decode_e4m3(tl.load(bits_ptr + offsets), NATIVE))


@interpreted
@pytest.mark.parametrize("native", [False, True])
def test_every_float8_is_decoded(native):
    bits = torch.arange(256).to(torch.uint8)
    numbers = torch.full((256,), torch.nan)
    _decode_kernel[(1,)](bits, numbers, NATIVE=native, BLOCK=256)
    expected = bits.view(torch.float8_e4m3fn).float()
    finite = expected.isfinite()
    assert finite.sum() == 254
    assert numbers[finite].equal(expected[finite])


@interpreted
def test_float8_rounds_to_nearest_and_ties_to_even_everywhere():
    exact = torch.arange(0x7F).to(torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (exact[1:] + exact[:-1]) / 2
    numbers = torch.cat((exact, ties, ties * (1 - 2**-20), ties * (1 + 2**-20), torch.rand(1000) * 448))
    numbers = torch.cat((numbers, -numbers))
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 256))
    bits = torch.zeros(len(numbers), dtype=torch.uint8)
    _encode_kernel[(len(numbers) // 256,)](numbers, bits, BLOCK=256)
    assert bits.equal(numbers.to(torch.float8_e4m3fn).view(torch.uint8))


@jit
def _rows_kernel(blocks_ptr, rows_ptr, head, num_kv_heads, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    tokens = tl.arange(0, BLOCK)
    rows = cache_rows(tl.load(blocks_ptr + tokens), tokens % BLOCK_SIZE, head, num_kv_heads, BLOCK_SIZE)
    tl.store(rows_ptr + tokens, rows)


@interpreted
def test_a_row_is_that_of_its_block_head_and_offset_however_far():
    blocks = torch.tensor([3, 0, 2**30, 1], dtype=torch.int32)
    rows = torch.zeros(4, dtype=torch.int64)
    _rows_kernel[(1,)](blocks, rows, 1, 2, BLOCK_SIZE=4, BLOCK=4)
    assert rows.tolist() == [(block * 2 + 1) * 4 + offset for offset, block in enumerate(blocks.tolist())]


@jit
def _load_kernel(
    cache_ptr,
    held_ptr,
    loaded_ptr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    held = tl.load(held_ptr + rows) != 0
    loaded = load_rows(cache_ptr, rows, held, DIM, BLOCK_DIM, MASKED, False, tl.float32)
    tl.store(loaded_ptr + rows[:, None] * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :], loaded)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [6, 8])
def test_rows_are_zero_past_their_dim_and_where_they_are_not_held(dim, masked, dtype):
    cache = torch.arange(1, 4 * dim + 1).view(4, dim).to(dtype)
    held = torch.tensor([1, 0, 1, 0])
    loaded = torch.full((4, 8), torch.nan)
    _load_kernel[(1,)](as_stored(cache), held, loaded, DIM=dim, BLOCK_DIM=8, MASKED=masked, ROWS=4)
    expected = cache.float() * held[:, None] if masked else cache.float()
    assert loaded.equal(torch.nn.functional.pad(expected, (0, 8 - dim)))


@jit
def _store_kernel(tokens_ptr, cache_ptr, scale_ptr, num_heads, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    heads = tl.arange(0, 2)
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    held = heads < num_heads
    tokens = tl.load(tokens_ptr + heads[:, None] * DIM + dims, mask=held[:, None] & (dims < DIM), other=0.0)
    store_rows(tokens, cache_ptr, scale_ptr, heads, held, DIM, BLOCK_DIM)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_only_heads_that_are_held_are_stored_and_scaled(dtype):
    tokens = torch.tensor([[3.0, -127.0, 64.0], [9.0, 9.0, 9.0]])
    cache, scale = torch.full((2, 3), 5.0).to(dtype), torch.full((2,), -1.0)
    _store_kernel[(1,)](tokens, as_stored(cache), scale, 1, DIM=3, BLOCK_DIM=4)
    largest = {torch.float32: None, torch.int8: 127.0, torch.float8_e4m3fn: 448.0}[dtype]
    assert cache[1].float().eq(5.0).all()
    assert scale[1] == -1.0
    assert scale[0] == (-1.0 if largest is None else 127.0 / largest)
    read = cache[0].float() * (1.0 if largest is None else scale[0])
    torch.testing.assert_close(read, tokens[0], atol=0, rtol=0.0 if dtype != torch.float8_e4m3fn else 2**-4)
