"""A step's tokens are packed where the kernels expect them."""

from __future__ import annotations

import numpy as np
import torch

from paged_backend.model.batch import build_batch

CPU = torch.device("cpu")
# Three sequences: one decodes at position 5, one starts, one goes on at position 4; blocks of 4 tokens.
TABLE = np.array([[7, 3, -1], [9, 1, -1], [2, 8, 6]], np.int32)


def three_sequences(**changes):
    arguments = {
        "decode_ids": [50],
        "decode_positions": [5],
        "chunks": [[10, 11, 12], [20, 21]],
        "chunk_starts": [0, 4],
        "logits_counts": [0, 2],
        "tables": [TABLE],
        "block_size": 4,
        "device": CPU,
    }
    return build_batch(**{**arguments, **changes})


def test_decodes_come_first_then_chunks_one_after_the_other():
    batch = three_sequences()
    assert batch.input_ids.tolist() == [50, 10, 11, 12, 20, 21]
    assert batch.positions.tolist() == [5, 0, 1, 2, 4, 5]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 5]
    assert (batch.num_decodes, batch.num_prefills, batch.num_tokens) == (1, 2, 6)


def test_context_lens_count_the_tokens_of_the_step():
    batch = three_sequences()
    assert batch.context_lens.tolist() == [6, 3, 6]
    assert (batch.max_decode_context, batch.max_prefill_context, batch.max_seqlen_q) == (6, 6, 3)


def test_slots_follow_each_sequences_block_table():
    (group,) = three_sequences().groups
    assert group.slot_mapping.tolist() == [3 * 4 + 1, 9 * 4, 9 * 4 + 1, 9 * 4 + 2, 8 * 4, 8 * 4 + 1]


def test_tables_are_cut_to_the_longest_context():
    (group,) = three_sequences().groups
    assert group.block_tables.tolist() == TABLE[:, :2].tolist()
    assert group.block_tables.is_contiguous()


def test_logits_rows_are_decodes_and_wanted_last_tokens_as_often_as_wanted():
    assert three_sequences().logits_rows.tolist() == [0, 5, 5]
    assert three_sequences(logits_counts=[1, 1]).logits_rows.tolist() == [0, 3, 5]


def test_batch_of_decodes_alone_has_no_prefill():
    batch = build_batch([50, 51], [5, 0], [], [], [], [TABLE[:2]], 4, CPU)
    assert (batch.num_prefills, batch.max_seqlen_q, batch.max_prefill_context) == (0, 0, 0)
    assert batch.logits_rows.tolist() == [0, 1]


def test_each_group_has_tables_and_slots_of_its_own():
    other = TABLE + 10
    groups = three_sequences(tables=[TABLE, other]).groups
    assert (groups[1].slot_mapping - groups[0].slot_mapping).unique().tolist() == [40]
