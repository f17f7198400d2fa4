"""Batch: one step's tokens as the tensors that a forward pass and the attention kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paged_backend.kernels import Sequences
from paged_backend.model.state_spans import StateSpans


@dataclass(frozen=True)
class GroupTables:
    """Where one KV group's tokens live.

    block_tables: ``[num_seqs, width]`` int32; entries outside what a sequence still sees are meaningless.
    slot_mapping: ``[num_tokens]`` int64, the slot each new token's key and value go to.
    decodes, prefills: the same sequences as attention takes them, None where there are none.
    """

    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    decodes: Sequences | None
    prefills: Sequences | None


@dataclass(frozen=True)
class Batch:
    """Packed tokens of one forward pass: decodes first, one token each, then prefill chunks.

    input_ids, positions: ``[num_tokens]`` int64. context_lens: ``[num_seqs]`` int32, each counting the tokens of
    this step too. cu_seqlens_q: ``[num_prefills + 1]`` int32 offsets of the chunks within the prefill part.
    logits_rows: ``[num_rows]`` int64, the tokens whose logits are wanted. embeds: what is fed in place of tokens, as
    the place of the first and ``[count, D]`` floats. spans: where recurrent states are, None for models without.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    logits_rows: torch.Tensor
    groups: tuple[GroupTables, ...]
    num_decodes: int
    max_seqlen_q: int
    max_decode_context: int
    max_prefill_context: int
    embeds: tuple[tuple[int, torch.Tensor], ...] = ()
    spans: StateSpans | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_prefills(self) -> int:
        return self.cu_seqlens_q.numel() - 1


def build_batch(
    decode_ids: Sequence[int],
    decode_positions: Sequence[int],
    chunks: Sequence[Sequence[int]],
    chunk_starts: Sequence[int],
    logits_counts: Sequence[int],
    tables: Sequence[np.ndarray],
    block_size: int,
    device: torch.device,
    embeds: Sequence[tuple[int, torch.Tensor]] = (),
    spans: StateSpans | None = None,
) -> Batch:
    """Pack decodes and prefill chunks.

    ``decode_ids[i]`` is fed at ``decode_positions[i]``; ``chunks[i]`` starts at position ``chunk_starts[i]`` and its
    last token's logits are wanted ``logits_counts[i]`` times: 0 in mid-prompt, more than 1 for samples that share a
    prompt. ``tables[g]`` is group g's int32 block table, one row per sequence, decodes first.
    """
    num_decodes = len(decode_ids)
    input_ids, positions = np.array(decode_ids, np.int64), np.array(decode_positions, np.int64)
    context_lens = positions + 1
    rows = sequence_of = np.arange(num_decodes)
    offsets = np.zeros(len(chunks) + 1, np.int64)
    lengths = np.fromiter(map(len, chunks), np.int64, len(chunks))
    # Most steps are of decodes alone, and every call of numpy counts in them.
    if chunks:
        np.cumsum(lengths, out=offsets[1:])
        starts = np.asarray(chunk_starts, np.int64)
        input_ids = np.concatenate([input_ids, *chunks])
        within = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        positions = np.concatenate([positions, within])
        context_lens = np.concatenate([context_lens, starts + lengths])
        last_rows = np.repeat(num_decodes + offsets[1:] - 1, np.asarray(logits_counts, np.int64))
        rows = np.concatenate([rows, last_rows])
        sequence_of = np.concatenate([sequence_of, num_decodes + np.repeat(np.arange(len(chunks)), lengths)])

    block_index, offset = np.divmod(positions, block_size)
    max_decode_context = int(context_lens[:num_decodes].max(initial=0))
    max_prefill_context = int(context_lens[num_decodes:].max(initial=0))
    width = -(-max(max_decode_context, max_prefill_context, 1) // block_size)
    max_seqlen_q = int(lengths.max(initial=0))
    lens, starts_q = _tensor(context_lens.astype(np.int32), device), _tensor(offsets.astype(np.int32), device)
    groups = []
    for table in tables:
        slots = table[sequence_of, block_index].astype(np.int64) * block_size + offset
        blocks = _tensor(np.ascontiguousarray(table[:, :width]), device)
        decodes = prefills = None
        if not chunks:
            decodes = Sequences(blocks, lens, max_decode_context)
        else:
            prefills = Sequences(blocks[num_decodes:], lens[num_decodes:], max_prefill_context, starts_q, max_seqlen_q)
            if num_decodes:
                decodes = Sequences(blocks[:num_decodes], lens[:num_decodes], max_decode_context)
        groups.append(GroupTables(blocks, _tensor(slots, device), decodes, prefills))
    return Batch(
        input_ids=_tensor(input_ids, device),
        positions=_tensor(positions, device),
        context_lens=lens,
        cu_seqlens_q=starts_q,
        logits_rows=_tensor(rows, device),
        groups=tuple(groups),
        num_decodes=num_decodes,
        max_seqlen_q=max_seqlen_q,
        max_decode_context=max_decode_context,
        max_prefill_context=max_prefill_context,
        embeds=tuple(embeds),
        spans=spans,
    )


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
