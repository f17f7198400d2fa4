"""Every kernel that the dispatch can choose compiles for GPUs that need not be present, and fits them."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paged_backend.kernels import (
    FULL,
    AttentionVariant,
    LayerCache,
    MaskRule,
    Sequences,
    add_rms_norm,
    decode_attention,
    gated_delta_update,
    gelu_mul,
    prefill_attention,
    rms_norm,
    rotary_store_kv,
    selective_state_update,
    silu_mul,
    store_kv,
)
from paged_backend.kernels.triton import support as triton_support

if not triton_support.available or triton_support.interpreted:
    pytest.skip("needs Triton's compiler, which TRITON_INTERPRET=1 replaces", allow_module_level=True)

from ahead_of_time import SHARED_MEMORY, compile_launches

pytestmark = pytest.mark.aot

TUNED, DEFAULT = ("sm_80", "sm_90", "gfx942"), ("sm_89", "sm_100", "gfx90a")
NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS = 8, 16, 2
SCALES = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE)
# ptxas stops short of the registers it may use, parking a few words, where that lets one block more run.
PARKED_BYTES = 32
RULES = {"full": FULL, "window": MaskRule("window", 100), "chunk": MaskRule("chunk", 64)}


@pytest.fixture(autouse=True)
def no_old_binaries(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def attention(
    phase: str,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    cache_dtype: torch.dtype | None = None,
    rule: str = "full",
    extras: bool = False,
    group: int = 4,
    block_size: int = BLOCK_SIZE,
) -> Callable[[], object]:
    """A call of prefill_attention or decode_attention that launches the kernel of these features."""
    cache_dtype = cache_dtype or dtype
    cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, block_size, head_dim).to(cache_dtype)
    scales = [torch.zeros(cache.shape[:3])] * 2 if cache_dtype.itemsize == 1 else []
    sinks = torch.zeros(NUM_KV_HEADS * group, dtype=dtype)
    tables, lengths = torch.zeros(4, 256, dtype=torch.int32), torch.full((4,), 100, dtype=torch.int32)
    return functools.partial(
        decode_attention if phase == "decode" else prefill_attention,
        torch.zeros(4, NUM_KV_HEADS * group, head_dim, dtype=dtype),
        LayerCache(cache, cache, *scales),
        Sequences(tables, lengths, cu_seqlens_q=torch.arange(5, dtype=torch.int32)),
        AttentionVariant(0.1, RULES[rule], 30.0 if extras else None, sinks if extras else None),
        backend="triton",
    )


def small_operations(dtype: torch.dtype, cache_dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Calls of everything but attention."""
    tokens = torch.zeros(3, 4, NUM_KV_HEADS, 96, dtype=dtype)
    caches = [torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 96).to(cache_dtype) for _ in range(2)]
    cache = LayerCache(*caches, *((SCALES, SCALES) if cache_dtype.itemsize == 1 else ()))
    slots = torch.arange(4)
    yield functools.partial(store_kv, tokens[0], tokens[1], cache, slots, backend="triton")
    for interleaved in (False, True):
        yield functools.partial(
            rotary_store_kv,
            *tokens,
            *torch.zeros(2, 4, 64, dtype=dtype),
            cache,
            slots,
            interleaved=interleaved,
            backend="triton",
        )
    for dim in (576, 16384):
        hidden, weight = torch.zeros(4, dim, dtype=dtype), torch.ones(dim, dtype=dtype)
        yield functools.partial(rms_norm, hidden, weight, eps=1e-6, unit_offset=True, backend="triton")
        yield functools.partial(add_rms_norm, hidden, hidden, weight, eps=1e-6, backend="triton")
    yield functools.partial(silu_mul, hidden, hidden, backend="triton")
    for approximate in ("none", "tanh"):
        yield functools.partial(gelu_mul, hidden, hidden, approximate=approximate, backend="triton")


