"""Which calls of the backend "cpu" are computed in C++, which by the reference, and how a rule is handed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle
from state_cases import make_gated_delta, make_selective

from paged_backend.kernels import (
    AttentionVariant,
    LayerCache,
    MaskRule,
    cpu,
    decode_attention,
    first_argmax,
    gated_delta_update,
    gelu_mul,
    prefill_attention,
    rms_norm,
    rotary_store_kv,
    selective_state_update,
    silu_mul,
    store_kv,
)
from paged_backend.kernels.cpu import operations, rule_arguments

needs_compiler = pytest.mark.skipif(not cpu.is_available(), reason="no compiler")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations that are asked of the library, which is the real one."""
    names: list[str] = []
    library = operations.library()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            names.append(name)
            return getattr(library, name)

    monkeypatch.setattr(operations, "library", Watched)
    return names


def rotate(dtype: torch.dtype = torch.float32, angles: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    tokens = torch.randn(3, 2, 2, 8).to(dtype)
    cos, sin = torch.randn(2, 2, 8).to(angles or dtype)
    cache = LayerCache(*torch.zeros(2, 3, 2, 4, 8).to(dtype))
    return rotary_store_kv(*tokens, cos, sin, cache, torch.tensor([5, 2]), backend="cpu", **options)


@needs_compiler
def test_what_cpp_takes_is_computed_there(called):
    case = make_case([5, 33], dtype=torch.bfloat16)
    decode_attention(*case.decode_arguments, backend="cpu")
    prompts = make_case([5, 33], [5, 9])
    prefill_attention(*prompts.prefill_arguments, backend="cpu")
    key = torch.ones(1, 2, 64)
    store_kv(key, key, prompts.cache, torch.tensor([0]), backend="cpu")
    rotate()
    rms_norm(torch.randn(2, 8), torch.ones(8), eps=1e-6, backend="cpu")
    silu_mul(torch.randn(2, 8), torch.randn(2, 8), backend="cpu")
    first_argmax(torch.randn(2, 16), backend="cpu")
    gated_delta_update(*make_gated_delta(), normalises=True, backend="cpu")
    selective_state_update(*make_selective(), softplus=True, backend="cpu")
    assert called == [
        "decode_attention", "prefill_attention", "store_kv", "rotate_", "rotate_", "store_kv", "rms_norm",
        "gated_activation", "first_argmax", "gated_delta_update", "selective_state_update",
    ]  # fmt: skip


NOT_TAKEN = {
    "quantised cache": lambda: decode_attention(
        *make_case([5], cache_dtype=torch.int8).decode_arguments, backend="cpu"
    ),
    "float64": lambda: rms_norm(torch.randn(2, 8).double(), torch.ones(8).double(), eps=1e-6, backend="cpu"),
    "a weight of another dtype": lambda: rms_norm(torch.randn(2, 8).half(), torch.ones(8), eps=1e-6, backend="cpu"),
    "the exact gelu": lambda: gelu_mul(torch.randn(2, 8), torch.randn(2, 8), backend="cpu"),
    "a row shorter than a vector": lambda: first_argmax(torch.randn(2, 15), backend="cpu"),
    "interleaved rotation": lambda: rotate(interleaved=True),
    "angles of another dtype": lambda: rotate(torch.bfloat16, torch.float32),
    "states of another dtype": lambda: gated_delta_update(
        *make_gated_delta()._replace(state=make_gated_delta().state.double()), normalises=True, backend="cpu"
    ),
    "states that are not whole": lambda: selective_state_update(
        *make_selective(lies="transposed"), softplus=True, backend="cpu"
    ),
}


@needs_compiler
@pytest.mark.parametrize("call", NOT_TAKEN.values(), ids=NOT_TAKEN.keys())
def test_what_cpp_does_not_take_is_left_to_the_reference(called, call):
    call()
    assert not called


@needs_compiler
def test_an_offset_weight_may_have_another_dtype(called):
    hidden, weight = torch.randn(2, 8).half(), torch.randn(8)
    norms = [rms_norm(hidden, weight, eps=1e-6, unit_offset=True, backend=name) for name in ("cpu", "reference")]
    assert called == ["rms_norm"]
    torch.testing.assert_close(*norms, atol=4e-3, rtol=4e-3)


@needs_compiler
def test_rotation_leaves_the_caller_its_queries_and_keys():
    tokens = torch.randn(3, 2, 2, 8)
    before = tokens.clone()
    cos, sin = torch.randn(2, 2, 8)
    cache = LayerCache(*torch.zeros(2, 3, 2, 4, 8))
    rotated = rotary_store_kv(*tokens, cos, sin, cache, torch.tensor([5, 2]), backend="cpu")
    assert torch.equal(tokens, before)
    assert not torch.equal(rotated, before[0])


@needs_compiler
def test_heads_whose_elements_lie_apart_are_read_right():
    case = make_case([5, 33], group=2)
    query, *others = case.decode_arguments
    apart = torch.stack((query, torch.full_like(query, torch.nan)), -1)[..., 0]
    assert apart.stride(2) == 2
    assert_attention_close(decode_attention(apart, *others, backend="cpu"), oracle(case))


def test_a_rule_is_a_window_or_a_chunk_and_zero_stands_for_none():
    assert rule_arguments(AttentionVariant(0.5)) == (0.5, 0, 0, 0.0, None)
    assert rule_arguments(AttentionVariant(0.5, MaskRule("window", 3), 2.0)) == (0.5, 3, 0, 2.0, None)
    assert rule_arguments(AttentionVariant(0.5, MaskRule("chunk", 3)))[1:3] == (0, 3)


def test_sinks_are_handed_over_as_whole_floats():
    sinks = torch.arange(6).half()[::2]
    (*_, given) = rule_arguments(AttentionVariant(1.0, sinks=sinks))
    assert given.dtype == torch.float32
    assert given.is_contiguous()
    assert given.tolist() == [0, 2, 4]


def test_the_backend_is_for_the_cpu_alone():
    assert "computes on the CPU" in cpu.BACKEND.unavailable(torch.device("cuda"))
    assert cpu.BACKEND.devices == ("cpu",)


def test_without_a_library_the_backend_says_what_to_install(monkeypatch):
    monkeypatch.setattr(operations, "is_available", lambda: False)
    assert "install a C++ compiler" in cpu.BACKEND.unavailable(torch.device("cpu"))
