"""rms_norm and add_rms_norm: root-mean-square normalisation, alone or of a sum that is kept."""

from __future__ import annotations

import torch

from paged_backend.kernels.dispatch import Backend, implementation, reference


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    unit_offset: bool = False,
    backend: str | Backend = "auto",
) -> torch.Tensor:
    """Scales each row to a root mean square of one, then each of its elements by `weight`.

    hidden: [..., dim]; weight: [dim]. The norm is taken in float32. Without `unit_offset` the row is rounded to the
    dtype of hidden before it meets the weight, as in Llama; with it the factor is 1 + weight, in float32, as in Gemma.
    Returns the shape of hidden, in its dtype (without unit_offset, promoted with weight's).
    Raises ValueError for a weight that does not fit and for a backend that does not exist.
    """
    _check_weight(hidden, weight)
    return implementation("rms_norm", backend, hidden)(hidden, weight, eps, unit_offset)


def add_rms_norm(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    unit_offset: bool = False,
    backend: str | Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds `residual` to `hidden`, both [..., dim], and normalises the sum as `rms_norm` does.

    Returns the normalised sum and the sum itself, which is rounded to the dtype of hidden before it is normalised.
    """
    _check_weight(hidden, weight)
    if residual.shape != hidden.shape or residual.dtype != hidden.dtype:
        raise ValueError(
            f"residual must be {hidden.dtype} {tuple(hidden.shape)} like hidden, "
            f"got {residual.dtype} {tuple(residual.shape)}"
        )
    return implementation("add_rms_norm", backend, hidden)(hidden, residual, weight, eps, unit_offset)


def _check_weight(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != hidden.shape[-1:]:
        raise ValueError(
            f"weight must be {tuple(hidden.shape[-1:])} for hidden {tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )


@reference("rms_norm")
def _rms_norm_reference(hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    normed = hidden.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1 + weight.float())).to(hidden.dtype)
    return weight * normed.to(hidden.dtype)


@reference("add_rms_norm")
def _add_rms_norm_reference(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = hidden + residual
    return _rms_norm_reference(total, weight, eps, unit_offset), total
