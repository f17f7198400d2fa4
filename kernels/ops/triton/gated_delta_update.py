"""gated_delta_update in Triton: a program for each head of each sequence and part of its value's dims."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch

from paged_backend.kernels.dispatch import REFERENCE
from paged_backend.kernels.gated_delta_update import EPSILON
from paged_backend.kernels.recurrent_state import has_plain_slots
from paged_backend.kernels.triton.support import jit, next_power_of_2, tl, triton_operation

# Elements of state that one program holds.
_ELEMENTS_PER_PROGRAM = 4096
# Dims of a value that one program takes at most: a whole cache line of each row.
_MOST_COLUMNS = 32


@jit
def _gated_delta_update_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    slots_in_ptr,
    slots_out_ptr,
    output_ptr,
    num_heads,
    group,
    epsilon,
    stride_query_row,
    stride_query_head,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_slot,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    NORMALISES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    sequence, head = place // num_heads, place % num_heads
    rows = tl.arange(0, BLOCK_KEY_DIM)
    columns = tl.program_id(1) * BLOCK_VALUE_DIM + tl.arange(0, BLOCK_VALUE_DIM)
    rows_held, columns_held = rows < KEY_DIM, columns < VALUE_DIM
    held = rows_held[:, None] & columns_held[None, :]
    elements = head * KEY_DIM * VALUE_DIM + rows[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(state_ptr + tl.load(slots_in_ptr + sequence) * stride_slot + elements, mask=held, other=0.0)
    query_ptr += sequence * stride_query_row + head // group * stride_query_head
    key_ptr += sequence * stride_key_row + head // group * stride_key_head
    value_ptr += sequence * stride_value_row + head * stride_value_head
    query = tl.load(query_ptr + rows, mask=rows_held, other=0.0).to(tl.float32)
    key = tl.load(key_ptr + rows, mask=rows_held, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + columns, mask=columns_held, other=0.0).to(tl.float32)
    if NORMALISES:
        query *= tl.rsqrt(tl.sum(query * query, 0) + epsilon)
        key *= tl.rsqrt(tl.sum(key * key, 0) + epsilon)
    state *= tl.exp(tl.load(g_ptr + place).to(tl.float32))
    recalled = tl.sum(state * key[:, None], 0)
    correction = (value - recalled) * tl.load(beta_ptr + place).to(tl.float32)
    state += key[:, None] * correction[None, :]
    tl.store(state_ptr + tl.load(slots_out_ptr + sequence) * stride_slot + elements, state, mask=held)
    output = tl.sum(state * query[:, None], 0) * (KEY_DIM**-0.5)
    tl.store(output_ptr + place * VALUE_DIM + columns, output.to(output_ptr.dtype.element_ty), mask=columns_held)


def gated_delta_update(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots_in: torch.Tensor,
    slots_out: torch.Tensor,
    normalises: bool,
) -> torch.Tensor:
    """As the operation of this name."""
    run = _launch if has_plain_slots(state) else REFERENCE.functions["gated_delta_update"]
    result: torch.Tensor = run(query, key, value, g, beta, state, slots_in, slots_out, normalises)
    return result


@triton_operation("gated_delta_update", mutates=("state",))
def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots_in: torch.Tensor,
    slots_out: torch.Tensor,
    normalises: bool,
) -> torch.Tensor:
    query, key, value = (heads if heads.stride(2) == 1 else heads.contiguous() for heads in (query, key, value))
    batch, num_heads, value_dim = value.shape
    num_key_heads, key_dim = key.shape[1:]
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    block_key_dim = next_power_of_2(key_dim)
    fitting = max(_ELEMENTS_PER_PROGRAM // block_key_dim, 1)
    block_value_dim = min(next_power_of_2(value_dim), fitting, _MOST_COLUMNS)
    if output.numel():
        _gated_delta_update_kernel[(batch * num_heads, -(-value_dim // block_value_dim))](
            query,
            key,
            value,
            g.contiguous(),
            beta.contiguous(),
            state,
            slots_in.contiguous(),
            slots_out.contiguous(),
            output,
            num_heads,
            num_heads // num_key_heads,
            EPSILON,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            state.stride(0),
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_KEY_DIM=block_key_dim,
            BLOCK_VALUE_DIM=block_value_dim,
            NORMALISES=normalises,
        )
    return output


@_launch.register_fake
def _(query, key, value, *_):
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)
