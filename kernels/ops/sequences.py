"""Sequences: whose tokens a call of attention is about, and where they are."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sequences(NamedTuple):
    """The sequences that queries belong to. Every layer of a step with one mask rule gets the same object.

    block_tables: int32 ``[num_seqs, max_blocks]``, rows of consecutive elements; token j of a sequence is in block
    ``block_tables[s, j // block_size]`` at offset ``j % block_size``. Entries past the context, or for blocks before
    every query's window or chunk, may hold anything and must not be followed.
    context_lens: int32 ``[num_seqs]``, tokens of each sequence with its queries, whose keys and values are stored
    already. 0 marks a padding row of decode.
    max_context_len: no context is longer; None where the caller does not know.
    cu_seqlens_q: int32 ``[num_seqs + 1]`` for prefill: sequence s owns the queries ``cu_seqlens_q[s]`` to
    ``cu_seqlens_q[s + 1]``, at its last positions. None for decode, where each owns one, at ``context_len - 1``.
    max_seqlen_q: no sequence has more queries; None where the caller does not know.

    Read it by name: it may gain fields.
    """

    block_tables: torch.Tensor
    context_lens: torch.Tensor
    max_context_len: int | None = None
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int | None = None
