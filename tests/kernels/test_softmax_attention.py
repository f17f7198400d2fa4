"""Softmax attention of gathered keys and values against scaled_dot_product_attention, and what it does beyond."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from paged_backend.kernels.softmax_attention import bias_of, softmax_attention

NUM_QUERIES, NUM_KEYS = 3, 7
VISIBLE = torch.ones(NUM_QUERIES, NUM_KEYS, dtype=torch.bool).tril(NUM_KEYS - NUM_QUERIES).expand(2, -1, -1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUERY, KEY, VALUE = draw(2, 2, 3, NUM_QUERIES, 8), draw(2, 2, NUM_KEYS, 8, seed=1), draw(2, 2, NUM_KEYS, 5, seed=2)


def attend(query=QUERY, key=KEY, value=VALUE, visible=VISIBLE, *, scale=0.3, softcap=None, sinks=None):
    return softmax_attention(query, key, value, bias_of(visible), scale=scale, softcap=softcap, sinks=sinks)


def expected(query=QUERY, key=KEY, value=VALUE, visible=VISIBLE):
    """The same by torch, each head of a group with keys of its own."""
    key, value = (tensor[:, :, None].expand(-1, -1, 3, -1, -1) for tensor in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None, None], scale=0.3)


def test_a_bias_is_zero_where_a_key_is_visible_and_minus_infinity_elsewhere():
    bias = bias_of(torch.tensor([True, False]))
    assert bias.tolist() == [0.0, -math.inf]
    assert bias.dtype == torch.float32


def test_groups_of_heads_attend_as_torchs_do():
    torch.testing.assert_close(attend(), expected())


def test_a_bias_of_fewer_keys_is_for_the_last_of_them():
    torch.testing.assert_close(attend(visible=VISIBLE[..., -NUM_QUERIES:]), expected())


def test_scores_are_capped_before_keys_are_hidden():
    scores = 2.0 * torch.tanh(QUERY @ KEY[:, :, None].transpose(3, 4) * 0.3 / 2.0)
    weights = scores.masked_fill(~VISIBLE[:, None, None], -math.inf).softmax(-1)
    torch.testing.assert_close(attend(softcap=2.0), weights @ VALUE[:, :, None])


def test_a_sink_of_each_head_takes_weight_and_brings_no_value():
    sinks = draw(6, seed=3)
    scores = (QUERY @ KEY[:, :, None].transpose(3, 4) * 0.3).masked_fill(~VISIBLE[:, None, None], -math.inf)
    total = scores.exp().sum(-1, keepdim=True) + sinks.view(1, 2, 3, 1, 1).exp()
    torch.testing.assert_close(attend(sinks=sinks), scores.exp() / total @ VALUE[:, :, None])


@pytest.mark.parametrize(
    ("dtype", "result"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str
)
def test_only_values_in_bfloat16_give_bfloat16(dtype, result):
    halves = [tensor.to(dtype) for tensor in (QUERY, KEY, VALUE)]
    output = attend(*halves)
    assert output.dtype == result
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(output.float(), expected(*(t.float() for t in halves)), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_lies_in_a_slot_that_no_query_sees_does_not_matter(poison, softcap):
    visible = VISIBLE.clone()
    visible[0, :, 2] = False
    clean = attend(visible=visible, softcap=softcap)
    key, value = KEY.clone(), VALUE.clone()
    key[0, :, 2], value[0, :, 2] = poison, poison
    torch.testing.assert_close(attend(key=key, value=value, visible=visible, softcap=softcap), clean)
    assert key[0, :, 2].isfinite().logical_not().all()


def test_a_visible_nan_reaches_those_that_see_it_and_no_other_sequence():
    value = VALUE.clone()
    value[0, :, 2] = math.nan
    output = attend(value=value)
    assert output[0].isnan().all()
    torch.testing.assert_close(output[1], expected()[1])


def test_arguments_are_left_as_they_were():
    before = [tensor.clone() for tensor in (QUERY, KEY, VALUE)]
    attend(softcap=2.0)
    assert all(torch.equal(old, new) for old, new in zip(before, (QUERY, KEY, VALUE), strict=True))
