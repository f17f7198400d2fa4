"""A runner computes on the cache it was given last, and leaves no batch behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged_backend.memory.kv_cache import KVCache, group_layers
from paged_backend.model.batch import Batch, build_batch
from paged_backend.model.runner import ModelRunner
from paged_backend.model.twin import Twin


@pytest.fixture
def twin(tiny_model) -> Twin:
    return Twin(tiny_model("llama"))


def make_cache(twin: Twin) -> KVCache:
    groups = group_layers(twin.layers)
    return KVCache(twin.layers, groups, [4] * len(groups), 4)


def prefill(tokens: list[int]) -> Batch:
    tables = [np.arange(4, dtype=np.int32)[None]]
    return build_batch([], [], [tokens], [0], [1], tables, 4, torch.device("cpu"))


def test_logits_are_those_of_the_rows_asked_for(tiny_model, twin):
    model = tiny_model("llama")
    logits = ModelRunner(twin, make_cache(twin)).forward(prefill([5, 6, 7]))
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0, -1:]
    torch.testing.assert_close(logits, expected)


def test_keys_and_values_go_to_the_cache_in_use(twin):
    first, second = make_cache(twin), make_cache(twin)
    for cache in (first, second):
        for layer in cache.layers:
            for tensor in layer.tensors():
                tensor.zero_()
    runner = ModelRunner(twin, first)
    expected = runner.forward(prefill([5, 6, 7]))
    assert any(tensor.any() for tensor in first.layers[0].tensors())
    runner.use_cache(second)
    assert not any(tensor.any() for tensor in second.layers[0].tensors())
    assert torch.equal(runner.forward(prefill([5, 6, 7])), expected)
    assert any(tensor.any() for tensor in second.layers[0].tensors())


def test_no_batch_is_left_behind_even_by_a_pass_that_fails(twin, monkeypatch):
    runner = ModelRunner(twin, make_cache(twin))
    runner.forward(prefill([5, 6]))
    assert runner.context.batch is None

    def broken(*args):
        assert runner.context.batch is not None
        raise RuntimeError("no")

    monkeypatch.setattr(twin, "logits", broken)
    with pytest.raises(RuntimeError):
        runner.forward(prefill([5, 6]))
    assert runner.context.batch is None
