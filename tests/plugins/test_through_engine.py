"""Policies at work in an engine: holding back, giving up, several samples, pinned prefixes."""

from __future__ import annotations

import pytest
from clock import Clock
from oracle import draw_prompts
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.errors import ConfigError, ContextOverflow, RequestRefused
from paged_backend.policy.plugin_manager import PluginManager

SCHEDULERS = sorted(PluginManager(load_entry_points=False).names("scheduler"))
BYTES_PER_TOKEN = 256


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def model():
    return make_tiny("llama", num_hidden_layers=1)


def finish(engine: Engine) -> None:
    while engine.has_unfinished_requests():
        engine.step(drain=True)
    engine.blocks.check_integrity()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_generate_ends_although_the_clock_stands_still(model, scheduler):
    engine = Engine(model, scheduler=scheduler, clock=Clock(), strict_policies=True)
    outputs = engine.generate(draw_prompts((4, 9, 2)), greedy(3), deadline_s=5.0)
    assert [len(output.token_ids) for output in outputs] == [3, 3, 3]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_several_samples_of_a_request_come_out_under_every_scheduler(model, scheduler):
    options = {"batch": 2} if scheduler in ("static", "window") else {}
    engine = Engine(
        model,
        scheduler=scheduler,
        scheduler_options=options,
        block_size=4,
        kv_cache_memory=60 * BYTES_PER_TOKEN,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        strict_policies=True,
    )
    outputs = engine.generate(draw_prompts((20, 9, 14)), greedy(9, n=2))
    first, second = outputs[::2], outputs[1::2]
    assert [output.token_ids for output in first] == [output.token_ids for output in second]
    engine.blocks.check_integrity()


def test_held_requests_say_when_to_come_back(model):
    clock = Clock()
    engine = Engine(model, scheduler="window", scheduler_options={"batch": 4, "window_ms": 1000}, clock=clock)
    engine.add_request([5, 6, 7], greedy(2))
    assert engine.held_until is None
    assert engine.step() == []
    assert engine.held_until == 1.0
    engine.add_request([5, 6, 8], greedy(2), timeout_s=0.5)
    engine.step()
    assert engine.held_until == 0.5
    clock.now = 1.0
    assert {output.finish_reason for output in engine.step()} == {"timeout", None}
    assert engine.held_until is None
    finish(engine)


def test_what_cannot_make_its_deadline_ends_with_timeout(model):
    clock = Clock()
    engine = Engine(
        model, scheduler="deadline", scheduler_options={"shed": True}, clock=clock, max_num_seqs=1, strict_policies=True
    )
    step = engine.runner.forward

    def forward(batch):
        clock.now += 0.1
        return step(batch)

    engine.runner.forward = forward
    running = engine.outputs(engine.add_request([5, 6, 7], greedy(20)))[0]
    for _ in range(3):
        engine.step()
    lost = engine.outputs(engine.add_request([5, 6, 8], greedy(30), deadline_s=1.0))[0]
    late = engine.outputs(engine.add_request([5, 6, 9], greedy(3), deadline_s=1.0))[0]
    good = engine.outputs(engine.add_request([5, 6, 9], greedy(3), deadline_s=9.0))[0]
    engine.step()
    assert lost.finish_reason == "timeout"
    finish(engine)
    assert (running.finish_reason, late.finish_reason, good.finish_reason) == ("length", "timeout", "length")
    assert late.metrics.finished_time < 1.5


def test_an_urgent_request_answers_soon_although_all_seats_are_taken(model):
    engine = Engine(
        model, scheduler="priority", scheduler_options={"preempt": True}, max_num_seqs=2, strict_policies=True
    )
    for prompt in draw_prompts((9, 14)):
        engine.add_request(prompt, greedy(100), priority=3)
    for _ in range(5):
        engine.step()
    engine.add_request([5, 6, 7], greedy(4), priority=0, request_id="urgent")
    assert "urgent" in {output.request_id for output in engine.step()}
    finish(engine)


# Pinned prefixes


def pinned_engine(model, **options) -> Engine:
    return Engine(model, block_size=4, kv_cache_memory=40 * BYTES_PER_TOKEN, clock=Clock(), **options)


