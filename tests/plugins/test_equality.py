"""No policy changes a token: every registered scheduler, eviction policy and block size against stock generate."""

from __future__ import annotations

import pytest
from block_checks import assert_all_blocks_are_back
from clock import Clock
from oracle import assert_greedy, draw_prompts, stock_greedy
from pairwise import pairwise
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.policy.plugin_manager import PluginManager

REGISTRY = PluginManager(load_entry_points=False)
SCHEDULERS = sorted(REGISTRY.names("scheduler"))
EVICTIONS = sorted(REGISTRY.names("eviction"))
BLOCK_SIZES = [4, 16, *sorted(REGISTRY.names("block_size"))]

NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
BYTES_PER_TOKEN = 256
OPTIONS = [
    ("starvation_aware", {"max_overtakes": 1, "predict": "quantile"}),
    ("deadline", {"preempt": True, "shed": True, "share": 0.5}),
    ("priority", {"preempt": True, "aging_s": 0.05}),
    ("fair", {"weights": {"a": 3.0}, "victim": "least_computed"}),
    ("static", {"batch": 2}),
    ("window", {"batch": 3, "window_ms": 30.0}),
    *(("fifo", {"victim": victim}) for victim in ("least_computed", "lowest_priority", "latest_deadline")),
]


@pytest.fixture(scope="module")
def model():
    return make_tiny("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def prompts():
    drawn = draw_prompts((9, 26, 5, 21, 3))
    return [*drawn, drawn[1][:20] + drawn[0], drawn[3][:16] + drawn[2]]


@pytest.fixture(scope="module")
def expected(model, prompts):
    return [stock_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]


def run_under_pressure(model, prompts, **options) -> tuple[Engine, list[list[int]]]:
    """Requests of several clients, classes and deadlines arrive while others run, and memory is short."""
    engine = Engine(
        model, max_num_seqs=3, max_num_batched_tokens=16, clock=Clock(tick=0.001), strict_policies=True, **options
    )
    outputs = []
    arriving = list(enumerate(prompts))
    for count in range(2000):
        if not arriving and not engine.has_unfinished_requests():
            break
        if arriving and count % 3 == 0:
            index, prompt = arriving.pop(0)
            request_id = engine.add_request(
                prompt,
                GREEDY,
                priority=index % 3,
                deadline_s=None if index % 2 else 100.0 - index,
                client_id="abc"[index % 3],
            )
            outputs += engine.outputs(request_id)
        engine.step()
    assert_all_blocks_are_back(engine)
    return engine, [output.token_ids for output in outputs]


@pytest.mark.parametrize(("scheduler", "eviction", "block_size"), pairwise(SCHEDULERS, EVICTIONS, BLOCK_SIZES))
def test_policies_do_not_change_tokens(model, prompts, expected, scheduler, eviction, block_size):
    # Room for the largest block size there is, once, and for one and a half of the longest request.
    num_tokens = 48 if block_size == 4 else 144
    engine, outputs = run_under_pressure(
        model,
        prompts,
        scheduler=scheduler,
        eviction=eviction,
        block_size=block_size,
        kv_cache_memory=num_tokens * BYTES_PER_TOKEN,
    )
    for prompt, tokens, stock in zip(prompts, outputs, expected, strict=True):
        assert_greedy(model, prompt, tokens, stock)
    if block_size == 4:
        assert engine.stats().groups[0].num_evictions > 0


@pytest.mark.parametrize(("scheduler", "options"), OPTIONS, ids=[f"{name}-{options}" for name, options in OPTIONS])
def test_options_of_policies_do_not_change_tokens(model, prompts, expected, scheduler, options):
    _, outputs = run_under_pressure(
        model,
        prompts,
        scheduler=scheduler,
        scheduler_options=options,
        block_size=4,
        kv_cache_memory=48 * BYTES_PER_TOKEN,
    )
    for prompt, tokens, stock in zip(prompts, outputs, expected, strict=True):
        assert_greedy(model, prompt, tokens, stock)


def test_memory_is_short_enough_for_victims_to_be_named(model, prompts):
    engine, _ = run_under_pressure(model, prompts, block_size=4, kv_cache_memory=48 * BYTES_PER_TOKEN)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_prefix_hits > 0
