"""Recurrent states for kernel tests: pools with NaN in every slot that is not read, and transformers' own functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from kernel_cases import TOLERANCE
from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

# How a pool may lie in memory.
POOLS = ("plain", "of a wider one", "unaligned", "transposed")


class Pool(NamedTuple):
    """Slots, which of them a step reads and which it writes."""

    state: torch.Tensor
    slots_in: torch.Tensor
    slots_out: torch.Tensor


class GatedDelta(NamedTuple):
    """What gated_delta_update gets."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    slots_in: torch.Tensor
    slots_out: torch.Tensor


class Selective(NamedTuple):
    """What selective_state_update gets."""

    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    z: torch.Tensor | None
    dt_bias: torch.Tensor
    slots_in: torch.Tensor
    slots_out: torch.Tensor


def make_pool(generator: torch.Generator, batch: int, *shape: int, lies: str = "plain") -> Pool:
    """Draws `batch` states and shuffles them among twice as many slots and three that nobody uses."""
    num_slots = 2 * batch + 3
    state = torch.full((num_slots, *shape), math.nan)
    if lies == "of a wider one":
        state = torch.full((num_slots, 3, *shape), math.nan)[:, 1]
    elif lies == "unaligned":
        state = torch.full((state.numel() + 1,), math.nan)[1:].view(state.shape)
    elif lies == "transposed":
        state = state.transpose(2, 3).contiguous().transpose(2, 3)
    slots = torch.randperm(num_slots, generator=generator)
    state[slots[:batch]] = torch.randn(batch, *shape, generator=generator)
    return Pool(state, slots[:batch], slots[batch : 2 * batch])


def make_gated_delta(
    batch: int = 2,
    group: int = 2,
    dims: tuple[int, int] = (24, 20),
    dtype: torch.dtype = torch.float32,
    lies: str = "plain",
) -> GatedDelta:
    """Draws a token of two key heads for each sequence, its parts slices of one projection."""
    generator = torch.Generator().manual_seed(batch * dims[0])
    key_dim, value_dim = dims
    sizes = [2 * key_dim, 2 * key_dim, 2 * group * value_dim]
    projection = torch.randn(batch, sum(sizes), generator=generator)
    # Queries and keys are a little longer than one, but for some that are so short that what is added to them shows.
    projection[:, : 4 * key_dim] *= 1.5 * key_dim**-0.5
    projection[:1, : 4 * key_dim] *= 1e-3
    query, key, value = projection.to(dtype).split(sizes, -1)
    query, key = (part.unflatten(1, (2, key_dim)) for part in (query, key))
    value = value.unflatten(1, (2 * group, value_dim))
    g = -torch.rand(batch, 2 * group, generator=generator)
    beta = torch.rand(batch, 2 * group, generator=generator).to(dtype)
    pool = make_pool(generator, batch, 2 * group, *dims, lies=lies)
    return GatedDelta(query, key, value, g, beta, *pool)


def make_selective(
    batch: int = 2,
    num_groups: int = 2,
    dims: tuple[int, int] = (20, 24),
    dtype: torch.dtype = torch.float32,
    gated: bool = True,
    lies: str = "plain",
) -> Selective:
    """Draws a token of two heads a group for each sequence, its parts slices of one projection."""
    generator = torch.Generator().manual_seed(batch * dims[1])
    head_dim, state_dim = dims
    num_heads = 2 * num_groups
    sizes = [num_heads * head_dim, num_heads * head_dim, num_groups * state_dim, num_groups * state_dim, num_heads]
    z, x, B, C, dt = torch.randn(batch, sum(sizes), generator=generator).split(sizes, -1)
    # What is read by C is of unit variance then; steps reach where softplus is flat, and where it is straight.
    C *= state_dim**-0.5
    dt *= 12
    z, x, B, C, dt = torch.cat((z, x, B, C, dt), -1).to(dtype).split(sizes, -1)
    z, x = (part.unflatten(1, (num_heads, head_dim)) for part in (z, x))
    B, C = (part.unflatten(1, (num_groups, state_dim)) for part in (B, C))
    D, dt_bias = torch.randn(2, num_heads, generator=generator).to(dtype)
    A = -torch.rand(num_heads, generator=generator)
    state, *slots = make_pool(generator, batch, num_heads, *dims, lies=lies)
    return Selective(state, x, dt, A, B, C, D, z if gated else None, dt_bias, *slots)


def expect_gated_delta(case: GatedDelta, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the next states by transformers' function, from the same rounded inputs in float32."""
    token = [tensor[:, None].float() for tensor in case[:5]]
    result, states = torch_recurrent_gated_delta_rule(
        *token,
        initial_state=case.state[case.slots_in].float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalises,
    )
    return result[:, 0], states


def expect_selective(case: Selective, softplus: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As `expect_gated_delta`; what heads have one of is expanded over their dims, as models do."""
    head_dim, state_dim = case.state.shape[2:]
    dt, D, dt_bias = (
        tensor.float()[..., None].expand(*tensor.shape, head_dim) for tensor in (case.dt, case.D, case.dt_bias)
    )
    states = case.state[case.slots_in].float()
    result = mamba2_selective_state_update(
        states,
        case.x.float(),
        dt,
        case.A[:, None, None].expand(-1, head_dim, state_dim),
        case.B.float(),
        case.C.float(),
        D,
        z=None if case.z is None else case.z.float(),
        dt_bias=dt_bias,
        dt_softplus=softplus,
    )
    return result, states


def check_update(
    run: Callable[[], torch.Tensor],
    case: GatedDelta | Selective,
    expected: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raises AssertionError unless `run` gives the result, writes the states, and leaves other slots alone."""
    others = torch.ones(len(case.state), dtype=torch.bool)
    others[case.slots_out] = False
    before = case.state[others]
    result = run()
    assert result.dtype == dtype
    for actual, wanted in zip((result, case.state[case.slots_out]), expected, strict=True):
        tolerance = TOLERANCE[actual.dtype]
        torch.testing.assert_close(actual.float(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(case.state[others], before, atol=0, rtol=0, equal_nan=True)
