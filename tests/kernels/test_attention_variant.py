"""AttentionVariant: a scale alone is plain causal attention, and every other field changes it by itself."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle

from paged_backend.kernels import AttentionVariant, MaskRule, decode_attention


def test_a_scale_alone_is_plain_attention(backend):
    case = make_case([5, 33], group=2, scale=0.7)
    query, cache, sequences, _ = case.decode_arguments
    output = decode_attention(query, cache, sequences, AttentionVariant(0.7), backend=backend)
    assert_attention_close(output, oracle(case))


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("scale", 0.2, {"scale": 0.2}),
        ("mask", MaskRule("window", 7), {"window": 7}),
        ("mask", MaskRule("chunk", 7), {"chunk": 7}),
        ("softcap", 1.5, {"softcap": 1.5}),
        ("sinks", torch.tensor([0.5, -1.0, 2.0, 0.0]), {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    ],
    ids=["scale", "window", "chunk", "softcap", "sinks"],
)
def test_each_field_changes_attention_by_itself(backend, field, value, option):
    case = make_case([5, 33], group=2, scale=0.7)
    query, cache, sequences, _ = case.decode_arguments
    variant = AttentionVariant(0.7)._replace(**{field: value})
    output = decode_attention(query, cache, sequences, variant, backend=backend)
    assert_attention_close(output, oracle(case, **option))
    with pytest.raises(AssertionError):
        assert_attention_close(output, oracle(case))
