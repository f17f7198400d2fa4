"""The attention function that transformers calls on the twin: store keys and values, then attend through blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from paged_backend.kernels import (
    AUTO,
    AttentionVariant,
    Backend,
    LayerCache,
    MaskRule,
    decode_attention,
    prefill_attention,
    store_kv,
)
from paged_backend.model.batch import Batch

ATTENTION_NAME = "paged_backend"


class ForwardContext:
    """What the attention layers of a running forward pass share; the model runner sets the batch."""

    def __init__(self, backend: Backend = AUTO) -> None:
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
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        """Store the step's keys and values, then decode rows and prefill rows each through their own kernel.

        query ``[num_tokens, num_heads, key_dim]``, key and value ``[num_tokens, num_kv_heads, dim]``; returns
        ``[num_tokens, num_heads, value_dim]``.
        """
        batch, backend, cache = self.context.batch, self.context.backend, self.cache
        if batch is None:
            raise RuntimeError("paged attention was called outside a step of the engine")
        tables = batch.groups[self.group]
        store_kv(key, value, cache, tables.slot_mapping, backend=backend)
        n = batch.num_decodes
        parts = []
        if tables.decodes is not None:
            parts.append(decode_attention(query[:n], cache, tables.decodes, variant, backend=backend))
        if tables.prefills is not None:
            parts.append(prefill_attention(query[n:], cache, tables.prefills, variant, backend=backend))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class LayersInOrder:
    """The layers of a module that attends several times a forward pass, each time with blocks of its own."""

    def __init__(self, layers: Sequence[PagedLayer]) -> None:
        self.layers = list(layers)
        self._batch: Batch | None = None
        self._num_calls = 0

    def next(self) -> PagedLayer:
        """The layer of this call."""
        batch = self.layers[0].context.batch
        if batch is not self._batch:
            self._batch, self._num_calls = batch, 0
        self._num_calls += 1
        if self._num_calls > len(self.layers):
            raise RuntimeError(f"a module attends more often than the {len(self.layers)} times of its probe")
        return self.layers[self._num_calls - 1]


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
    hung = module.__dict__.get("paged_layer")
    if hung is None:
        raise RuntimeError(
            f"{type(module).__name__} runs attn_implementation={ATTENTION_NAME!r} outside a paged_backend engine; "
            "load the model with its own attention and pass it to paged_backend.Engine or generate(cache_impl='paged')"
        )
    layer: PagedLayer = hung.next() if isinstance(hung, LayersInOrder) else hung
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed_query, packed_key, packed_value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    variant = AttentionVariant(scale, layer.rule, softcap, s_aux)
    return layer.attend(packed_query, packed_key, packed_value, variant).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
