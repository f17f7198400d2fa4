"""decode_attention: one query per sequence against its cached keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paged_backend.kernels.attention_variant import AttentionVariant
from paged_backend.kernels.dispatch import Backend, implementation, reference
from paged_backend.kernels.kv_layout import LayerCache, gather_rows, rows_of_blocks
from paged_backend.kernels.mask_rule import MaskRule
from paged_backend.kernels.remembered import Remembered
from paged_backend.kernels.sequences import Sequences
from paged_backend.kernels.softmax_attention import bias_of, softmax_attention

# Sequences are gathered in groups of about this many key elements: small enough that the copies stay in the
# second-level cache of a core, large enough that the calls into torch do not show. Measured, see kernels/README.md.
_GATHERED_ELEMENTS = 1 << 19


def decode_attention(
    query: torch.Tensor,
    cache: LayerCache,
    sequences: Sequences,
    variant: AttentionVariant,
    *,
    backend: str | Backend = "auto",
) -> torch.Tensor:
    """Attends with each sequence's newest token to everything of that sequence its mask lets it see.

    query: [num_seqs, num_heads, key_dim], any strides; query head h reads KV head h // (num_heads // num_kv_heads).
    Padding rows, whose context is empty, come out zero.

    Returns [num_seqs, num_heads, value_dim] in the dtype of query; the softmax is computed in float32.
    Raises ValueError for shapes that do not fit and for a backend that does not exist.
    """
    num_seqs, num_heads, key_dim = query.shape
    cache_shape = cache.key.shape
    if key_dim != cache_shape[3] or num_heads % cache_shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit a cache with keys {tuple(cache_shape)}: "
            "the dims must agree and num_heads be a multiple of num_kv_heads"
        )
    if sequences.block_tables.shape[0] != num_seqs or sequences.context_lens.shape != (num_seqs,):
        raise ValueError(
            f"block_tables {tuple(sequences.block_tables.shape)} and context_lens "
            f"{tuple(sequences.context_lens.shape)} must have one row for each of the {num_seqs} queries"
        )
    return implementation("decode_attention", backend, query)(query, cache, sequences, variant)


@reference("decode_attention")
def _decode_attention_reference(
    query: torch.Tensor, cache: LayerCache, sequences: Sequences, variant: AttentionVariant
) -> torch.Tensor:
    num_seqs, num_heads, key_dim = query.shape
    num_kv_heads = cache.num_kv_heads
    context_lens = tuple(sequences.context_lens.tolist())
    plan = _plans(sequences.block_tables, context_lens, num_kv_heads, cache.block_size, key_dim, variant.mask)
    output = query.new_zeros(num_seqs, num_heads, cache.value_dim)
    for batch in plan:
        attended = softmax_attention(
            query.index_select(0, batch.sequences).view(-1, num_kv_heads, num_heads // num_kv_heads, 1, key_dim),
            gather_rows(cache.key, cache.key_scale, batch.rows),
            gather_rows(cache.value, cache.value_scale, batch.rows),
            batch.bias,
            scale=variant.scale,
            softcap=variant.softcap,
            sinks=variant.sinks,
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
    mask: MaskRule,
) -> list[_Batch]:
    device = block_tables.device
    # The first table entry that each sequence's query can see, and how many there are from there on.
    firsts = [mask.first_visible(length - 1) // block_size for length in context_lens]
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
        bias = bias_of(mask.visible(length - 1, key_positions))
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
