"""The probe of swaps: forward passes in which modules are called as a running engine calls them."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from paged_backend.kernels import AttentionVariant, Backend
from paged_backend.memory.kv_cache import KVCache, group_layers
from paged_backend.model.attention import PagedLayer
from paged_backend.model.batch import Batch, build_batch
from paged_backend.model.runner import ModelRunner
from paged_backend.model.state_spans import LoneSlots
from paged_backend.model.twin import Twin

_BLOCK_SIZE = 5
# Those that fill the cache are as many tokens as those that run on it.
_LENGTHS = (13, 10, 9)
_FILLED = (12, 4)


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

    A Recorder hangs on each attention module of the twin. What came before was at far positions, and far holds the
    keywords with which that called the modules that have attention among their children, by their ids.
    """

    def __init__(self, twin: Twin, backend: Backend, kv_dtype: torch.dtype | None) -> None:
        self.twin = twin
        groups = group_layers(twin.layers, kv_dtype)
        self.sequences = [twin.sample_token_ids(length, seed) for seed, length in enumerate(_LENGTHS)]
        width = -(-max(_LENGTHS) // _BLOCK_SIZE)
        self.tables = np.random.default_rng(0).permutation(len(_LENGTHS) * width).astype(np.int32).reshape(-1, width)
        self.kv_cache = KVCache(twin.layers, groups, [self.tables.size] * len(groups), _BLOCK_SIZE, kv_dtype)
        self.runner = ModelRunner(twin, self.kv_cache, backend)
        self.slots = LoneSlots(len(_LENGTHS))
        self.runner.states.grow(self.slots.num_slots)
        self.far: dict[int, dict[str, Any]] = {}
        self._fill()
        twin.attach([Recorder(layer) for layer in twin.paged_layers])

    def _fill(self) -> None:
        filled = [tokens[:count] for tokens, count in zip(self.sequences, _FILLED, strict=False)]
        batch = self._batch([], filled, [0, 0])
        positions = torch.tensor(self.twin.far_positions(batch.num_tokens), device=self.twin.device)

        def note(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            self.far[id(module)] = kwargs

        with ExitStack() as hooks:
            for module in self.twin.module.modules():
                if any("paged_layer" in child.__dict__ for child in module.children()):
                    hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            self.runner.forward(dataclasses.replace(batch, positions=positions))

    def run(self) -> None:
        """Run the pass."""
        (a, b, c), (many, few) = self.sequences, _FILLED
        self.runner.forward(self._batch([(a[many], many)], [b[few:], c], [few, 0]))

    def _batch(self, decodes: list[tuple[int, int]], chunks: list[list[int]], starts: list[int]) -> Batch:
        order = list(range(len(decodes) + len(chunks)))
        spans = self.slots.spans(order[: len(decodes)], order[len(decodes) :], [len(chunk) for chunk in chunks])
        return build_batch(
            [token for token, _ in decodes],
            [position for _, position in decodes],
            chunks,
            starts,
            [1] * len(chunks),
            [self.tables[order] for _ in self.kv_cache.groups],
            _BLOCK_SIZE,
            self.twin.device,
            spans=spans,
        )
