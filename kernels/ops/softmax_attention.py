"""Softmax attention over gathered keys and values in plain torch: the arithmetic that both references share."""

from __future__ import annotations

import math

import torch


def softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attends with scores and softmax in float32.

    query: [batch, num_kv_heads, group, num_queries, key_dim], the heads that share a KV head side by side;
    key: [batch, num_kv_heads, num_keys, key_dim]; value: [batch, num_kv_heads, num_keys, value_dim];
    bias: float32 [batch, num_queries, n], see `bias_of`, for the last n keys; the keys before them are seen by every
    query, and every query sees at least one key;
    sinks: [num_heads] or None.
    Returns [batch, num_kv_heads, group, num_queries, value_dim], in bfloat16 when value is and in float32 otherwise.
    """
    batch, num_kv_heads, group, num_queries, _ = query.shape
    # The group joins the rows of one product, so each key is read once for all the heads that share it.
    scores = (query.float() * scale).flatten(2, 3) @ key.float().transpose(2, 3)
    scores = scores.view(batch, num_kv_heads, group, num_queries, -1)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores[..., -bias.shape[-1] :] += bias[:, None, None]
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(1, num_kv_heads, group, 1, 1).expand(batch, -1, -1, num_queries, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    # A product of bfloat16 has float32 sums and is fast where the processor knows it; float16 is neither on a CPU.
    value = value if value.dtype == torch.bfloat16 else value.float()
    output = weights.to(value.dtype).flatten(2, 3) @ value
    if not math.isfinite(output.sum()) and bias.isinf().any():
        # A slot that nobody owns may hold NaN or infinity, which neither a bias nor a weight of zero removes. Clearing
        # such slots costs a pass over keys and values, so it waits for the rare case; what a visible slot brings stays.
        hidden = bias.isinf().all(1)[:, None, :, None]
        key, value = (_clear_last(tensor, hidden) for tensor in (key, value))
        seen = torch.where(bias.isinf(), torch.finfo(bias.dtype).min, bias)
        return softmax_attention(query, key, value, seen, scale=scale, softcap=softcap, sinks=sinks)
    return output.view(batch, num_kv_heads, group, num_queries, -1)


def _clear_last(tensor: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """A copy of keys or values with the last of them zero where `hidden`."""
    tensor = tensor.clone()
    tensor[:, :, -hidden.shape[2] :].masked_fill_(hidden, 0)
    return tensor


def bias_of(visible: torch.Tensor) -> torch.Tensor:
    """What to add to scores: zero where visible, minus infinity elsewhere, in float32."""
    return torch.zeros(visible.shape, dtype=torch.float32, device=visible.device).masked_fill_(~visible, -math.inf)
