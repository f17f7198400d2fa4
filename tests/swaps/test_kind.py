"""How a proposal in a module's place is tried: on what calls, and how far off its results may be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paged_backend.swaps.kind import ModuleCall, SwapKind, Trial, first_tensor
from paged_backend.swaps.weights import NoMatch, Packing


class Anything(SwapKind):
    def wants(self, module):
        return True

    def propose(self, module, call):
        return iter(())


@pytest.mark.parametrize(
    "args", [(), (torch.zeros(2), torch.zeros(2)), ("text",), (torch.zeros(2, dtype=torch.int64),)], ids=repr
)
def test_only_calls_with_one_tensor_of_floats_are_known(args):
    with pytest.raises(NoMatch, match="one tensor and keywords"):
        ModuleCall.of(args, {}, None)


def test_drawn_numbers_are_small_and_always_the_same():
    call = ModuleCall.of((torch.ones(6, 64, dtype=torch.bfloat16),), {}, None)
    drawn = call.drawn()
    assert (drawn.shape, drawn.dtype) == (call.x.shape, torch.bfloat16)
    assert torch.equal(drawn, call.drawn())
    assert drawn.abs().max() < 0.3


def test_a_trial_asks_for_what_the_module_itself_computes():
    module = nn.Linear(4, 3)
    call = ModuleCall.of((torch.ones(5, 4),), {}, None)
    (trial,) = Anything(Packing(packs=False)).trials(module, call)
    assert torch.equal(trial.expected, module(call.drawn()))
    assert trial.distance(module) == 0


def test_a_call_with_keywords_is_refused_by_their_names():
    call = ModuleCall.of((torch.ones(5, 4),), {"scale": 2.0, "mode": 1}, None)
    with pytest.raises(NoMatch, match="called with keywords: scale, mode"):
        Anything(Packing(packs=False)).trials(nn.Linear(4, 3), call)


def test_distances_are_shares_of_what_is_added_and_one_bad_row_counts_a_fifth():
    expected = torch.ones(9, 16)
    trial = Trial(expected, {}, expected)
    assert trial.distance_of(expected * 1.1) == pytest.approx(0.1)
    one_row = expected.clone()
    one_row[4] *= 2
    assert trial.distance_of(one_row) == pytest.approx(0.2)
    base = Trial(expected, {}, expected, base=expected * 0.9)
    assert base.distance_of(expected * 1.1) == pytest.approx(1.0)
    lenient = Trial(expected, {}, expected, leniency=4)
    assert lenient.distance_of(expected * 1.1) == pytest.approx(0.025)


def test_of_a_tuple_the_first_tensor_counts():
    tensor = torch.ones(2)
    assert first_tensor(tensor) is tensor
    assert first_tensor((tensor, None)) is tensor
