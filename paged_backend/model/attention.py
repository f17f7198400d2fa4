"""The attention function that transformers calls on the twin: store keys and values, then attend through blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from paged_backend.errors import ConfigError, PluginError, UnknownPolicy
from paged_backend.kernels import cpu, decode_attention, implementations, prefill_attention, store_kv, triton_support
from paged_backend.kernels.dispatch import implementation, implements
from paged_backend.memory.kv_cache import LayerCache
from paged_backend.memory.mask_rule import MaskRule
from paged_backend.model.batch import Batch

ATTENTION_NAME = "paged_backend"
OPERATIONS = ("store_kv", "prefill_attention", "decode_attention")
OWN_BACKENDS = ("auto", *implementations("decode_attention"))


class ForwardContext:
    """What the attention layers of a running forward pass share; the model runner sets the batch."""

    def __init__(self, backend: str = "auto") -> None:
        self.batch: Batch | None = None
        self.backend = backend


class PagedLayer:
    """One attention layer's blocks and mask rule, hung on the twin's attention module."""

    def __init__(self, context: ForwardContext, cache: LayerCache, group: int, rule: MaskRule) -> None:
        self.context = context
        self.cache = cache
        self.group = group
        self.rule = rule

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store the step's keys and values, then decode rows and prefill rows each through their own kernel.

        query ``[num_tokens, num_heads, key_dim]``, key and value ``[num_tokens, num_kv_heads, dim]``; returns
        ``[num_tokens, num_heads, value_dim]``.
        """
        batch, backend = self.context.batch, self.context.backend
        if batch is None:
            raise RuntimeError("paged attention was called outside a step of the engine")
        cache, tables = self.cache, batch.groups[self.group]
        scales = {"key_scale": cache.key_scale, "value_scale": cache.value_scale}
        store_kv(key, value, cache.key, cache.value, tables.slot_mapping, backend=backend, **scales)
        rule: dict[str, Any] = {
            "scale": scale,
            "window": self.rule.window,
            "chunk": self.rule.chunk,
            "softcap": softcap,
            "sinks": sinks,
            "backend": backend,
            **scales,
        }
        n = batch.num_decodes
        parts = []
        if n:
            parts.append(
                decode_attention(
                    query[:n],
                    cache.key,
                    cache.value,
                    tables.block_tables[:n],
                    batch.context_lens[:n],
                    max_context_len=batch.max_decode_context,
                    **rule,
                )
            )
        if batch.num_prefills:
            parts.append(
                prefill_attention(
                    query[n:],
                    cache.key,
                    cache.value,
                    tables.block_tables[n:],
                    batch.cu_seqlens_q,
                    batch.context_lens[n:],
                    max_seqlen_q=batch.max_seqlen_q,
                    max_context_len=batch.max_prefill_context,
                    **rule,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention contract: query ``[1, num_heads, num_tokens, key_dim]`` in, ``[1, T, H, Dv]`` out.

    Raises RuntimeError on a module that the engine did not prepare, since attention without a cache would be
    silently wrong.
    """
    layer = module.__dict__.get("paged_layer")
    if layer is None:
        raise RuntimeError(
            f"{type(module).__name__} runs attn_implementation={ATTENTION_NAME!r} outside a paged_backend engine; "
            "load the model with its own attention and pass it to paged_backend.Engine or generate(cache_impl='paged')"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    return layer.attend(*packed, scale, softcap, s_aux).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


def check_backend(name: str) -> None:
    """Raise UnknownPolicy unless there are kernels of this name."""
    known = ("auto", *implementations("decode_attention"))
    if name not in known:
        raise UnknownPolicy(f"unknown attention_backend {name!r}; choose one of {', '.join(known)}")


def check_backend_runs(name: str, devices: Iterable[torch.device]) -> None:
    """Raise ConfigError if the kernels of this name cannot run on one of ``devices``."""
    for device in devices:
        if name == "triton" and device.type != "cuda" and not triton_support.interpreted:
            raise ConfigError(
                f"attention_backend='triton' needs a GPU, and the model is on {device}; give 'auto', or set "
                "TRITON_INTERPRET=1 before Python starts, which runs its kernels on the CPU, slowly, for tests"
            )
        if name == "cpu" and not cpu.is_available():
            raise ConfigError(
                "attention_backend='cpu' is compiled on first use, which failed; install a C++ compiler, or give 'auto'"
            )


def add_backend(name: str, functions: Any) -> None:
    """Let ``attention_backend=name`` run ``functions``, by operation; an operation left out runs as with ``auto``.

    Raises PluginError for anything but a mapping of operations to functions, and for the name of our own kernels.
    """
    if name in OWN_BACKENDS:
        raise PluginError(f"attention backend {name!r} is built in; a plugin's needs another name")
    if not isinstance(functions, Mapping) or not functions.keys() <= set(OPERATIONS):
        operations = ", ".join(OPERATIONS)
        raise PluginError(f"attention backend {name!r} must map {operations} to functions, got {functions!r}")
    for operation in OPERATIONS:
        implements(operation, name)(functions.get(operation) or _chosen_automatically(operation))


def _chosen_automatically(operation: str) -> Callable[..., Any]:
    return lambda tensor, *args: implementation(operation, "auto", tensor)(tensor, *args)
