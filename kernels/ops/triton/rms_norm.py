"""rms_norm and add_rms_norm in Triton: a program for each row."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from paged_backend.kernels.triton.support import jit, next_power_of_2, tl, triton_operation


@jit
def _rms_norm_kernel(
    hidden_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    eps,
    stride_hidden,
    stride_residual,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    held = dims < DIM
    element: tl.constexpr = hidden_ptr.dtype.element_ty
    hidden = tl.load(hidden_ptr + row * stride_hidden + dims, mask=held, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        hidden += tl.load(residual_ptr + row * stride_residual + dims, mask=held, other=0.0).to(tl.float32)
        total = hidden.to(element)
        tl.store(total_ptr + row * DIM + dims, total, mask=held)
        hidden = total.to(tl.float32)
    normed = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / DIM + eps)
    weight = tl.load(weight_ptr + dims, mask=held, other=0.0).to(tl.float32)
    normed = normed * (1.0 + weight) if UNIT_OFFSET else normed.to(element).to(tl.float32) * weight
    tl.store(normed_ptr + row * DIM + dims, normed.to(normed_ptr.dtype.element_ty), mask=held)


def _launch(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    dim = hidden.shape[-1]
    dtype = hidden.dtype if unit_offset else torch.promote_types(hidden.dtype, weight.dtype)
    normed = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    total = None if residual is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    rows = _rows(hidden)
    added = None if residual is None else _rows(residual)
    block_dim = next_power_of_2(dim)
    if rows.numel():
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            added,
            weight.contiguous(),
            normed,
            total,
            eps,
            rows.stride(0),
            0 if added is None else added.stride(0),
            DIM=dim,
            BLOCK_DIM=block_dim,
            HAS_RESIDUAL=residual is not None,
            UNIT_OFFSET=unit_offset,
            # Eight elements for each of the 32 lanes of a warp, within what a program may have.
            num_warps=min(max(block_dim // 256, 1), 16),
        )
    return normed, total


def _rows(hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton_operation("rms_norm")
def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    """As the operation of this name."""
    return _launch(hidden, None, weight, eps, unit_offset)[0]


@rms_norm.register_fake
def _(hidden, weight, eps, unit_offset):
    dtype = hidden.dtype if unit_offset else torch.promote_types(hidden.dtype, weight.dtype)
    return torch.empty(hidden.shape, dtype=dtype, device=hidden.device)


@triton_operation("add_rms_norm")
def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the operation of this name."""
    normed, total = _launch(hidden, residual, weight, eps, unit_offset)
    assert total is not None
    return normed, total


@add_rms_norm.register_fake
def _(hidden, residual, weight, eps, unit_offset):
    dtype = hidden.dtype if unit_offset else torch.promote_types(hidden.dtype, weight.dtype)
    return torch.empty(hidden.shape, dtype=dtype, device=hidden.device), torch.empty(
        hidden.shape, dtype=hidden.dtype, device=hidden.device
    )
