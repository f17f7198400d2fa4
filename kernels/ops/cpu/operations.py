"""The backend "cpu" of the operations: C++ where it serves, the reference elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from paged_backend.kernels.attention_variant import AttentionVariant
from paged_backend.kernels.cpu.loader import is_available, library
from paged_backend.kernels.dispatch import REFERENCE, Backend
from paged_backend.kernels.gated_delta_update import EPSILON
from paged_backend.kernels.kv_layout import LayerCache
from paged_backend.kernels.recurrent_state import has_plain_slots
from paged_backend.kernels.sequences import Sequences

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _store_kv(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
    if _serves(key, cache):
        library().store_kv(_whole_heads(key), _whole_heads(value), cache.key, cache.value, slot_mapping)
    else:
        _run_reference("store_kv", key, value, cache, slot_mapping)


def _decode_attention(
    query: torch.Tensor, cache: LayerCache, sequences: Sequences, variant: AttentionVariant
) -> torch.Tensor:
    if not _serves(query, cache):
        return _run_reference("decode_attention", query, cache, sequences, variant)
    result: torch.Tensor = library().decode_attention(
        _whole_heads(query),
        cache.key,
        cache.value,
        sequences.block_tables,
        sequences.context_lens,
        *rule_arguments(variant),
    )
    return result


def _prefill_attention(
    query: torch.Tensor, cache: LayerCache, sequences: Sequences, variant: AttentionVariant
) -> torch.Tensor:
    if not _serves(query, cache):
        return _run_reference("prefill_attention", query, cache, sequences, variant)
    result: torch.Tensor = library().prefill_attention(
        _whole_heads(query),
        cache.key,
        cache.value,
        sequences.block_tables,
        sequences.cu_seqlens_q,
        sequences.context_lens,
        *rule_arguments(variant),
    )
    return result


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    if hidden.dtype not in FLOATS or (weight.dtype != hidden.dtype and not unit_offset):
        return _run_reference("rms_norm", hidden, weight, eps, unit_offset)
    factor = weight.float() + 1 if unit_offset else weight.float()
    result: torch.Tensor = library().rms_norm(hidden, factor.contiguous(), eps)
    return result


def _add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = hidden + residual
    return _rms_norm(total, weight, eps, unit_offset), total


def _gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if gate.dtype not in FLOATS or activation not in ("silu", "gelu_tanh"):
        return _run_reference("gated_activation", gate, up, activation)
    result: torch.Tensor = library().gated_activation(gate, up, activation == "gelu_tanh")
    return result


def _first_argmax(scores: torch.Tensor) -> torch.Tensor:
    # A whole vector of any processor.
    if scores.dtype not in FLOATS or scores.shape[1] < 16:
        return _run_reference("first_argmax", scores)
    result: torch.Tensor = library().first_argmax(scores.contiguous())
    return result


def _rotary_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    dtypes = {tensor.dtype for tensor in (query, key, cos, sin)}
    if interleaved or len(dtypes) > 1 or not _serves(key, cache):
        return _run_reference("rotary_store_kv", query, key, value, cos, sin, cache, slot_mapping, interleaved)
    query, key = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (query, key))
    for heads in (query, key):
        library().rotate_(heads, cos.contiguous(), sin.contiguous())
    library().store_kv(key, _whole_heads(value), cache.key, cache.value, slot_mapping)
    return query


def _gated_delta_update(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots_in: torch.Tensor,
    slots_out: torch.Tensor,
    normalises: bool,
) -> torch.Tensor:
    if not has_plain_slots(state) or not {query.dtype, key.dtype, value.dtype} <= set(FLOATS):
        return _run_reference("gated_delta_update", query, key, value, g, beta, state, slots_in, slots_out, normalises)
    result: torch.Tensor = library().gated_delta_update(
        *map(_whole_heads, (query, key, value)),
        *map(_floats, (g, beta)),
        state,
        slots_in.contiguous(),
        slots_out.contiguous(),
        EPSILON,
        normalises,
    )
    return result


def _selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor,
    slots_in: torch.Tensor,
    slots_out: torch.Tensor,
    softplus: bool,
) -> torch.Tensor:
    dtypes = {tensor.dtype for tensor in (x, B, C, z) if tensor is not None}
    if not has_plain_slots(state) or not dtypes <= set(FLOATS):
        return _run_reference(
            "selective_state_update", state, x, dt, A, B, C, D, z, dt_bias, slots_in, slots_out, softplus
        )
    result: torch.Tensor = library().selective_state_update(
        state,
        _whole_heads(x),
        *map(_floats, (dt, A)),
        *map(_whole_heads, (B, C)),
        _floats(D),
        None if z is None else _whole_heads(z),
        _floats(dt_bias),
        slots_in.contiguous(),
        slots_out.contiguous(),
        softplus,
    )
    return result


def _run_reference(operation: str, *arguments: Any) -> Any:
    return REFERENCE.functions[operation](*arguments)


def rule_arguments(variant: AttentionVariant) -> tuple[float, int, int, float, torch.Tensor | None]:
    """How a layer attends as the C++ operations take it: scale, window, chunk, softcap (0: none), and sinks."""
    scale, mask, softcap, sinks = variant.scale, variant.mask, variant.softcap, variant.sinks
    window = mask.size if mask.kind == "window" else 0
    chunk = mask.size if mask.kind == "chunk" else 0
    return scale, window, chunk, softcap or 0.0, None if sinks is None else sinks.float().contiguous()


def _serves(tokens: torch.Tensor, cache: LayerCache) -> bool:
    """Whether C++ takes these tensors; quantised caches, caches of two dtypes and float64 are left to the reference."""
    dtype = cache.key.dtype
    return tokens.dtype in FLOATS and dtype in FLOATS and cache.value.dtype == dtype


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().contiguous()


def _whole_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 or tensor.shape[2] == 1 else tensor.contiguous()


def _unavailable(device: torch.device) -> str | None:
    if device.type != "cpu":
        return "it computes on the CPU"
    return None if is_available() else "it is compiled on first use, which failed; install a C++ compiler"


BACKEND = Backend(
    "cpu",
    {
        "add_rms_norm": _add_rms_norm,
        "decode_attention": _decode_attention,
        "first_argmax": _first_argmax,
        "gated_activation": _gated_activation,
        "gated_delta_update": _gated_delta_update,
        "prefill_attention": _prefill_attention,
        "rms_norm": _rms_norm,
        "rotary_store_kv": _rotary_store_kv,
        "selective_state_update": _selective_state_update,
        "store_kv": _store_kv,
    },
    devices=("cpu",),
    unavailable=_unavailable,
)
