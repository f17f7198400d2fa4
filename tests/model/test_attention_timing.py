"""Attention is measured on blocks as an engine would have them, for all layers, and for a bounded time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged_backend.errors import ConfigError
from paged_backend.kernels import AUTO, FULL, MaskRule
from paged_backend.memory.kv_cache import LayerSpec
from paged_backend.model import attention_timing
from paged_backend.model.attention import PagedLayer
from paged_backend.model.attention_timing import AttentionTiming

WINDOW = MaskRule("window", 5)


def layer_of(rule: MaskRule = FULL) -> LayerSpec:
    return LayerSpec("layer", 4, 2, 16, 8, torch.float32, torch.device("cpu"), rule)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What was attended to."""
    calls: list[tuple] = []
    attend = PagedLayer.attend

    def noting(self, query, key, value, variant):
        calls.append((tuple(query.shape), tuple(value.shape), self.context.batch.positions.tolist(), variant.mask))
        return attend(self, query, key, value, variant)

    monkeypatch.setattr(PagedLayer, "attend", noting)
    return calls


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("rule", [FULL, WINDOW], ids=str)
def test_every_sequence_decodes_one_token_over_its_whole_context(seen, rule, kv_dtype):
    timing = AttentionTiming([layer_of(rule)], kv_dtype, AUTO, time_limit_s=0)
    assert timing.decode_seconds(4, 11, 3) > 0
    # One run to warm up and one that counts.
    assert seen == [((3, 4, 16), (3, 2, 8), [10, 10, 10], rule)] * 2


def test_a_chunk_is_at_the_end_of_its_context(seen):
    timing = AttentionTiming([layer_of()], None, AUTO, time_limit_s=0)
    assert timing.prefill_seconds(4, 11, 5) > 0
    assert seen == [((5, 4, 16), (5, 2, 8), [6, 7, 8, 9, 10], FULL)] * 2


def test_storing_attends_to_nothing(seen):
    timing = AttentionTiming([layer_of()], None, AUTO, time_limit_s=0)
    assert timing.store_seconds(4, 11, 5) > 0
    assert seen == []


def test_what_was_measured_before_is_warm(seen):
    timing = AttentionTiming([layer_of()], None, AUTO, time_limit_s=0)
    for _ in range(3):
        timing.decode_seconds(4, 11, 3)
    assert len(seen) == 4


def test_layers_that_are_alike_are_timed_once_and_count_as_often_as_they_are_there(seen, monkeypatch):
    monkeypatch.setattr(attention_timing, "_time", lambda run, device: run().shape[0] * 1.0)
    full, window = layer_of(), replace(layer_of(WINDOW), num_heads=2)
    timing = AttentionTiming([full, window, replace(full, name="other"), window, full], None, AUTO, time_limit_s=0)
    assert timing.decode_seconds(4, 11, 3) == 5 * 3.0
    assert [rule for *_, rule in seen] == [FULL, FULL, WINDOW, WINDOW]


def test_more_tokens_than_there_is_memory_for_are_refused():
    timing = AttentionTiming([layer_of()], None, AUTO, time_limit_s=0)
    with pytest.raises(ConfigError, match=r"1000000 requests of 100000 tokens take .* bytes in one layer"):
        timing.decode_seconds(4, 100_000, 1_000_000)
