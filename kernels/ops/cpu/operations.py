"""The backend "cpu" of the operations on a paged cache: C++ where it serves, the reference elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from paged_backend.kernels.cpu.library import is_available, library
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
        reference = implementation("store_kv", "reference", key)
        reference(key, value, key_cache, value_cache, slot_mapping, *scales)


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
        result = implementation(operation, "reference", query)(query, key_cache, value_cache, *tables, *more)
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
