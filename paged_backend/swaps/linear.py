"""Linear layers over a packed weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from paged_backend.swaps.fused import Fused
from paged_backend.swaps.kind import ModuleCall, SwapKind
from paged_backend.swaps.weights import Product, weight_of


class FusedLinear(Fused):
    """A linear layer over a packed weight."""

    def __init__(self, original: nn.Module, packed: Product) -> None:
        super().__init__(original)
        self.packed = packed
        self.num_bytes = packed.num_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > self.most_rows * x.shape[-1]:
            return self.original(x)
        return self.packed(x)


class LinearSwap(SwapKind):
    """Plain linear layers, those of GPT-2 too."""

    def wants(self, module: nn.Module) -> bool:
        return type(module).__name__ in ("Linear", "Conv1D")

    def propose(self, module: nn.Module, call: ModuleCall) -> Iterator[Fused]:
        weight, bias = weight_of(module)
        yield self.packing.up_to_crossover(FusedLinear(module, self.packing.pack((weight, bias))), weight.dtype)


KIND = LinearSwap
