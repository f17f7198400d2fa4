"""What an engine counts of its steps and its memory adds up."""

from __future__ import annotations

import random

import pytest
import torch
from clock import Clock
from model_free import ModelFree
from oracle import draw_prompts
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.engine.stats_recorder import MemoryOverTime, StatsRecorder
from paged_backend.plugins.fifo import Fifo

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


@pytest.fixture(scope="module")
def prompts():
    return draw_prompts((5, 23, 9, 1, 14, 40, 33))


def test_waste_and_reservation_stay_small_on_mixed_lengths(llama):
    model = make_tiny("llama", max_position_embeddings=1100)
    rng = random.Random(0)
    totals = [rng.randint(64, 1024) for _ in range(32)]
    prompts = draw_prompts([total // 2 for total in totals])
    params = [SamplingParams(max_tokens=total - total // 2, ignore_eos=True) for total in totals]
    engine = Engine(model, block_size=16, elastic=True, clock=Clock(tick=1.0), enable_prefix_caching=False)
    # Only the books matter here, and they do not depend on what the tokens are.
    engine.runner.forward = lambda batch: torch.zeros(batch.logits_rows.numel(), engine.twin.vocab_size)
    engine.generate(prompts, params)
    stats = engine.stats()
    per_token = stats.groups[0].bytes_per_token
    assert 0 < stats.waste < 0.04
    # Preallocation reserves every request the longest length; so does a padded batch, by its end.
    assert stats.peak_allocated_bytes <= 0.6 * 32 * max(totals) * per_token


def test_accounts_add_up_at_every_step(llama):
    engine = Engine(llama, block_size=4, max_num_batched_tokens=16)
    for prompt in draw_prompts([5, 23, 40]):
        engine.add_request(prompt, GREEDY)
    engine.add_request([7] * 9, SamplingParams(max_tokens=9, n=3, temperature=1.0, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        (group,) = engine.stats().groups
        assert group.num_owned_blocks + group.num_cached_blocks + group.num_free_blocks == group.num_blocks
        computed = sum(request.num_computed_tokens for request in engine.scheduler.running)
        # Forks share the two full blocks of their prompt, so filled slots may be fewer than computed tokens.
        assert computed - 2 * 8 - 2 <= group.num_filled_slots <= computed
        assert 0 <= group.num_wasted_slots <= 4 * len(engine.scheduler.running)


def test_prompt_tokens_are_counted_once_each_whatever_is_cached_or_computed_again(llama, prompts):
    with Engine(llama) as engine:
        for _ in range(2):
            engine.generate(prompts, GREEDY)
        stats = engine.stats()
        assert stats.num_prompt_tokens == 2 * sum(map(len, prompts))
        assert stats.num_cached_tokens > 0
        assert stats.num_prefill_tokens == stats.num_prompt_tokens - stats.num_cached_tokens
    # Of the two, which come to 4 blocks each, one has to give way.
    memory = 5 * 16 * sum(group.bytes_per_token for group in stats.groups)
    with Engine(llama, kv_cache_memory=memory, enable_prefix_caching=False) as engine:
        outputs = engine.generate([[5] * 20, [6] * 20], SamplingParams(max_tokens=30, ignore_eos=True))
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert engine.stats().num_prompt_tokens == 40
        assert engine.stats().num_prefill_tokens > 40


# Without a model


def test_means_are_weighted_by_the_time_for_which_each_value_held():
    memory = MemoryOverTime()
    assert memory.mean(0) == 0.0
    memory.record(1.0, 10, 8, 0)
    assert memory.mean(0) == 0.0
    memory.record(2.0, 40, 20, 4)
    memory.record(5.0, 0, 0, 0)
    assert [memory.mean(index) for index in range(3)] == [(10 + 40 * 3) / 4, (8 + 20 * 3) / 4, 4 * 3 / 4]
    assert memory.peak == 40


def test_steps_add_up_to_what_the_snapshot_tells():
    engine, recorder = ModelFree(Fifo(), budget=6), StatsRecorder()
    requests = [engine.add(8, 2), engine.add(3, 3)]
    steps = []
    while engine.scheduler.has_work():
        step = engine.scheduler.schedule(engine.now)
        num_prefill_tokens, num_new_prompt_tokens = step.num_prefill_tokens, step.num_new_prompt_tokens
        rows = step.sampling
        engine.now += 1.0
        engine.scheduler.commit(step, engine.now)
        for request in rows:
            request.append_token(9)
            request.output.new_token_ids = [9]
            if request.num_output_tokens == request.params.max_tokens:
                engine.scheduler.finish(request, "length", engine.now)
        outputs = [request.output for request in rows]
        laps = {"forward": 0.5, "sample": 0.25}
        steps.append(
            recorder.record_step(
                engine.scheduler, step, outputs, num_prefill_tokens, num_new_prompt_tokens, laps, engine.now
            )
        )
    assert [step.num_prefill_tokens for step in steps] == [6, 5, 0, 0]
    assert [step.num_new_tokens for step in steps] == [0, 2, 2, 1]
    assert [step.num_finished for step in steps] == [0, 0, 1, 1]
    assert [step.num_running for step in steps] == [1, 2, 1, 0]
    assert [step.num_decodes for step in steps] == [0, 0, 2, 1]
    assert [step.overhead_s for step in steps] == [0.25] * 4
    stats = recorder.snapshot(engine.scheduler, 1000, {"mine.add": 2})
    assert (stats.num_steps, stats.num_finished, stats.num_generated_tokens) == (4, len(requests), 5)
    assert (stats.num_prompt_tokens, stats.num_prefill_tokens, stats.peak_running) == (11, 11, 2)
    assert (stats.reserved_bytes, stats.policy_errors) == (1000, {"mine.add": 2})
    (group,) = stats.groups
    assert group.num_owned_blocks == 0
    assert group.num_cached_blocks + group.num_free_blocks == group.num_blocks
    assert stats.peak_allocated_bytes == group.peak_allocated_slots * group.bytes_per_token > 0
    assert stats.waste == pytest.approx(1 - group.mean_filled_slots / group.mean_allocated_slots)


def test_before_the_first_step_there_is_no_mean_and_no_waste():
    stats = StatsRecorder().snapshot(ModelFree(Fifo()).scheduler, 0, {})
    assert (stats.waste, stats.groups[0].mean_allocated_slots, stats.groups[0].num_free_blocks) == (0.0, 0.0, 64)
