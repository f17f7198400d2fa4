"""ModelRunner: forward passes of the twin over a batch."""

from __future__ import annotations

import torch

from paged_backend.kernels import AUTO, Backend
from paged_backend.memory.kv_cache import KVCache
from paged_backend.memory.state_cache import StateCache
from paged_backend.model.attention import ForwardContext, PagedLayer
from paged_backend.model.batch import Batch
from paged_backend.model.mixer import StateContext
from paged_backend.model.twin import Twin


class ModelRunner:
    """Runs the twin on packed batches, its attention layers reading and writing ``kv_cache``, its mixers ``states``."""

    def __init__(self, twin: Twin, kv_cache: KVCache, backend: Backend = AUTO) -> None:
        self.twin = twin
        self.context = ForwardContext(backend)
        self.states = StateCache([spec for mixer in twin.mixers for spec in mixer.specs])
        self.use_cache(kv_cache)

    def use_cache(self, kv_cache: KVCache) -> None:
        """Attach the twin's attention layers to another block pool."""
        self.kv_cache = kv_cache
        group_of = {index: g for g, group in enumerate(kv_cache.groups) for index in group.layers}
        self.twin.attach(
            [
                PagedLayer(self.context, kv_cache.layers[index], group_of[index], layer.rule)
                for index, layer in enumerate(self.twin.layers)
            ]
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[num_rows, vocab_size]`` of the batch's ``logits_rows``, in the model's dtype."""
        self.context.batch = batch
        mixing = StateContext(batch, self.states)
        for mixer in self.twin.mixers:
            mixer.context = mixing
        try:
            return self.twin.logits(batch.input_ids, batch.positions, batch.logits_rows, batch.embeds)
        finally:
            self.context.batch = None
            for mixer in self.twin.mixers:
                mixer.context = None
