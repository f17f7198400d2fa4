"""What only the Triton kernels have: splits, float8 by hand, custom ops, refusals."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle
from state_cases import make_gated_delta, make_selective
from torch.utils._python_dispatch import TorchDispatchMode

from paged_backend.kernels import (
    AttentionVariant,
    LayerCache,
    MaskRule,
    Sequences,
    add_rms_norm,
    decode_attention,
    gated_delta_update,
    prefill_attention,
    rms_norm,
    rotary_store_kv,
    selective_state_update,
    silu_mul,
    store_kv,
)
from paged_backend.kernels.triton import cache as triton_cache
from paged_backend.kernels.triton import support as triton_support
from paged_backend.kernels.triton.decode_attention import num_splits
from paged_backend.kernels.triton.support import jit, tl

interpreted = pytest.mark.skipif(
    not triton_support.interpreted, reason="runs where TRITON_INTERPRET=1 is set, see test_interpreter.py"
)


@pytest.mark.skipif(triton_support.interpreted, reason="here the kernels do run on the CPU")
def test_tensors_on_the_cpu_are_refused_without_the_interpreter():
    case = make_case([5])
    with pytest.raises(
        ValueError, match=r"cannot run in Triton on cpu: it runs on CUDA and ROCm devices; .* use backend='auto'"
    ):
        decode_attention(*case.decode_arguments, backend="triton")


def test_a_small_batch_with_a_long_context_is_split_and_a_large_one_is_not():
    assert num_splits(num_programs=8, max_context_len=65536, processors=132) == 64
    assert num_splits(num_programs=512, max_context_len=4096, processors=132) == 3
    assert num_splits(num_programs=2048, max_context_len=4096, processors=132) == 1
    assert num_splits(num_programs=1, max_context_len=200, processors=132) == 1
    assert num_splits(num_programs=1, max_context_len=0, processors=132) == 1


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("splits", "rule"), [(1, {}), (2, {"window": 100}), (2, {"chunk": 100}), (9, {}), (9, {"window": 100})], ids=str
)
def test_any_number_of_splits_gives_the_same_answer(monkeypatch, splits, rule):
    module = sys.modules["paged_backend.kernels.triton.decode_attention"]
    monkeypatch.setattr(module, "num_splits", lambda *_: splits)
    case = make_case([1, 0, 63, 64, 65, 350], group=2, sinks=True, softcap=5.0, scale=0.5, **rule)
    output = decode_attention(*case.decode_arguments, backend="triton")
    assert_attention_close(output, oracle(case))


@interpreted
def test_splits_follow_from_what_the_caller_says_about_lengths(monkeypatch):
    module = sys.modules["paged_backend.kernels.triton.decode_attention"]
    longest = []
    monkeypatch.setattr(module, "num_splits", lambda programs, length, processors: longest.append(length) or 1)
    case = make_case([30, 300])
    query, cache, sequences, variant = case.decode_arguments
    for said in (None, 300):
        decode_attention(query, cache, sequences._replace(max_context_len=said), variant, backend="triton")
    window = variant._replace(mask=MaskRule("window", 40))
    decode_attention(query, cache, sequences, window, backend="triton")
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
    cache = LayerCache(*torch.zeros(2, 3, 2, 4, 64))
    slots = torch.tensor([3, 0, -1, 11, 7])
    hidden, weight = torch.randn(3, 40), torch.randn(40)
    return {
        "decode": (decode_attention, decode.decode_arguments, {}),
        "prefill": (prefill_attention, prefill.prefill_arguments, {}),
        "store": (store_kv, (tokens[1], tokens[2], cache, slots), {}),
        "rotary": (rotary_store_kv, (*tokens, *angles, cache, slots), {}),
        "rms_norm": (rms_norm, (hidden, weight), {"eps": 1e-6}),
        "add_rms_norm": (add_rms_norm, (hidden, hidden, weight), {"eps": 1e-6}),
        "silu_mul": (silu_mul, (hidden, hidden), {}),
        "gated_delta": (gated_delta_update, tuple(make_gated_delta()), {"normalises": True}),
        "selective": (selective_state_update, tuple(make_selective()), {"softplus": True}),
    }


@interpreted
@pytest.mark.parametrize("name", make_operations())
def test_torch_compile_keeps_an_operation_whole_and_gives_the_same_answer(name):
    operation, arguments, options = make_operations()[name]
    run = functools.partial(operation, **options, backend="triton")
    # What was compiled for other operations counts towards a limit.
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    copies = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected, actual = run(*copies[0]), compiled(*copies[1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    # What was written in place is the same too.
    for left, right in zip(*(list(tensors_in(copied)) for copied in copies), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def tensors_in(arguments: tuple) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, LayerCache):
            yield from argument.tensors()
        elif isinstance(argument, torch.Tensor):
            yield argument


class Launches(TorchDispatchMode):
    """The custom ops of ours that run inside of it, and what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "paged_backend":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@interpreted
@pytest.mark.parametrize("name", make_operations())
def test_fakes_and_schemas_tell_the_truth(name):
    operation, arguments, options = make_operations()[name]
    with Launches() as launches:
        operation(*arguments, **options, backend="triton")
    ((op, given, named),) = launches.calls
    torch.library.opcheck(op, given, named, test_utils=("test_schema", "test_faketensor"))


@interpreted
def test_slots_beyond_two_to_the_31_elements_are_reached():
    # Reserved, not filled: only the blocks that are used take up memory.
    block_size, dim = 16, 128
    num_blocks = 2**31 // (block_size * dim) + 2
    key_cache, value_cache = (torch.empty(num_blocks, 1, block_size, dim, dtype=torch.int8) for _ in range(2))
    cache = LayerCache(key_cache, value_cache, *(torch.empty(num_blocks, 1, block_size) for _ in range(2)))
    key, value, query = torch.randn(3, 5, 1, dim)
    slots = (num_blocks - 1) * block_size + torch.arange(5)
    store_kv(key, value, cache, slots, backend="triton")
    tables, lengths = torch.tensor([[num_blocks - 1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    attended = decode_attention(query[:1], cache, Sequences(tables, lengths), AttentionVariant(1.0), backend="triton")
    weights = (query[0] @ key[:, 0].T).softmax(-1)
    torch.testing.assert_close(attended[0], weights @ value[:, 0], atol=0.2, rtol=0)


@interpreted
def test_a_head_dim_that_no_tile_holds_is_refused():
    case = make_case([3], key_dim=520)
    with pytest.raises(ValueError, match="head dims up to 512, got 1024"):
        decode_attention(*case.decode_arguments, backend="triton")
