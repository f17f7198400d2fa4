"""prefill_attention: the queries of a prompt, or of a chunk of one, against all that is cached up to them."""

from __future__ import annotations

import torch

from paged_backend.kernels.dispatch import implementation, implements
from paged_backend.kernels.kv_layout import check_cache, check_rule, first_visible, gather_rows, rows_of_blocks, visible
from paged_backend.kernels.softmax_attention import bias_of, softmax_attention

# Queries are attended in slices of this many, so that the scores stay small and each slice stops at its last
# visible key: half of a causal product is never computed.
_QUERY_SLICE = 64


def prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_context_len: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attends with several new tokens of each sequence, packed one sequence after the other.

    query: [num_tokens, num_heads, key_dim], any strides;
    cu_seqlens_q: int32 [num_seqs + 1], sequence s owns the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1]; rows past the
    last one are padding and come out zero;
    context_lens: int32 [num_seqs], tokens of the sequence with all its queries, whose keys and values are stored
    already: row i of sequence s sits at position context_lens[s] - q_len[s] + i;
    max_seqlen_q, max_context_len: upper bounds known to the caller, which spare a device a synchronisation.
    Everything else, and who sees whom, is as in `decode_attention`; that the queries see each other causally follows
    from their positions.

    Returns [num_tokens, num_heads, value_dim] in the dtype of query; the softmax is computed in float32.
    Raises ValueError for shapes, dtypes or rules that do not fit and for a backend that does not exist.
    """
    check_cache(key_cache, value_cache, key_scale, value_scale)
    check_rule(window, chunk)
    if query.shape[2] != key_cache.shape[3] or query.shape[1] % key_cache.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit key_cache {tuple(key_cache.shape)}: "
            "the dims must agree and num_heads be a multiple of num_kv_heads"
        )
    num_seqs = context_lens.shape[0]
    if block_tables.shape[0] != num_seqs or cu_seqlens_q.shape != (num_seqs + 1,):
        raise ValueError(
            f"block_tables {tuple(block_tables.shape)} must have {num_seqs} rows and cu_seqlens_q "
            f"{tuple(cu_seqlens_q.shape)} {num_seqs + 1} entries to go with {num_seqs} context_lens"
        )
    run = implementation("prefill_attention", backend, query)
    return run(
        query,
        key_cache,
        value_cache,
        block_tables,
        cu_seqlens_q,
        context_lens,
        scale,
        window,
        chunk,
        softcap,
        sinks,
        key_scale,
        value_scale,
        max_seqlen_q,
        max_context_len,
    )


@implements("prefill_attention", "reference")
def _prefill_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_context_len: int | None,
) -> torch.Tensor:
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    output = query.new_zeros(num_tokens, num_heads, value_cache.shape[3])
    starts = cu_seqlens_q.tolist()
    for index, context_len in enumerate(context_lens.tolist()):
        start, end = starts[index], starts[index + 1]
        position = context_len - (end - start)
        if start == end:
            continue
        if position < 0:
            raise ValueError(f"sequence {index} has {end - start} queries but only {context_len} tokens of context")
        # Everything before this key is out of sight of every query of the sequence.
        origin = first_visible(position, window, chunk) // block_size * block_size
        rows = rows_of_blocks(
            block_tables[index, origin // block_size : -(-context_len // block_size)].long()[None], num_kv_heads
        )
        key = gather_rows(key_cache, key_scale, rows).float()
        value = gather_rows(value_cache, value_scale, rows)
        for row in range(start, end, _QUERY_SLICE):
            stop = min(row + _QUERY_SLICE, end)
            here = position + row - start
            last = here + stop - row
            first = first_visible(here, window, chunk)
            # Without a rule every query of the slice sees all keys up to its first one, however many there are.
            doubtful = here if window is None and chunk is None else first
            query_positions = torch.arange(here, last, device=query.device)[:, None]
            key_positions = torch.arange(doubtful, last, device=query.device)
            attended = softmax_attention(
                query[row:stop].transpose(0, 1).unflatten(0, (num_kv_heads, group))[None],
                key[:, :, first - origin : last - origin],
                value[:, :, first - origin : last - origin],
                bias_of(visible(query_positions, key_positions, window, chunk))[None],
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
            output[row:stop] = attended[0].flatten(0, 1).transpose(0, 1).to(output.dtype)
    return output
