"""The probe of swaps: forward passes in which modules are called as a running engine calls them."""

from __future__ import annotations

import numpy as np
import torch

from paged_backend.kernels import AttentionVariant, Backend
from paged_backend.memory.kv_cache import KVCache, group_layers
from paged_backend.model.attention import PagedLayer
from paged_backend.model.batch import Batch, build_batch
from paged_backend.model.runner import ModelRunner
from paged_backend.model.twin import Twin

_BLOCK_SIZE = 5
_LENGTHS = (19, 13, 8)


class Recorder(PagedLayer):
    """A layer's blocks, that remember how attention was called with them."""

    def __init__(self, layer: PagedLayer) -> None:
        super().__init__(layer.context, layer.cache, layer.group, layer.rule)
        self.num_heads = 0
        self.variant = AttentionVariant(1.0)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        """Attend as the layer does."""
        self.num_heads, self.variant = query.shape[1], variant
        return super().attend(query, key, value, variant)


class Probe:
    """A forward pass in which one sequence decodes, one goes on with a chunk of its prompt, and one begins.

    A Recorder hangs on each attention module of the twin.
    """

    def __init__(self, twin: Twin, backend: Backend, kv_dtype: torch.dtype | None) -> None:
        self.twin = twin
        groups = group_layers(twin.layers, kv_dtype)
        self.sequences = [twin.sample_token_ids(length, seed) for seed, length in enumerate(_LENGTHS)]
        width = -(-max(_LENGTHS) // _BLOCK_SIZE)
        self.tables = np.random.default_rng(0).permutation(len(_LENGTHS) * width).astype(np.int32).reshape(-1, width)
        self.kv_cache = KVCache(twin.layers, groups, [self.tables.size] * len(groups), _BLOCK_SIZE, kv_dtype)
        self.runner = ModelRunner(twin, self.kv_cache, backend)
        a, b, _ = self.sequences
        self.runner.forward(self._batch([], [a[:-1], b[: len(b) // 2]], [0, 0]))
        twin.attach([Recorder(module.__dict__["paged_layer"]) for module in twin.attention_modules])

    def run(self) -> None:
        """Run the pass."""
        a, b, c = self.sequences
        half = len(b) // 2
        self.runner.forward(self._batch([(a[-1], len(a) - 1)], [b[half:], c], [half, 0]))

    def _batch(self, decodes: list[tuple[int, int]], chunks: list[list[int]], starts: list[int]) -> Batch:
        order = list(range(len(decodes) + len(chunks)))
        return build_batch(
            [token for token, _ in decodes],
            [position for _, position in decodes],
            chunks,
            starts,
            [1] * len(chunks),
            [self.tables[order] for _ in self.kv_cache.groups],
            _BLOCK_SIZE,
            self.twin.device,
        )
