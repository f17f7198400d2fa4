"""Peers of the benchmarks compute what plain torch does, as far as they run here."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import peers
from measure import Shape, make_inputs

SHAPE = Shape(batch=2, context=12, num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)


@pytest.mark.parametrize("query_len", [1, 5, 12])
def test_flash_attention_sees_what_comes_before_each_query(query_len):
    shape = replace(SHAPE, query_len=query_len)
    inputs = make_inputs(shape, torch.device("cpu"))
    query = inputs.query.view(2, query_len, 4, 8).transpose(1, 2)
    key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (inputs.key, inputs.value))
    scores = query @ key.transpose(-1, -2) * 8**-0.5
    seen = torch.arange(12) <= torch.arange(12 - query_len, 12)[:, None]
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(peers.flash_sdpa(shape, inputs)(), expected)


def test_a_window_is_nothing_that_flash_attention_takes():
    shape = replace(SHAPE, window=4)
    with pytest.raises(NotImplementedError, match="no window"):
        peers.flash_sdpa(shape, make_inputs(shape, torch.device("cpu")))
