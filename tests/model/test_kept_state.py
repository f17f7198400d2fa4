"""A module is given a state and gives the next, whether its cache or it itself holds it."""

from __future__ import annotations

import pytest
import torch
from recurrent_models import make_recurrent
from torch import nn

from paged_backend.model.kept_state import POSITIONAL, Attribute, HeldState
from paged_backend.model.state_probe import find_mixers


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = "as it was"

    def forward(self, x, use_cache=False):
        if not use_cache:
            raise RuntimeError("no cache")
        self.count = x if self.count is None else self.count + x
        return self.count * 10


def test_a_held_state_is_set_before_the_call_taken_after_it_and_left_nowhere():
    module = Counter()
    kept = HeldState([Attribute(module, "count")], takes_use_cache=True)
    assert kept.call(module.forward, {"x": torch.tensor(2)}, None) == (20, [2])
    assert kept.call(module.forward, {POSITIONAL: (torch.tensor(2),)}, [torch.tensor(5)]) == (70, [7])
    assert module.count is None


def test_a_call_that_fails_leaves_no_state_in_the_module():
    module = Counter()
    kept = HeldState([Attribute(module, "count")], takes_use_cache=False)
    with pytest.raises(RuntimeError, match="no cache"):
        kept.call(module.forward, {"x": torch.tensor(2)}, [torch.tensor(5)])
    assert module.count is None


@torch.inference_mode()
def test_calls_on_a_cache_do_not_see_each_other():
    (mixer, *_) = find_mixers(make_recurrent("lfm2"), torch.arange(3, 12))
    kept = mixer._state
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    first, (state,) = kept.call(mixer.forward, {"hidden_states": x}, None)
    again, (same,) = kept.call(mixer.forward, {"hidden_states": x}, None)
    assert torch.equal(first, again)
    assert torch.equal(state, same)
    token = x[:, :1]
    zeros, _ = kept.call(mixer.forward, {"hidden_states": token}, [torch.zeros_like(state)])
    going_on, (after,) = kept.call(mixer.forward, {"hidden_states": token}, [state.clone()])
    assert not torch.allclose(zeros, going_on)
    assert after.shape == state.shape
    assert torch.equal(kept.call(mixer.forward, {"hidden_states": x}, None)[0], first)
