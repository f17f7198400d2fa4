"""silu_mul and gelu_mul in Triton: a program for each row and part of its columns."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from paged_backend.kernels.triton.support import jit, next_power_of_2, tl, triton_operation

# Columns that one program computes.
_BLOCK_DIM = 1024

# Values of ACTIVATION.
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@jit
def _gated_activation_kernel(
    gate_ptr,
    up_ptr,
    output_ptr,
    dim,
    stride_gate,
    stride_up,
    ACTIVATION: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    held = dims < dim
    element: tl.constexpr = output_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * stride_gate + dims, mask=held, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + dims, mask=held, other=0.0).to(tl.float32)
    # The exponents are capped where the quotient has long vanished, so that none overflows.
    if ACTIVATION == 0:
        activated = gate / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))
    elif ACTIVATION == 1:
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u))
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(tl.minimum(-inner, 80.0)))
    product = activated.to(element).to(tl.float32) * up
    tl.store(output_ptr + row * dim + dims, product.to(element), mask=held)


@triton_operation("gated_activation")
def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`silu_mul` and `gelu_mul`, by the name of the activation."""
    dim = gate.shape[-1]
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_rows, up_rows = (tensor.reshape(-1, dim) for tensor in (gate, up))
    gate_rows, up_rows = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (gate_rows, up_rows))
    block_dim = min(next_power_of_2(dim), _BLOCK_DIM)
    if gate_rows.numel():
        _gated_activation_kernel[(gate_rows.shape[0], -(-dim // block_dim))](
            gate_rows,
            up_rows,
            output,
            dim,
            gate_rows.stride(0),
            up_rows.stride(0),
            ACTIVATION=_ACTIVATIONS[activation],
            BLOCK_DIM=block_dim,
        )
    return output


@gated_activation.register_fake
def _(gate, up, activation):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
