"""Decode attention is measured on blocks as an engine would have them, and for a bounded time."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels import AUTO, FULL, MaskRule
from paged_backend.memory.kv_cache import LayerSpec
from paged_backend.model import decode_timing
from paged_backend.model.attention import PagedLayer


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("rule", [FULL, MaskRule("window", 5)], ids=str)
def test_every_sequence_decodes_one_token_over_its_whole_context(monkeypatch, rule, kv_dtype):
    seen = []
    attend = PagedLayer.attend

    def noting(self, query, key, value, variant):
        seen.append((tuple(query.shape), tuple(value.shape), self.context.batch.positions.tolist(), variant.mask))
        return attend(self, query, key, value, variant)

    monkeypatch.setattr(PagedLayer, "attend", noting)
    monkeypatch.setattr(decode_timing, "TIME_LIMIT_S", 0)
    layer = LayerSpec("layer", 4, 2, 16, 8, torch.float32, torch.device("cpu"), rule)
    seconds = decode_timing.decode_seconds(layer, kv_dtype, AUTO, 4, 11, 3)
    assert seconds > 0
    # One run to warm up and one that counts.
    assert seen == [((3, 4, 16), (3, 2, 8), [10, 10, 10], rule)] * 2
