"""Modules that compute in C++ what modules of transformers compute."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from paged_backend.kernels import cpu
from paged_backend.model.attention import PagedLayer


class Fused(nn.Module):
    """Stands in for ``original``, whose attributes it still answers for and which runs where C++ would be slower.

    most_rows: tokens up to which C++ is faster. num_bytes: of packed weights held beside the original ones.
    """

    most_rows: float = math.inf
    num_bytes = 0

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


class FusedLinear(Fused):
    """A linear layer over a packed weight."""

    def __init__(self, original: nn.Module, packed: cpu.PackedLinear) -> None:
        super().__init__(original)
        self.packed = packed
        self.num_bytes = packed.num_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > self.most_rows * x.shape[-1]:
            return self.original(x)
        return self.packed(x)


class FusedNorm(Fused):
    """An RMS norm in one pass. weight: float32, with any offset already added."""

    def __init__(self, original: nn.Module, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__(original)
        self.scale = weight
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cpu.library().rms_norm(x, self.scale, self.epsilon)


class FusedMLP(Fused):
    """A gated MLP as two products, the first of which holds gate and up projection and ends in the activation."""

    def __init__(self, original: nn.Module, gates: cpu.PackedLinear, down: cpu.PackedLinear, activation: int) -> None:
        super().__init__(original)
        self.gates, self.down = gates, down
        self.activation = activation
        self.num_bytes = gates.num_bytes + down.num_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > self.most_rows * x.shape[-1]:
            return self.original(x)
        return self.down(self.gates(x, self.activation))


class FusedLayer(Fused):
    """A whole decoder layer, attention and its cache included, in one call.

    norms: float32 weights of the six places of a norm, absent ones None. weights: query-key-value, output, gates and
    down. attention: the original attention module, on which the engine hangs the layer's blocks.
    """

    def __init__(
        self,
        original: nn.Module,
        attention: nn.Module,
        norms: list[torch.Tensor | None],
        epsilon: float,
        weights: list[cpu.PackedLinear],
        num_heads: int,
        activation: int,
        rotates: bool,
        rule: tuple[Any, ...],
        returns_tuple: bool,
    ) -> None:
        super().__init__(original)
        # In a tuple, lest it becomes a second child.
        self._attention = (attention,)
        self._fixed = (
            norms,
            epsilon,
            [weight.packed for weight in weights],
            [weight.scale for weight in weights],
            [weight.bias for weight in weights],
            num_heads,
            activation,
        )
        self._rotates = rotates
        self._rule = rule
        self._returns_tuple = returns_tuple
        self.weights = tuple(weights)
        self.num_bytes = sum(weight.num_bytes for weight in weights)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if hidden_states.shape[1] > self.most_rows:
            return self.original(hidden_states, **kwargs)
        layer: PagedLayer = self._attention[0].__dict__["paged_layer"]
        batch = layer.context.batch
        if batch is None:
            raise RuntimeError("a fused layer was called outside a step of the engine")
        tables = batch.groups[layer.group]
        cos, sin = kwargs["position_embeddings"] if self._rotates else (None, None)
        result = cpu.library().decoder_layer(
            hidden_states,
            cos,
            sin,
            *self._fixed,
            layer.cache.key,
            layer.cache.value,
            tables.slot_mapping,
            tables.block_tables,
            batch.context_lens,
            batch.cu_seqlens_q,
            batch.num_decodes,
            *self._rule,
        )
        return (result,) if self._returns_tuple else result
