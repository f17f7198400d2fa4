"""Gated MLPs as two products."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.functional import gelu, silu

from paged_backend.kernels import cpu
from paged_backend.swaps.fused import Fused
from paged_backend.swaps.kind import ModuleCall, SwapKind
from paged_backend.swaps.weights import NoMatch, Packing, Product, child_of, halves, num_parameters, weight_of

MLP_NAMES = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


class FusedMLP(Fused):
    """A gated MLP as two products, the first of which holds gate and up projection and ends in the activation."""

    def __init__(self, original: nn.Module, gates: Product, down: Product, activation: int) -> None:
        super().__init__(original)
        self.gates, self.down = gates, down
        self.activation = activation
        self.num_bytes = gates.num_bytes + down.num_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > self.most_rows * x.shape[-1]:
            return self.original(x)
        return self.down(self.gates(x, self.activation))


class MLPSwap(SwapKind):
    """MLPs of a gate, an up and a down projection, the first two in one weight or in two."""

    def wants(self, module: nn.Module) -> bool:
        return hasattr(module, "down_proj")

    def propose(self, module: nn.Module, call: ModuleCall) -> Iterator[Fused]:
        activation = activation_of(module)
        gates, down = pack_mlp(module, self.packing)
        if num_parameters(module) != num_parameters(module, *MLP_NAMES):
            raise NoMatch("it has weights beside those of gate, up and down projection")
        dtype = next(module.parameters()).dtype
        yield self.packing.up_to_crossover(FusedMLP(module, gates, down, activation), dtype)


KIND = MLPSwap


def pack_mlp(mlp: nn.Module, packing: Packing) -> tuple[Product, Product]:
    """Gate and up projection in one, and the down projection."""
    if hasattr(mlp, "gate_up_proj"):
        both, bias = weight_of(child_of(mlp, "gate_up_proj"))
        gate, up = halves(both)
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
    else:
        (gate, gate_bias), (up, up_bias) = (weight_of(child_of(mlp, name)) for name in ("gate_proj", "up_proj"))
    down = packing.pack(weight_of(child_of(mlp, "down_proj")))
    return packing.pack_gated(gate, up, gate_bias, up_bias), down


def activation_of(mlp: nn.Module) -> int:
    """What the activation of a gated MLP is for C++, told from its values."""
    function: Callable[..., torch.Tensor] | None = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if function is None:
        raise NoMatch(f"a {type(mlp).__name__} has no act_fn")
    x = torch.linspace(-8, 8, 201, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        values = function(x)
    for code, known in ((cpu.SILU_GATE, silu(x)), (cpu.GELU_GATE, gelu(x, approximate="tanh"))):
        if torch.allclose(values, known, rtol=1e-5, atol=1e-6):
            return code
    raise NoMatch("its activation is neither silu nor gelu_tanh")