def state_operations(dtype: torch.dtype, largest: bool) -> Iterator[Callable[[], object]]:
    """Calls of what updates recurrent states, of the sizes that models have or of the largest that are foreseen."""
    dim, state_dim = (256, 256) if largest else (128, 128)
    slots = torch.arange(4)
    query, key, value = torch.zeros(3, 4, 2, dim, dtype=dtype)
    numbers = torch.zeros(4, 2)
    delta = (query, key, value, numbers, numbers.to(dtype), torch.zeros(8, 2, dim, dim), slots, slots + 4)
    yield functools.partial(gated_delta_update, *delta, normalises=True, backend="triton")
    x, heads = torch.zeros(4, 2, 64, dtype=dtype), torch.zeros(2, dtype=dtype)
    B = torch.zeros(4, 1, state_dim, dtype=dtype)
    steps = (x, numbers.to(dtype), heads.float(), B, B, heads, x, heads)
    state = torch.zeros(8, 2, 64, state_dim)
    yield functools.partial(selective_state_update, state, *steps, slots, slots + 4, softplus=True, backend="triton")


def check(architecture: str, call: Callable[[], object]) -> None:
    compiled = compile_launches(architecture, call)
    assert compiled
    for kernel in compiled:
        assert kernel.spilled == 0, kernel
        assert kernel.shared_memory <= SHARED_MEMORY[architecture], kernel


@pytest.mark.parametrize("architecture", TUNED)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"head_dim": 64, "rule": "window", "extras": True, "cache_dtype": torch.int8, "group": 7},
    ],
    ids=["plain", "everything"],
)
def test_attention_compiles_without_spills_and_fits(architecture, phase, features):
    check(architecture, attention(phase, **features))


@pytest.mark.parametrize("architecture", TUNED)
def test_everything_else_compiles_without_spills_and_fits(architecture):
    for call in small_operations(torch.bfloat16, torch.bfloat16):
        check(architecture, call)


@pytest.mark.parametrize(
    ("architecture", "largest"), list(zip(TUNED, itertools.cycle([False, True]), strict=False)), ids=str
)
def test_updates_of_states_compile_without_spills_and_fit(architecture, largest):
    for call in state_operations(torch.bfloat16, largest):
        check(architecture, call)


@pytest.mark.parametrize(
    ("architecture", "cache_dtype"),
    list(zip(TUNED, itertools.cycle([torch.float8_e4m3fn, torch.int8]), strict=False)),
    ids=str,
)
def test_quantised_stores_compile_without_spills_and_fit(architecture, cache_dtype):
    store, rotary, *_ = small_operations(torch.bfloat16, cache_dtype)
    check(architecture, store)
    check(architecture, rotary)


def all_features() -> list[dict[str, Any]]:
    """Every combination of what picks a kernel or its tiles."""
    choices = {
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
        "head_dim": (64, 80, 96, 128, 192, 256, 512),
        "cache_dtype": (None, torch.int8, torch.float8_e4m3fn),
        "rule": tuple(RULES),
        "extras": (False, True),
        "group": (1, 4, 7, 71),
        "block_size": (1, 16, 64),
    }
    return [dict(zip(choices, combination, strict=True)) for combination in itertools.product(*choices.values())]


@pytest.mark.parametrize("architecture", DEFAULT)
def test_a_small_kernel_compiles_for_what_has_no_tiles_of_its_own(architecture):
    check(architecture, attention("decode", head_dim=64))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("architecture", TUNED)
def test_a_sample_of_all_variants_compiles_and_fits(architecture, phase):
    # The same sample every time, a different one for each pair.
    for features in random.Random(architecture + phase).sample(all_features(), 1):
        for kernel in compile_launches(architecture, attention(phase, **features)):
            assert kernel.shared_memory <= SHARED_MEMORY[architecture], kernel
            assert kernel.spilled <= (PARKED_BYTES if architecture.startswith("sm_") else 0), (features, kernel)
