"""Which weights can be packed, and what is said of others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from paged_backend.swaps.weights import NoMatch, Packing, child_of, joined, num_parameters, weight_of


class Wider(nn.Linear):
    pass


@pytest.mark.parametrize("module", [nn.Linear(4, 3), Conv1D(3, 4), nn.Linear(4, 3, bias=False)], ids=repr)
def test_weight_and_bias_of_a_plain_layer_compute_what_it_does(module):
    x = torch.randn(5, 4)
    weight, bias = weight_of(module)
    assert weight.shape == (3, 4)
    torch.testing.assert_close(nn.functional.linear(x, weight, bias), module(x))


@pytest.mark.parametrize("module", [Wider(4, 3), nn.Embedding(4, 3)], ids=repr)
def test_what_may_compute_something_else_is_no_plain_layer(module):
    with pytest.raises(NoMatch, match=f"a {type(module).__name__} is no plain linear layer"):
        weight_of(module)


def test_biases_are_joined_with_zeros_where_a_weight_has_none():
    weights = torch.ones(2, 4), torch.ones(3, 4)
    assert joined(weights, (None, None)) is None
    joint = joined(weights, (None, torch.tensor([1.0, 2.0, 3.0])))
    assert joint is not None
    assert joint.tolist() == [0, 0, 1, 2, 3]


def test_a_child_that_is_not_there_is_told_by_name():
    module = nn.Sequential(nn.Linear(4, 3))
    assert child_of(module, "0") is module[0]
    with pytest.raises(NoMatch, match="a Sequential has no gate_proj"):
        child_of(module, "gate_proj")


def test_parameters_are_counted_of_a_module_or_of_some_children():
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    assert num_parameters(module) == 15 + 6
    assert num_parameters(module, "1", "nothing") == 6


@pytest.mark.parametrize("pack", ["pack", "pack_gated"])
def test_nothing_is_packed_where_no_memory_is_to_be_taken(pack):
    packing, weight = Packing(packs=False), torch.ones(16, 8)
    arguments = ((weight, None),) if pack == "pack" else (weight, weight, None, None)
    with pytest.raises(NoMatch, match="would take memory"):
        getattr(packing, pack)(*arguments)
