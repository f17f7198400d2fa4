"""silu_mul and gelu_mul: the activation of a gated feed-forward layer times its other half."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paged_backend.kernels.dispatch import Backend, implementation, reference


def silu_mul(gate: torch.Tensor, up: torch.Tensor, *, backend: str | Backend = "auto") -> torch.Tensor:
    """silu(gate) * up, both [..., dim], where the halves of one merged projection will do.

    The activation is taken in float32 and rounded to the dtype before the product, as two modules in a row would.
    Raises ValueError for shapes or dtypes that differ and for a backend that does not exist.
    """
    return _gated(gate, up, "silu", backend)


def gelu_mul(
    gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "none", backend: str | Backend = "auto"
) -> torch.Tensor:
    """gelu(gate) * up, as `silu_mul`; `approximate` is "none" or "tanh", as in torch.nn.functional.gelu."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return _gated(gate, up, "gelu" if approximate == "none" else "gelu_tanh", backend)


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: str, backend: str | Backend) -> torch.Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)} must be alike")
    return implementation("gated_activation", backend, gate)(gate, up, activation)


@reference("gated_activation")
def _gated_activation_reference(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
