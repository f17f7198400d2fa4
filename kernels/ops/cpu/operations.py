"""The backend "cpu" of the operations on a paged cache: C++ where it serves, the reference elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from paged_backend.kernels.cpu.loader import is_available, library
from paged_backend.kernels.dispatch import available_if, implementation, implements

available_if("cpu", is_available)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@implements("store_kv", "cpu")
def _store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *scales: torch.Tensor | None,
) -> None:
    if _serves(key, key_cache, value_cache):
        library().store_kv(_whole_heads(key), _whole_heads(value), key_cache, value_cache, slot_mapping)
    else:
        _run("store_kv", "reference", key, value, key_cache, value_cache, slot_mapping, *scales)


@implements("decode_attention", "cpu")
def _decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *more: Any,
) -> torch.Tensor:
    return _attend("decode_attention", query, key_cache, value_cache, (block_tables, context_lens), more)


@implements("prefill_attention", "cpu")
def _prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    *more: Any,
) -> torch.Tensor:
    tables = (block_tables, cu_seqlens_q, context_lens)
    return _attend("prefill_attention", query, key_cache, value_cache, tables, more)


@implements("rms_norm", "cpu")
def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    if hidden.dtype not in FLOATS or (weight.dtype != hidden.dtype and not unit_offset):
        return _run("rms_norm", "reference", hidden, weight, eps, unit_offset)
    factor = weight.float() + 1 if unit_offset else weight.float()
    result: torch.Tensor = library().rms_norm(hidden, factor.contiguous(), eps)
    return result


@implements("add_rms_norm", "cpu")
def _add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = hidden + residual
    return _rms_norm(total, weight, eps, unit_offset), total


@implements("gated_activation", "cpu")
def _gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if gate.dtype not in FLOATS or activation not in ("silu", "gelu_tanh"):
        return _run("gated_activation", "reference", gate, up, activation)
    result: torch.Tensor = library().gated_activation(gate, up, activation == "gelu_tanh")
    return result


@implements("first_argmax", "cpu")
def _first_argmax(scores: torch.Tensor) -> torch.Tensor:
    # A whole vector of any processor.
    if scores.dtype not in FLOATS or scores.shape[1] < 16:
        return _run("first_argmax", "reference", scores)
    result: torch.Tensor = library().first_argmax(scores.contiguous())
    return result


@implements("rotary_store_kv", "cpu")
def _rotary_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
    *scales: torch.Tensor | None,
) -> torch.Tensor:
    dtypes = {tensor.dtype for tensor in (query, key, cos, sin)}
    if interleaved or len(dtypes) > 1 or not _serves(key, key_cache, value_cache):
        tokens = (query, key, value, cos, sin)
        return _run("rotary_store_kv", "reference", *tokens, key_cache, value_cache, slot_mapping, interleaved, *scales)
    query, key = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (query, key))
    for heads in (query, key):
        library().rotate_(heads, cos.contiguous(), sin.contiguous())
    library().store_kv(key, _whole_heads(value), key_cache, value_cache, slot_mapping)
    return query


def _run(operation: str, backend: str, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = implementation(operation, backend, tensor)(tensor, *arguments)
    return result


def _attend(
    operation: str,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    more: tuple[Any, ...],
) -> torch.Tensor:
    """Run an operation; `more` begins with what `rule_arguments` takes."""
    if _serves(query, key_cache, value_cache):
        run = getattr(library(), operation)
        result: torch.Tensor = run(_whole_heads(query), key_cache, value_cache, *tables, *rule_arguments(*more[:5]))
    else:
        result = _run(operation, "reference", query, key_cache, value_cache, *tables, *more)
    return result


def rule_arguments(
    scale: float, window: int | None, chunk: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> tuple[float, int, int, float, torch.Tensor | None]:
    """The rule of an attention layer as the C++ operations take it."""
    return scale, window or 0, chunk or 0, softcap or 0.0, None if sinks is None else sinks.float().contiguous()


def _serves(tokens: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether C++ takes these tensors; quantised caches, caches of two dtypes and float64 are left to the reference."""
    return tokens.dtype in FLOATS and key_cache.dtype in FLOATS and value_cache.dtype == key_cache.dtype


def _whole_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 or tensor.shape[2] == 1 else tensor.contiguous()
