"""What only the Triton kernels have: splits, float8 by hand, custom ops, refusals."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle

from paged_backend.kernels import (
    add_rms_norm,
    decode_attention,
    prefill_attention,
    rms_norm,
    rotary_store_kv,
    silu_mul,
    store_kv,
    triton_cache,
    triton_support,
)
from paged_backend.kernels.decode_attention import num_splits
from paged_backend.kernels.triton_support import jit, tl

interpreted = pytest.mark.skipif(
    not triton_support.interpreted, reason="runs where TRITON_INTERPRET=1 is set, see test_interpreter.py"
)


@pytest.mark.skipif(triton_support.interpreted, reason="here the kernels do run on the CPU")
def test_tensors_on_the_cpu_are_refused_without_the_interpreter():
    case = make_case([5])
    with pytest.raises(ValueError, match="runs on CUDA and ROCm devices, got tensors on cpu; use backend='auto'"):
        decode_attention(*case.decode_arguments, **case.options, backend="triton")


def test_a_small_batch_with_a_long_context_is_split_and_a_large_one_is_not():
    assert num_splits(num_programs=8, max_context_len=65536, processors=132) == 64
    assert num_splits(num_programs=512, max_context_len=4096, processors=132) == 3
    assert num_splits(num_programs=2048, max_context_len=4096, processors=132) == 1
    assert num_splits(num_programs=1, max_context_len=200, processors=132) == 1
    assert num_splits(num_programs=1, max_context_len=0, processors=132) == 1


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("splits", [1, 2, 9])
@pytest.mark.parametrize("rule", [{}, {"window": 100}, {"chunk": 100}], ids=str)
def test_any_number_of_splits_gives_the_same_answer(monkeypatch, splits, rule):
    module = sys.modules["paged_backend.kernels.decode_attention"]
    monkeypatch.setattr(module, "num_splits", lambda *_: splits)
    case = make_case([1, 0, 63, 64, 65, 350], group=2, sinks=True, softcap=5.0, scale=0.5, **rule)
    output = decode_attention(*case.decode_arguments, **case.options, backend="triton")
    assert_attention_close(output, oracle(case))


@interpreted
def test_splits_follow_from_what_the_caller_says_about_lengths(monkeypatch):
    module = sys.modules["paged_backend.kernels.decode_attention"]
    longest = []
    monkeypatch.setattr(module, "num_splits", lambda programs, length, processors: longest.append(length) or 1)
    case = make_case([30, 300])
    for said in (None, 300):
        decode_attention(*case.decode_arguments, **case.options, max_context_len=said, backend="triton")
    decode_attention(*case.decode_arguments, **case.options, window=40, backend="triton")
    assert longest == [case.block_tables.shape[1] * 16, 300, 40]


@jit
def _encode_kernel(numbers_ptr, bits_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bits_ptr + offsets, triton_cache.encode_e4m3(tl.load(numbers_ptr + offsets)))


@jit
def _decode_kernel(bits_ptr, numbers_ptr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(numbers_ptr + offsets, triton_cache.decode_e4m3(tl.load(bits_ptr + offsets), NATIVE))


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


def make_operations() -> dict[str, tuple]:
    """Every operation of the backend, with arguments it takes."""
    decode = make_case([37, 9], group=2, softcap=4.0, sinks=True, window=20)
    prefill = make_case([20, 9], [7, 9], group=2)
    tokens = torch.randn(3, 5, 2, 64)
    angles = torch.randn(2, 5, 64)
    caches = torch.zeros(2, 3, 2, 4, 64)
    slots = torch.tensor([3, 0, -1, 11, 7])
    hidden, weight = torch.randn(3, 40), torch.randn(40)
    return {
        "decode": (decode_attention, decode.decode_arguments, decode.options),
        "prefill": (prefill_attention, prefill.prefill_arguments, prefill.options),
        "store": (store_kv, (tokens[1], tokens[2], *caches, slots), {}),
        "rotary": (rotary_store_kv, (*tokens, *angles, *caches, slots), {}),
        "rms_norm": (rms_norm, (hidden, weight), {"eps": 1e-6}),
        "add_rms_norm": (add_rms_norm, (hidden, hidden, weight), {"eps": 1e-6}),
        "silu_mul": (silu_mul, (hidden, hidden), {}),
    }


@interpreted
@pytest.mark.parametrize("name", make_operations())
def test_torch_compile_keeps_an_operation_whole_and_gives_the_same_answer(name):
    operation, arguments, options = make_operations()[name]
    run = functools.partial(operation, **options, backend="triton")
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    copies = [[argument.clone() for argument in arguments] for _ in range(2)]
    expected, actual = run(*copies[0]), compiled(*copies[1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    # What was written in place is the same too.
    torch.testing.assert_close(copies[1], copies[0], rtol=0, atol=0, equal_nan=True)


@interpreted
@pytest.mark.parametrize("name", make_operations())
def test_fakes_and_schemas_tell_the_truth(monkeypatch, name):
    operation, arguments, options = make_operations()[name]
    calls = []
    dispatch = sys.modules["paged_backend.kernels.dispatch"]
    known = {"silu_mul": "gated_activation"}.get(operation.__name__, operation.__name__)
    op = dispatch._implementations[known]["triton"]
    monkeypatch.setitem(dispatch._implementations[known], "triton", lambda *given: calls.append(given) or op(*given))
    operation(*arguments, **options, backend="triton")
    torch.library.opcheck(op, calls[0], test_utils=("test_schema", "test_faketensor"))


@interpreted
def test_slots_beyond_two_to_the_31_elements_are_reached():
    # Reserved, not filled: only the blocks that are used take up memory.
    block_size, dim = 16, 128
    num_blocks = 2**31 // (block_size * dim) + 2
    key_cache, value_cache = (torch.empty(num_blocks, 1, block_size, dim, dtype=torch.int8) for _ in range(2))
    scales = {name: torch.empty(num_blocks, 1, block_size) for name in ("key_scale", "value_scale")}
    key, value, query = torch.randn(3, 5, 1, dim)
    slots = (num_blocks - 1) * block_size + torch.arange(5)
    store_kv(key, value, key_cache, value_cache, slots, **scales, backend="triton")
    tables, lengths = torch.tensor([[num_blocks - 1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    attended = decode_attention(
        query[:1], key_cache, value_cache, tables, lengths, scale=1.0, **scales, backend="triton"
    )
    weights = (query[0] @ key[:, 0].T).softmax(-1)
    torch.testing.assert_close(attended[0], weights @ value[:, 0], atol=0.2, rtol=0)


@interpreted
def test_a_head_dim_that_no_tile_holds_is_refused():
    case = make_case([3], key_dim=520)
    with pytest.raises(ValueError, match="head dims up to 512, got 1024"):
        decode_attention(*case.decode_arguments, **case.options, backend="triton")
