"""Which modules keep recurrent state, told by running a model on its own cache."""

from __future__ import annotations

import functools

import pytest
import torch
from recurrent_models import FAMILIES, make_recurrent
from tiny_models import make_tiny
from torch import nn

from paged_backend.model.kept_state import HeldState
from paged_backend.model.layer_probe import Unprovable
from paged_backend.model.state_probe import cache_of, find_mixers, run_with_cache
from paged_backend.model.twin import Twin

IDS = torch.arange(3, 12)


@torch.inference_mode()
def mixers_of(model):
    return find_mixers(model, IDS)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_layer_with_a_state_is_found_with_its_shapes(family):
    model = make_recurrent(family)
    mixers = mixers_of(model)
    assert [len(mixer.specs) for mixer in mixers] == FAMILIES[family]
    assert all(spec.num_bytes > 0 for mixer in mixers for spec in mixer.specs)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_model_of_keys_and_values_alone_has_none(family):
    assert mixers_of(make_tiny(family)) == []


def test_tokens_are_told_from_other_arguments_by_the_length_of_the_pass():
    (mixer, *_) = mixers_of(make_recurrent("recurrent_gemma"))
    assert ("input_states",) in mixer._per_token
    assert ("position_ids",) in mixer._per_token


def test_the_model_is_left_as_it_was_but_for_the_forwards():
    model = make_recurrent("recurrent_gemma")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    mixers = mixers_of(model)
    added = {name: module.__dict__.keys() - before[name].keys() for name, module in model.named_modules()}
    assert set().union(*added.values()) == {"forward"}
    names = {module: name for name, module in model.named_modules()}
    held = [path for mixer in mixers for path in mixer.held]
    assert held
    assert all(path.value is before[names[path.module]][path.name] for path in held)


class Remembering(nn.Module):
    """Keeps a table for good, as some rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(1, 4)
        return x


def test_a_table_that_a_module_keeps_for_good_is_no_state():
    model = make_tiny("llama")
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Remembering())
    assert mixers_of(model) == []


def test_states_in_attributes_are_found_in_the_module_that_runs_them():
    mixers = mixers_of(make_recurrent("recurrent_gemma"))
    assert all(isinstance(mixer._state, HeldState) for mixer in mixers)
    assert all(mixer.name.endswith("temporal_block") for mixer in mixers)


class Between(nn.Module):
    """Gives ``inner`` its cache by a way of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        own = inner.forward
        inner.forward = lambda hidden_states: own(hidden_states, cache=self.given)

    def forward(self, hidden_states, cache=None, **kwargs):
        self.given = cache
        return self.inner(hidden_states)


def test_a_module_that_keeps_state_in_a_cache_that_it_is_not_given_is_refused():
    model = make_recurrent("lfm2")
    layer = model.model.layers[0]
    layer.conv = Between(layer.conv)
    with pytest.raises(Unprovable, match=r"conv.inner keeps state of layers \[0\] in a cache that it is not given"):
        mixers_of(model)


def test_a_forward_that_passes_on_whatever_it_is_given_is_known_by_how_it_is_called():
    model = make_recurrent("lfm2")
    conv = model.model.layers[0].conv
    own = conv.forward
    conv.forward = lambda *args, **kwargs: own(*args, **kwargs)
    assert len(mixers_of(model)) == 2


def test_the_decode_step_is_told_its_position_as_generate_tells_it():
    model = make_tiny("llama")
    seen = []
    model.model.register_forward_pre_hook(lambda m, a, k: seen.append(k["position_ids"]), with_kwargs=True)
    with torch.inference_mode():
        output = run_with_cache(model, IDS[None, :-1])
        run_with_cache(model, IDS[None, -1:], 8, cache_of(output))
    assert seen[0] is None
    assert seen[1].tolist() == [[8]]


def test_a_model_that_cannot_go_on_from_its_own_state_is_refused_with_what_it_said():
    model = make_recurrent("lfm2")
    conv = model.model.layers[0].conv
    own = conv.forward

    @functools.wraps(own)
    def forward(hidden_states, *args, **kwargs):
        if hidden_states.shape[1] == 1:
            raise ValueError("no")
        return own(hidden_states, *args, **kwargs)

    conv.forward = forward
    with pytest.raises(Unprovable, match="it cannot go on from a state of its own: no"):
        mixers_of(model)


def test_attributes_that_flip_in_ordinary_use_make_no_model_stale():
    model = make_recurrent("recurrent_gemma")
    twin = Twin(model)
    model.generate(IDS[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert twin.stale_reason() is None
    model.model.final_norm.eps = 0.5
    assert twin.stale_reason() is not None
