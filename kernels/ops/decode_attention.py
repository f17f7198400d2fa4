"""decode_attention: one query per sequence against its cached keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paged_backend.kernels.dispatch import implementation, implements
from paged_backend.kernels.kv_layout import check_cache, check_rule, first_visible, gather_rows, rows_of_blocks, visible
from paged_backend.kernels.remembered import Remembered
from paged_backend.kernels.softmax_attention import bias_of, softmax_attention

# Sequences are gathered in groups of about this many key elements: small enough that the copies stay in the
# second-level cache of a core, large enough that the calls into torch do not show. Measured, see kernels/README.md.
_GATHERED_ELEMENTS = 1 << 19


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    max_context_len: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attends with each sequence's newest token to everything of that sequence its mask rule lets it see.

    query: [num_seqs, num_heads, key_dim], any strides; query head h reads KV head h // (num_heads // num_kv_heads);
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, dim], contiguous, key and value dim may differ,
    quantised caches with key_scale, value_scale: float32 [num_blocks, num_kv_heads, block_size];
    block_tables: int32 [num_seqs, max_blocks]; entries past the context, or for blocks before the window or chunk, are
    never followed and may hold anything;
    context_lens: int32 [num_seqs], tokens of the sequence with the current one, whose key and value are stored already
    and whose position is context_len - 1; 0 marks a padding row, which comes out zero.

    A key at j is visible to the query at i when j <= i and, with a window, i - j < window, with a chunk,
    j // chunk == i // chunk. Scores are scaled, then softcap * tanh(score / softcap) when softcap is given.
    sinks: [num_heads], a logit per head that takes part in the softmax and brings no value (gpt_oss).
    max_context_len: an upper bound of context_lens known to the caller, which spares a device a synchronisation.

    Returns [num_seqs, num_heads, value_dim] in the dtype of query; the softmax is computed in float32.
    Raises ValueError for shapes, dtypes or rules that do not fit and for a backend that does not exist.
    """
    check_cache(key_cache, value_cache, key_scale, value_scale)
    check_rule(window, chunk)
    num_seqs, num_heads, key_dim = query.shape
    if key_dim != key_cache.shape[3] or num_heads % key_cache.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit key_cache {tuple(key_cache.shape)}: "
            "the dims must agree and num_heads be a multiple of num_kv_heads"
        )
    if block_tables.shape[0] != num_seqs or context_lens.shape != (num_seqs,):
        raise ValueError(
            f"block_tables {tuple(block_tables.shape)} and context_lens {tuple(context_lens.shape)} "
            f"must have one row for each of the {num_seqs} queries"
        )
    run = implementation("decode_attention", backend, query)
    return run(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        scale,
        window,
        chunk,
        softcap,
        sinks,
        key_scale,
        value_scale,
        max_context_len,
    )


@implements("decode_attention", "reference")
def _decode_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    max_context_len: int | None,
) -> torch.Tensor:
    num_seqs, num_heads, key_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    plan = _plans(block_tables, tuple(context_lens.tolist()), num_kv_heads, block_size, key_dim, window, chunk)
    output = query.new_zeros(num_seqs, num_heads, value_cache.shape[3])
    for batch in plan:
        attended = softmax_attention(
            query.index_select(0, batch.sequences).view(-1, num_kv_heads, num_heads // num_kv_heads, 1, key_dim),
            gather_rows(key_cache, key_scale, batch.rows),
            gather_rows(value_cache, value_scale, batch.rows),
            batch.bias,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        output[batch.sequences] = attended.reshape(-1, num_heads, attended.shape[-1]).to(output.dtype)
    return output


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences of similar length that are gathered and attended together."""

    sequences: torch.Tensor  # int64 [batch], rows of the query
    rows: torch.Tensor  # int64 [batch, num_kv_heads, n], see rows_of_blocks
    bias: torch.Tensor  # float32 [batch, 1, n * block_size], see bias_of


def _plan(
    block_tables: torch.Tensor,
    context_lens: tuple[int, ...],
    num_kv_heads: int,
    block_size: int,
    key_dim: int,
    window: int | None,
    chunk: int | None,
) -> list[_Batch]:
    device = block_tables.device
    # The first table entry that each sequence's query can see, and how many there are from there on.
    firsts = [first_visible(length - 1, window, chunk) // block_size for length in context_lens]
    counts = [-(-length // block_size) - first for length, first in zip(context_lens, firsts, strict=True)]
    order = sorted((index for index, length in enumerate(context_lens) if length), key=counts.__getitem__)
    plan = []
    for batch in _batches(order, counts, num_kv_heads * block_size * key_dim):
        width = counts[batch[-1]]
        sequences, first, count, length = (
            torch.tensor([row[index] for index in batch], device=device)[:, None]
            for row in (range(len(counts)), firsts, counts, context_lens)
        )
        entries = torch.arange(width, device=device).expand(len(batch), -1)
        # Entries past the context may hold anything; block 0 always exists, and what it holds is hidden.
        blocks = block_tables[sequences, torch.where(entries < count, first + entries, 0)].long()
        blocks = torch.where(entries < count, blocks, 0)
        key_positions = first * block_size + torch.arange(width * block_size, device=device)
        bias = bias_of(visible(length - 1, key_positions, window, chunk))
        plan.append(_Batch(sequences[:, 0], rows_of_blocks(blocks, num_kv_heads), bias[:, None]))
    return plan


def _batches(order: list[int], counts: list[int], block_elements: int) -> Iterator[list[int]]:
    """Cuts sequences in ascending order of their counts of blocks into batches that stay small."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * counts[index] * block_elements > _GATHERED_ELEMENTS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


# Every layer of a step with one mask rule asks for the same plan.
_plans = Remembered(_plan)
