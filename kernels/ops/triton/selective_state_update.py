"""selective_state_update in Triton: a program for each head of each sequence and part of its dims."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from paged_backend.kernels.dispatch import REFERENCE
from paged_backend.kernels.recurrent_state import has_plain_slots
from paged_backend.kernels.triton.support import jit, next_power_of_2, tl, triton_operation

# Elements of state that one program holds.
_ELEMENTS_PER_PROGRAM = 4096


@jit
def _log1p(x):
    """log(1 + x) of an x >= 0, exact for small ones too, which a sum with one would round."""
    # 2 artanh(x / (2 + x)), as a series where it has converged.
    part = x / (2.0 + x)
    square = part * part
    series = 1.0 + square * (1.0 / 3.0 + square * (0.2 + square * (1.0 / 7.0 + square * (1.0 / 9.0))))
    return tl.where(x < 0.5, 2.0 * part * series, tl.log(1.0 + x))


@jit
def _selective_state_update_kernel(
    state_ptr,
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    z_ptr,
    dt_bias_ptr,
    slots_in_ptr,
    slots_out_ptr,
    output_ptr,
    num_heads,
    group,
    stride_slot,
    stride_x_row,
    stride_x_head,
    stride_b_row,
    stride_b_group,
    stride_c_row,
    stride_c_group,
    stride_z_row,
    stride_z_head,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    BLOCK_HEAD_DIM: tl.constexpr,
    BLOCK_STATE_DIM: tl.constexpr,
    HAS_Z: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    sequence, head = place // num_heads, place % num_heads
    rows = tl.program_id(1) * BLOCK_HEAD_DIM + tl.arange(0, BLOCK_HEAD_DIM)
    columns = tl.arange(0, BLOCK_STATE_DIM)
    rows_held, columns_held = rows < HEAD_DIM, columns < STATE_DIM
    held = rows_held[:, None] & columns_held[None, :]
    elements = head * HEAD_DIM * STATE_DIM + rows[:, None] * STATE_DIM + columns[None, :]
    state = tl.load(state_ptr + tl.load(slots_in_ptr + sequence) * stride_slot + elements, mask=held, other=0.0)
    b_ptr += sequence * stride_b_row + head // group * stride_b_group
    c_ptr += sequence * stride_c_row + head // group * stride_c_group
    b = tl.load(b_ptr + columns, mask=columns_held, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + columns, mask=columns_held, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + sequence * stride_x_row + head * stride_x_head + rows, mask=rows_held, other=0.0).to(tl.float32)
    step = tl.load(dt_ptr + place).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
    if SOFTPLUS:
        power = tl.exp(tl.minimum(step, 20.0))
        step = tl.where(step > 20.0, step, _log1p(power))
    state = state * tl.exp(step * tl.load(a_ptr + head).to(tl.float32)) + (step * x)[:, None] * b[None, :]
    tl.store(state_ptr + tl.load(slots_out_ptr + sequence) * stride_slot + elements, state, mask=held)
    output = tl.sum(state * c[None, :], 1) + tl.load(d_ptr + head).to(tl.float32) * x
    if HAS_Z:
        z = tl.load(z_ptr + sequence * stride_z_row + head * stride_z_head + rows, mask=rows_held, other=0.0)
        z = z.to(tl.float32)
        # The exponent is capped where the quotient has long vanished, so that it does not overflow.
        output *= z / (1.0 + tl.exp(tl.minimum(-z, 80.0)))
    tl.store(output_ptr + place * HEAD_DIM + rows, output.to(output_ptr.dtype.element_ty), mask=rows_held)


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor,
    slots_in: torch.Tensor,
    slots_out: torch.Tensor,
    softplus: bool,
) -> torch.Tensor:
    """As the operation of this name."""
    run = _launch if has_plain_slots(state) else REFERENCE.functions["selective_state_update"]
    result: torch.Tensor = run(state, x, dt, A, B, C, D, z, dt_bias, slots_in, slots_out, softplus)
    return result


@triton_operation("selective_state_update", mutates=("state",))
def _launch(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor,
    slots_in: torch.Tensor,
    slots_out: torch.Tensor,
    softplus: bool,
) -> torch.Tensor:
    x, B, C = (heads if heads.stride(2) == 1 else heads.contiguous() for heads in (x, B, C))
    if z is not None and z.stride(2) != 1:
        z = z.contiguous()
    batch, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[1:]
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_state_dim = next_power_of_2(state_dim)
    block_head_dim = min(next_power_of_2(head_dim), max(_ELEMENTS_PER_PROGRAM // block_state_dim, 1))
    if output.numel():
        _selective_state_update_kernel[(batch * num_heads, -(-head_dim // block_head_dim))](
            state,
            x,
            dt.contiguous(),
            A.contiguous(),
            B,
            C,
            D.contiguous(),
            z,
            dt_bias.contiguous(),
            slots_in.contiguous(),
            slots_out.contiguous(),
            output,
            num_heads,
            num_heads // num_groups,
            state.stride(0),
            x.stride(0),
            x.stride(1),
            B.stride(0),
            B.stride(1),
            C.stride(0),
            C.stride(1),
            0 if z is None else z.stride(0),
            0 if z is None else z.stride(1),
            HEAD_DIM=head_dim,
            STATE_DIM=state_dim,
            BLOCK_HEAD_DIM=block_head_dim,
            BLOCK_STATE_DIM=block_state_dim,
            HAS_Z=z is not None,
            SOFTPLUS=softplus,
        )
    return output


@_launch.register_fake
def _(state, x, *_):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