def cached_tokens(engine: Engine, prompt: list[int]) -> int:
    output = engine.outputs(engine.add_request([*prompt, 250], greedy(1)))[0]
    finish(engine)
    return output.metrics.num_cached_tokens


@pytest.mark.parametrize("eviction", sorted(PluginManager(load_entry_points=False).names("eviction")))
def test_pinned_prefix_survives_ten_times_the_cache(model, eviction):
    engine = pinned_engine(model, eviction=eviction, strict_policies=True)
    system = draw_prompts((17,), seed=7)[0]
    assert engine.pin_prefix(system) == 16
    cached_tokens(engine, system)
    for seed in range(20):
        engine.generate(draw_prompts((18,), seed=100 + seed), greedy(2))
    assert cached_tokens(engine, system) == 16
    assert engine.blocks.pools[0].num_available == 6
    assert engine.unpin_prefix(system)
    assert not engine.unpin_prefix(system)
    assert engine.blocks.pools[0].num_available == 10


def test_what_is_no_longer_pinned_is_dropped_like_the_rest(model):
    engine = pinned_engine(model)
    system = draw_prompts((17,), seed=7)[0]
    engine.pin_prefix(system)
    cached_tokens(engine, system)
    engine.unpin_prefix(system)
    for seed in range(20):
        engine.generate(draw_prompts((18,), seed=200 + seed), greedy(2))
    assert cached_tokens(engine, system) == 0


def test_pinned_prefixes_never_keep_a_request_from_running(model):
    engine = pinned_engine(model)
    for seed in (1, 2):
        engine.pin_prefix(draw_prompts((8,), seed=seed)[0])
        cached_tokens(engine, draw_prompts((8,), seed=seed)[0])
    with pytest.raises(ContextOverflow, match=r"4 of them pinned \(see unpin_prefix\)"):
        engine.add_request(draw_prompts((20,), seed=9)[0], greedy(5))
    output = engine.generate(draw_prompts((20,), seed=9), greedy(4))[0]
    assert output.finish_reason == "length"


def test_pinned_prefixes_share_half_of_the_cache_at_most(model):
    engine = pinned_engine(model)
    engine.pin_prefix(draw_prompts((16,), seed=1)[0])
    with pytest.raises(RequestRefused, match="at most 5 of its 10"):
        engine.pin_prefix(draw_prompts((8,), seed=2)[0])
    engine.pin_prefix(draw_prompts((4,), seed=3)[0])


def test_nothing_is_pinned_that_a_waiting_request_needs(model):
    engine = pinned_engine(model)
    engine.add_request(draw_prompts((30,), seed=9)[0], greedy(6))
    with pytest.raises(RequestRefused, match="unfinished request"):
        engine.pin_prefix(draw_prompts((8,), seed=1)[0])
    finish(engine)
    engine.pin_prefix(draw_prompts((8,), seed=1)[0])


def test_pins_are_kept_when_the_weights_change(model):
    engine = pinned_engine(model)
    system = draw_prompts((8,), seed=7)[0]
    engine.pin_prefix(system)
    engine.weights_changed()
    assert cached_tokens(engine, system) == 0
    for seed in range(10):
        engine.generate(draw_prompts((18,), seed=100 + seed), greedy(2))
    assert cached_tokens(engine, system) == 8


def test_salts_pin_apart(model):
    engine = pinned_engine(model)
    system = draw_prompts((8,), seed=7)[0]
    engine.pin_prefix(system, cache_salt="ann")
    assert not engine.unpin_prefix(system)
    assert engine.unpin_prefix(system, cache_salt="ann")


def test_pinning_what_cannot_be_pinned_says_why(model):
    with pytest.raises(RequestRefused, match="fills no block"):
        pinned_engine(model).pin_prefix([5, 6, 7])
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        pinned_engine(model, enable_prefix_caching=False).pin_prefix([5] * 8)
    with pytest.raises(ConfigError, match="fixed size"):
        Engine(model, elastic=True).pin_prefix([5] * 8)
