"""The probe calls modules as an engine does: decodes, chunks that go on, prompts that begin, and far positions."""

from __future__ import annotations

import pytest
import torch
from paged_forward import prefill_logits

from paged_backend.kernels import AUTO
from paged_backend.model.twin import Twin
from paged_backend.swaps.probe import Probe


@pytest.fixture
def probe(tiny_model):
    return Probe(Twin(tiny_model("llama")), AUTO, None)


def test_a_pass_holds_a_decode_a_chunk_and_a_beginning(probe):
    seen = []
    forward = probe.runner.forward
    probe.runner.forward = lambda batch: seen.append(batch) or forward(batch)
    probe.run()
    (batch,) = seen
    assert batch.num_tokens == 1 + (10 - 4) + 9
    assert batch.positions.tolist() == [12, *range(4, 10), *range(9)]


def test_what_attention_was_called_with_is_remembered(probe):
    probe.run()
    for module in probe.twin.attention_modules:
        recorder = module.__dict__["paged_layer"]
        assert recorder.num_heads == probe.twin.layers[0].num_heads
        assert recorder.variant.scale == pytest.approx(probe.twin.layers[0].key_dim ** -0.5)


def test_modules_around_attention_were_called_at_far_positions(probe):
    layers = probe.twin.module.model.layers
    assert probe.far.keys() == {id(layer) for layer in layers}
    positions = probe.far[id(layers[0])]["position_ids"]
    assert int(positions.max()) > max(map(len, probe.sequences))


def test_a_probe_reads_and_writes_no_cache_but_its_own(tiny_model):
    twin = Twin(tiny_model("llama"))
    expected = prefill_logits(twin, [[5, 6, 7]])[0]
    Probe(twin, AUTO, None).run()
    assert torch.equal(prefill_logits(twin, [[5, 6, 7]])[0], expected)
