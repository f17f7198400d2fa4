"""RMS norms in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from paged_backend.kernels import cpu
from paged_backend.swaps.fused import Fused
from paged_backend.swaps.kind import ModuleCall, SwapKind
from paged_backend.swaps.weights import NoMatch


class FusedNorm(Fused):
    """An RMS norm in one pass. weight: float32, with any offset already added."""

    def __init__(self, original: nn.Module, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__(original)
        self.scale = weight
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cpu.library().rms_norm(x, self.scale, self.epsilon)


class NormSwap(SwapKind):
    """RMS norms, by whatever name they go."""

    def wants(self, module: nn.Module) -> bool:
        return type(module).__name__.endswith("RMSNorm")

    def propose(self, module: nn.Module, call: ModuleCall) -> Iterator[Fused]:
        weight, epsilon = norm_weight(module)
        yield FusedNorm(module, weight, epsilon)


KIND = NormSwap


def norm_weight(module: nn.Module) -> tuple[torch.Tensor, float]:
    """The float32 weight and the epsilon of an RMS norm, some of which add one to their weight."""
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or not isinstance(epsilon, float):
        raise NoMatch(f"a {type(module).__name__} is no RMS norm")
    x = torch.linspace(-2, 3, weight.numel(), dtype=torch.float32, device="cpu")[None].to(weight.dtype)
    normed = x.float() * (x.float().square().mean() + epsilon).rsqrt()
    with torch.inference_mode():
        expected = module.forward(x).float()
    for offset in (0.0, 1.0):
        scale = weight.detach().float() + offset
        if torch.allclose(normed * scale, expected, rtol=2e-2 if weight.dtype != torch.float32 else 1e-5, atol=1e-5):
            return scale, epsilon
    raise NoMatch(f"a {type(module).__name__} computes something else than an RMS norm")
