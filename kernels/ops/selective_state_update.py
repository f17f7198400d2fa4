"""selective_state_update: one token of each sequence through the recurrence of Mamba-2."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paged_backend.kernels.dispatch import Backend, implementation, reference
from paged_backend.kernels.recurrent_state import check_pool


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
    *,
    softplus: bool,
    backend: str | Backend = "auto",
) -> torch.Tensor:
    """Decays each state, adds the token's outer product with B, reads it by C, and adds D times the token.

    state: [num_slots, num_heads, head_dim, state_dim]; sequence b's is read from slot slots_in[b] and its next one
    written to slot slots_out[b], int64 [batch] both; all other slots stay as they are. No slot may be written that is
    read, or twice; several sequences may read one. x: [batch, num_heads, head_dim]; dt: [batch, num_heads]; A, D,
    dt_bias: [num_heads]; B, C: [batch, num_groups, state_dim], a group for num_heads / num_groups heads in a row; z, as
    x, or None: a gate of the result. Any float dtypes and strides.

    With t = dt + dt_bias, or softplus(dt + dt_bias) if `softplus`, and S the state of a head:

        S' = exp(t A) S + t x B^T;   out = S' C + D x, times silu(z)

    all in float32, whatever the dtypes. In half precision transformers' plain function instead rounds t, t B, t x B^T,
    S' before its product with C, and the result before and after each of D x and the gate; in float32 both are the
    same. Returns out, [batch, num_heads, head_dim] in the dtype of x.
    Raises ValueError for shapes that do not fit and for a backend that does not exist.
    Source: Transformers are SSMs, Dao and Gu, arXiv 2405.21060.
    """
    batch, num_heads, head_dim = x.shape
    if B.shape != C.shape or B.shape[0] != batch or num_heads % B.shape[1]:
        raise ValueError(
            f"B and C must be alike, [{batch}, num_groups, state_dim] with num_groups a divisor of {num_heads}, "
            f"got {list(B.shape)} and {list(C.shape)}"
        )
    shapes = {"dt": (dt, [batch, num_heads]), "z": (x if z is None else z, [batch, num_heads, head_dim])}
    shapes |= {name: (tensor, [num_heads]) for name, tensor in (("A", A), ("D", D), ("dt_bias", dt_bias))}
    for name, (tensor, shape) in shapes.items():
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {list(tensor.shape)}")
    check_pool(state, (batch, num_heads, head_dim, B.shape[2]), slots_in, slots_out)
    run = implementation("selective_state_update", backend, x)
    result: torch.Tensor = run(state, x, dt, A, B, C, D, z, dt_bias, slots_in, slots_out, softplus)
    return result


@reference("selective_state_update")
def _selective_state_update_reference(
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
    step = dt.float() + dt_bias.float()
    if softplus:
        step = F.softplus(step)
    group = x.shape[1] // B.shape[1]
    row, column = B.float().repeat_interleave(group, 1)[:, :, None], C.float().repeat_interleave(group, 1)[..., None]
    decay = torch.exp(step * A.float())[..., None, None]
    updated = state[slots_in].float() * decay + (step[..., None] * x.float())[..., None] * row
    state[slots_out] = updated.to(state.dtype)
    result = (updated @ column)[..., 0] + D.float()[:, None] * x.float()
    if z is not None:
        result = result * F.silu(z.float())
    return result.to(x.dtype)
