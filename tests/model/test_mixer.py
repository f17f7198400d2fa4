"""A mixer gives each sequence of a batch its own state."""

from __future__ import annotations

import inspect

import pytest
import torch
from recurrent_models import make_recurrent
from torch import nn

from paged_backend.memory.kv_cache import KVCache
from paged_backend.memory.state_cache import StateCache, StateSpec
from paged_backend.memory.state_slots import NO_SLOT, Span
from paged_backend.model.batch import Batch
from paged_backend.model.kept_state import POSITIONAL, Attribute, HeldState
from paged_backend.model.mixer import NATIVE, STEPPED, Mixer, StateContext, named_arguments, shapes_of
from paged_backend.model.runner import ModelRunner
from paged_backend.model.state_spans import StateSpans
from paged_backend.model.twin import Twin


class RunningSum(nn.Module):
    """Adds up what it is given, ``[B, T, D]``, in an attribute; ``calls`` are the shapes that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.total = None
        self.calls: list[tuple[int, ...]] = []

    def forward(self, x, scale=1.0, pair=None):
        self.calls.append(tuple(x.shape))
        before = 0 if self.total is None else self.total[:, None]
        sums = scale * x.cumsum(1) + before
        self.total = sums[:, -1].clone()
        return sums, pair


@pytest.fixture
def mixer():
    module = RunningSum()
    state = HeldState([Attribute(module, "total")], takes_use_cache=False)
    spec = StateSpec("sum 0", (2,), torch.float32, torch.device("cpu"))
    return Mixer("sum", module, state, [spec], 0, frozenset({("x",), ("pair", 0)}))


def run(mixer: Mixer, cache: StateCache, x: torch.Tensor, spans: StateSpans, num_decodes: int, **kwargs):
    none = torch.zeros(0, dtype=torch.int64)
    batch = Batch(none, none, none, none, none, (), num_decodes, 0, 0, 0, spans=spans)
    mixer.context = StateContext(batch, cache)
    try:
        return mixer(x, **kwargs)
    finally:
        mixer.context = None


def make_cache(mixer: Mixer) -> StateCache:
    cache = StateCache(mixer.specs)
    cache.grow(8)
    cache.pools[0].fill_(torch.nan)
    return cache


def test_each_part_of_a_pack_goes_on_from_its_own_state(mixer):
    cache = make_cache(mixer)
    cache.pools[0][0], cache.pools[0][1], cache.pools[0][2] = 10.0, 20.0, 30.0
    spans = StateSpans.of(
        [Span(4, 5, 0, 3), Span(7, 8, 1, 4)], [[Span(0, 2, NO_SLOT, 5), Span(2, 4, 5, 6)], [Span(3, 5, 2, 7)]]
    )
    x = torch.arange(1.0, 9.0)[None, :, None].expand(1, 8, 2)
    sums, _ = run(mixer, cache, x, spans, 2)
    assert sums[0, :, 0].tolist() == [11, 22, 3, 7, 12, 18, 37, 45]
    assert cache.pools[0][3:, 0].tolist() == [11, 22, 7, 18, 45]
    assert cache.pools[0][:3, 0].tolist() == [10, 20, 30]
    assert mixer.forward.__self__.calls == [(2, 1, 2), (1, 2, 2), (1, 2, 2), (1, 2, 2)]


def test_stepped_chunks_go_on_token_by_token_but_begin_at_once(mixer):
    cache = make_cache(mixer)
    mixer.mode = STEPPED
    spans = StateSpans.of([], [[Span(0, 3, NO_SLOT, 0)], [Span(3, 6, 1, 2)]])
    cache.pools[0][1] = 100.0
    sums, _ = run(mixer, cache, torch.ones(1, 6, 2), spans, 0)
    assert sums[0, :, 0].tolist() == [1, 2, 3, 101, 102, 103]
    assert mixer.forward.__self__.calls == [(1, 3, 2)] + 3 * [(1, 1, 2)]
    assert cache.pools[0][1:3, 0].tolist() == [100, 103]


def test_arguments_without_a_row_per_token_go_to_every_part_as_they_are(mixer):
    cache = make_cache(mixer)
    spans = StateSpans.of([], [[Span(0, 2, NO_SLOT, 0)], [Span(0, 2, NO_SLOT, 1)]])
    pair = (torch.arange(4.0)[None, :, None], torch.zeros(1, 4))
    sums, _ = run(mixer, cache, torch.ones(1, 4, 2), spans, 0, scale=2.0, pair=pair)
    assert sums[0, :, 0].tolist() == [2, 4, 2, 4]


def test_outside_a_step_the_module_runs_as_it_was_called(mixer):
    sums, _ = mixer(torch.ones(3, 4, 2))
    assert sums.shape == (3, 4, 2)


def test_a_second_run_in_one_pass_is_an_error(mixer):
    cache = make_cache(mixer)
    batch = Batch(*5 * [torch.zeros(0)], (), 0, 0, 0, 0, spans=StateSpans.of([], [[Span(0, 1, NO_SLOT, 0)]]))
    mixer.context = StateContext(batch, cache)
    mixer(torch.ones(1, 1, 2))
    with pytest.raises(RuntimeError, match="sum runs more than once a forward pass, with one state"):
        mixer(torch.ones(1, 1, 2))


def test_a_batch_that_says_nothing_of_states_is_an_error():
    twin = Twin(make_recurrent("mamba2"))
    runner = ModelRunner(twin, KVCache([], [], [], 4))
    ids = torch.tensor([5, 6])
    batch = Batch(ids, ids, ids.int(), torch.tensor([0, 2]).int(), torch.tensor([1]), (), 0, 2, 0, 2)
    with pytest.raises(RuntimeError, match="keeps state, and the batch does not say where"):
        runner.forward(batch)


def test_arguments_are_named_and_their_tensors_found_where_they_are():
    def forward(x, y=None, **kwargs):
        return x

    arguments = named_arguments(inspect.signature(forward), (torch.zeros(1, 2),), {"z": {"a": [torch.zeros(3)]}})
    assert shapes_of(arguments) == {("x",): (1, 2), ("z", "a", 0): (3,)}


def test_arguments_of_no_name_are_kept_in_their_order():
    arguments = named_arguments(inspect.signature(lambda *args, **kwargs: None), (1, 2), {"a": 3})
    assert arguments == {POSITIONAL: (1, 2), "a": 3}


def test_the_way_is_native_until_the_proof_says_otherwise():
    assert Twin(make_recurrent("lfm2")).state_mode == NATIVE
