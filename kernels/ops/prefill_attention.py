"""prefill_attention: the queries of a prompt, or of a chunk of one, against all that is cached up to them."""

from __future__ import annotations

import torch

from paged_backend.kernels.attention_variant import AttentionVariant
from paged_backend.kernels.dispatch import Backend, implementation, reference
from paged_backend.kernels.kv_layout import LayerCache, gather_rows, rows_of_blocks
from paged_backend.kernels.sequences import Sequences
from paged_backend.kernels.softmax_attention import bias_of, softmax_attention

# Queries are attended in slices of this many, so that the scores stay small and each slice stops at its last
# visible key: half of a causal product is never computed.
_QUERY_SLICE = 64


def prefill_attention(
    query: torch.Tensor,
    cache: LayerCache,
    sequences: Sequences,
    variant: AttentionVariant,
    *,
    backend: str | Backend = "auto",
) -> torch.Tensor:
    """Attends with several new tokens of each sequence, packed one sequence after the other.

    query: [num_tokens, num_heads, key_dim], any strides; row i of sequence s sits at position
    context_lens[s] - q_len[s] + i. Rows past the last sequence are padding and come out zero. That queries see each
    other causally follows from their positions; everything else is as in `decode_attention`.

    Returns [num_tokens, num_heads, value_dim] in the dtype of query; the softmax is computed in float32.
    Raises ValueError for shapes that do not fit and for a backend that does not exist.
    """
    cache_shape = cache.key.shape
    if query.shape[2] != cache_shape[3] or query.shape[1] % cache_shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit a cache with keys {tuple(cache_shape)}: "
            "the dims must agree and num_heads be a multiple of num_kv_heads"
        )
    block_tables, cu_seqlens_q = sequences.block_tables, sequences.cu_seqlens_q
    num_seqs = sequences.context_lens.shape[0]
    if cu_seqlens_q is None or block_tables.shape[0] != num_seqs or cu_seqlens_q.shape != (num_seqs + 1,):
        starts = "None" if cu_seqlens_q is None else tuple(cu_seqlens_q.shape)
        raise ValueError(
            f"block_tables {tuple(block_tables.shape)} must have {num_seqs} rows and cu_seqlens_q "
            f"{starts} {num_seqs + 1} entries to go with {num_seqs} context_lens"
        )
    return implementation("prefill_attention", backend, query)(query, cache, sequences, variant)


@reference("prefill_attention")
def _prefill_attention_reference(
    query: torch.Tensor, cache: LayerCache, sequences: Sequences, variant: AttentionVariant
) -> torch.Tensor:
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, block_size = cache.num_kv_heads, cache.block_size
    group, mask = num_heads // num_kv_heads, variant.mask
    output = query.new_zeros(num_tokens, num_heads, cache.value_dim)
    assert sequences.cu_seqlens_q is not None
    starts = sequences.cu_seqlens_q.tolist()
    for index, context_len in enumerate(sequences.context_lens.tolist()):
        start, end = starts[index], starts[index + 1]
        position = context_len - (end - start)
        if start == end:
            continue
        if position < 0:
            raise ValueError(f"sequence {index} has {end - start} queries but only {context_len} tokens of context")
        # Everything before this key is out of sight of every query of the sequence.
        origin = mask.first_visible(position) // block_size * block_size
        blocks = sequences.block_tables[index, origin // block_size : -(-context_len // block_size)]
        rows = rows_of_blocks(blocks.long()[None], num_kv_heads)
        key = gather_rows(cache.key, cache.key_scale, rows).float()
        value = gather_rows(cache.value, cache.value_scale, rows)
        for row in range(start, end, _QUERY_SLICE):
            stop = min(row + _QUERY_SLICE, end)
            here = position + row - start
            last = here + stop - row
            first = mask.first_visible(here)
            # Without a rule every query of the slice sees all keys up to its first one, however many there are.
            doubtful = here if mask.kind == "full" else first
            query_positions = torch.arange(here, last, device=query.device)[:, None]
            key_positions = torch.arange(doubtful, last, device=query.device)
            attended = softmax_attention(
                query[row:stop].transpose(0, 1).unflatten(0, (num_kv_heads, group))[None],
                key[:, :, first - origin : last - origin],
                value[:, :, first - origin : last - origin],
                bias_of(mask.visible(query_positions, key_positions))[None],
                scale=variant.scale,
                softcap=variant.softcap,
                sinks=variant.sinks,
            )
            output[row:stop] = attended[0].flatten(0, 1).transpose(0, 1).to(output.dtype)
    return output
