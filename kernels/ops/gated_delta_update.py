"""gated_delta_update: one token of each sequence through the recurrence of Gated DeltaNet."""

from __future__ import annotations

import torch

from paged_backend.kernels.dispatch import Backend, implementation, reference
from paged_backend.kernels.recurrent_state import check_pool

# Added to the sum of squares of a query or key that is normalised.
EPSILON = 1e-6


def gated_delta_update(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots_in: torch.Tensor,
    slots_out: torch.Tensor,
    *,
    normalises: bool,
    backend: str | Backend = "auto",
) -> torch.Tensor:
    """Decays each state, corrects by beta what it recalls for the key towards the value, and asks it the query.

    query, key: [batch, num_key_heads, key_dim], value: [batch, num_value_heads, value_dim], any float dtypes and
    strides; a key head serves num_value_heads / num_key_heads value heads in a row. g, the logarithm of the decay, and
    beta: [batch, num_value_heads]. state: [num_slots, num_value_heads, key_dim, value_dim]; sequence b's is read from
    slot slots_in[b] and its next one written to slot slots_out[b], int64 [batch] both; all other slots stay as they
    are. No slot may be written that is read, or twice; several sequences may read one.

    With k and q divided by their length first if `normalises`, and S the state of a value head:

        S' = exp(g) S;   S'' = S' + k (beta (v - k^T S'))^T;   out = q^T S'' / sqrt(key_dim)

    all in float32, whatever the dtypes. Returns out, [batch, num_value_heads, value_dim] in the dtype of value.
    Raises ValueError for shapes that do not fit and for a backend that does not exist.
    Source: Gated Delta Networks, Yang, Kautz and Hatamizadeh, arXiv 2412.06464.
    """
    batch, num_key_heads, key_dim = key.shape
    num_value_heads, value_dim = value.shape[1:]
    if query.shape != key.shape or value.shape[0] != batch or num_value_heads % num_key_heads:
        raise ValueError(
            "query and key must be alike, and value have as many rows and a multiple of their heads, "
            f"got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    for name, tensor in (("g", g), ("beta", beta)):
        if tensor.shape != (batch, num_value_heads):
            raise ValueError(f"{name} must be {[batch, num_value_heads]}, got {list(tensor.shape)}")
    check_pool(state, (batch, num_value_heads, key_dim, value_dim), slots_in, slots_out)
    run = implementation("gated_delta_update", backend, query)
    result: torch.Tensor = run(query, key, value, g, beta, state, slots_in, slots_out, normalises)
    return result


@reference("gated_delta_update")
def _gated_delta_update_reference(
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
    query, key = query.float(), key.float()
    if normalises:
        query, key = (heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPSILON) for heads in (query, key))
    # A row and a column for every value head.
    group = value.shape[1] // key.shape[1]
    row = query.repeat_interleave(group, 1)[:, :, None] * query.shape[-1] ** -0.5
    column = key.repeat_interleave(group, 1)[..., None]
    decayed = state[slots_in].float() * g.float().exp()[..., None, None]
    recalled = column.transpose(-1, -2) @ decayed
    correction = (value.float()[:, :, None] - recalled) * beta.float()[..., None, None]
    updated = decayed + column * correction
    state[slots_out] = updated.to(state.dtype)
    return (row @ updated)[:, :, 0].to(value.dtype)
