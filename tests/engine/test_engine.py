"""The engine through its public door: equality with stock, life of a request, bad input."""

from __future__ import annotations

import copy
import functools
import gc
import math
import pickle
import weakref

import pytest
import torch
from block_checks import assert_all_blocks_are_back
from oracle import assert_greedy, draw_prompts, stock_greedy
from ragged_prompts import GREEDY, LENGTHS, NUM_TOKENS
from tiny_models import make_tiny

from paged_backend import AsyncEngine, Engine, EngineConfig, SamplingParams, SharedEngine, hookimpl
from paged_backend.errors import (
    ConfigError,
    ContextOverflow,
    EngineClosed,
    NotPicklable,
    RequestRefused,
    UnknownPolicy,
)

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gpt2", "opt", "phimoe", "llama4", "deepseek_v2", "gpt_oss"]


@functools.cache
def model_and_tokens(family):
    """A tiny model, and what stock answers to the ragged prompts."""
    model = make_tiny(family)
    return model, [stock_greedy(model, prompt, NUM_TOKENS) for prompt in draw_prompts(LENGTHS)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"batching": "shared"},
        {"batching": "separate", "max_num_batched_tokens": 16, "block_size": 7},
    ],
    ids=["shared", "separate-chunk16-block7"],
)
@pytest.mark.filterwarnings("ignore::paged_backend.model.twin.ExpandedCacheWarning")
def test_every_family_gives_stocks_greedy_tokens(family, options, prompts):
    model, stock = model_and_tokens(family)
    engine = Engine(model, **options)
    for prompt, output, tokens in zip(prompts, engine.generate(prompts, GREEDY), stock, strict=True):
        assert_greedy(model, prompt, output.token_ids, tokens)
        assert output.finish_reason == "length"
    assert_all_blocks_are_back(engine)


def test_requests_added_while_others_run_get_the_same_tokens(llama, prompts, expected):
    engine = Engine(llama, max_num_batched_tokens=16)
    outputs, queue = {}, list(enumerate(prompts))
    while queue or engine.has_unfinished_requests():
        if queue:
            index, prompt = queue.pop(0)
            engine.add_request(prompt, GREEDY, request_id=f"r{index}")
        for output in engine.step():
            outputs[output.request_id] = output.token_ids
    assert [outputs[f"r{index}"] for index in range(len(prompts))] == expected


def test_no_more_than_max_num_seqs_run_at_once(llama, prompts, expected):
    engine = Engine(llama, max_num_seqs=2)
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
    assert engine.stats().peak_running == 2


def test_step_hands_out_the_tokens_it_added(llama, prompts, expected):
    engine = Engine(llama)
    engine.add_request(prompts[0], GREEDY)
    seen = []
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        seen += output.new_token_ids
        assert output.token_ids == seen
    assert seen == expected[0]


def test_end_of_sequence_token_stops_a_request(llama, prompts, expected):
    eos = expected[1][6]
    first = expected[1].index(eos)
    engine = Engine(llama)
    engine.eos_token_ids = frozenset([eos])
    (output,) = engine.generate([prompts[1]], SamplingParams(max_tokens=NUM_TOKENS))
    assert output.token_ids == expected[1][: first + 1]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("where", ["forward", "sample", "commit"])
def test_interrupted_step_loses_nothing(llama, prompts, expected, where, monkeypatch):
    engine = Engine(llama, max_num_batched_tokens=16)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    owner = {"forward": engine.runner, "sample": engine.sampler, "commit": engine.scheduler}[where]
    original, calls = getattr(owner, where), []

    def interrupted(*args):
        calls.append(None)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(owner, where, interrupted)
    outputs, interrupts = {}, 0
    while engine.has_unfinished_requests():
        try:
            outputs.update((output.request_id, output) for output in engine.step())
        except KeyboardInterrupt:
            interrupts += 1
            engine.blocks.check_integrity()
    assert interrupts == 1
    assert [outputs[request_id].token_ids for request_id in ids] == expected


def test_interrupted_generate_aborts_its_own_requests_only(llama, prompts, expected):
    engine = Engine(llama)
    other = engine.add_request(prompts[1], GREEDY)
    sample, calls = engine.sampler.sample, []

    def interrupted(*args):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sample(*args)

    engine.sampler.sample = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompts[0]], GREEDY)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    assert outputs[other].token_ids == expected[1]
    assert_all_blocks_are_back(engine)


def test_hooks_hear_what_happens_in_order(llama):
    events = []

    class Listener:
        @hookimpl
        def engine_started(self, engine):
            events.append("engine_started")

        @hookimpl
        def request_added(self, request):
            events.append(f"request_added {request.request_id}")

        @hookimpl
        def request_finished(self, request, output):
            events.append(f"request_finished {output.finish_reason}")

        @hookimpl
        def step_finished(self, stats):
            events.append(f"step_finished {stats.num_new_tokens}")

        @hookimpl
        def engine_stopped(self, engine):
            events.append("engine_stopped")

    engine = Engine(llama, plugins=[Listener()])
    engine.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.close()
    assert events == [
        "engine_started",
        "request_added 0",
        "step_finished 1",
        "request_finished length",
        "step_finished 1",
        "engine_stopped",
    ]


def test_plugin_can_refuse_a_request_with_its_reason(llama):
    class Doorman:
        @hookimpl
        def admit_request(self, request, stats):
            return "no bananas" if 7 in request.token_ids else None

    engine = Engine(llama, plugins=[Doorman()])
    with pytest.raises(RequestRefused, match="no bananas"):
        engine.add_request([5, 7])
    assert engine.add_request([5, 6])


def test_progress_does_not_change_the_result(llama, prompts, expected, capsys):
    outputs = Engine(llama).generate(prompts, GREEDY, progress=True)
    assert [output.token_ids for output in outputs] == expected
    assert f"{len(prompts)}/{len(prompts)}" in capsys.readouterr().err


# Bad input


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([5, 256], "token id 256 is outside the vocabulary"),
        ([5, -1], "token id -1 is outside"),
        ([5, 1.5], "text or token ids"),
        ([True, False], "text or token ids"),
        (None, "text or token ids"),
        ("text", "needs a tokenizer"),
        (torch.ones(2, 2, dtype=torch.long), "must be 1-D"),
        (torch.ones(3), "must be 1-D with integer"),
    ],
)
def test_prompt_that_is_none_is_refused(llama, prompt, message):
    engine = Engine(llama)
    with pytest.raises(RequestRefused, match=message):
        engine.add_request(prompt)
    assert not engine.has_unfinished_requests()


def test_prompt_and_output_beyond_the_positions_are_refused_with_the_numbers(llama):
    engine = Engine(llama)
    with pytest.raises(ContextOverflow, match="250 tokens and max_tokens=20 come to 270, beyond the 256"):
        engine.add_request([5] * 250, GREEDY)


def test_request_that_can_never_fit_the_cache_is_refused_with_the_numbers(llama):
    engine = Engine(llama, kv_cache_memory=16 * 4 * 768)
    with pytest.raises(ContextOverflow, match=r"need 6 blocks of 16 tokens .* which has 4"):
        engine.add_request([5] * 70, GREEDY)
    assert engine.generate([[5] * 30], GREEDY)[0].finish_reason == "length"


def test_refused_prompt_of_many_leaves_nothing_queued(llama):
    engine = Engine(llama)
    with pytest.raises(RequestRefused, match="prompt 1: the prompt is empty"):
        engine.generate([[5], []], GREEDY)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("name", ["deadline_s", "timeout_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "soon", True])
def test_seconds_must_be_positive_and_finite(llama, name, value):
    with pytest.raises(RequestRefused, match=name):
        Engine(llama).add_request([5], **{name: value})


@pytest.mark.parametrize("params", [{"max_tokenz": 3}, 7, "greedy"])
def test_params_of_the_wrong_kind_are_refused(llama, params):
    with pytest.raises(RequestRefused, match="sampling parameter"):
        Engine(llama).add_request([5], params)


def test_mapping_serves_as_sampling_params(llama, prompts, expected):
    (output,) = Engine(llama).generate([prompts[0]], {"max_tokens": 4, "ignore_eos": True})
    assert output.token_ids == expected[0][:4]


@pytest.mark.parametrize("field", ["scheduler", "eviction", "block_size"])
def test_unknown_policy_lists_the_known_ones(llama, field):
    with pytest.raises(UnknownPolicy, match=f"unknown {field} 'nonsense'; choose one of"):
        Engine(llama, **{field: "nonsense"})


def test_unknown_option_lists_the_known_ones(llama):
    with pytest.raises(ConfigError, match=r"unknown engine option 'block_sise'; choose from .*block_size"):
        Engine(llama, block_sise=16)


def test_max_waiting_refuses_the_next_request(llama):
    engine = Engine(llama, max_waiting=2)
    engine.add_request([5], GREEDY)
    engine.add_request([6], GREEDY)
    with pytest.raises(RequestRefused, match="2 requests wait already"):
        engine.add_request([7], GREEDY)


def test_generate_feeds_a_short_queue_without_being_refused(llama, prompts, expected):
    engine = Engine(llama, max_waiting=1, max_num_seqs=2)
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected


def test_closed_engine_says_so_at_every_call(llama):
    engine = Engine(llama)
    engine.add_request([5], GREEDY)
    engine.close()
    asked = (engine.step, engine.stats, engine.explain_memory)
    for call in (*asked, lambda: engine.add_request([5]), lambda: engine.generate([[5]])):
        with pytest.raises(EngineClosed, match="closed"):
            call()
    engine.close()


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_cannot_be_copied_or_sent_elsewhere_and_says_so(llama, send):
    with Engine(llama) as engine:
        for held in (engine, SharedEngine(engine), AsyncEngine(engine)):
            with pytest.raises(NotPicklable, match="make one in the process that uses it"):
                send(held)


def test_engine_closes_at_the_end_of_a_with_block(llama):
    with Engine(llama) as engine:
        engine.generate([[5]], GREEDY)
    assert engine.is_closed
    with Engine(llama) as engine:
        engine.close()


def test_step_from_inside_a_hook_is_refused_and_harms_nothing(llama, prompts, expected):
    class Meddler:
        @hookimpl
        def step_finished(self, stats):
            engine.step()

    engine = Engine(llama, plugins=[Meddler()])
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
    assert sum(engine.stats().policy_errors.values()) == engine.stats().num_steps


def test_lockstep_of_another_kind_is_refused_and_nothing_is_left(llama):
    engine = Engine(llama)
    with pytest.raises(RequestRefused, match="lockstep must be a Lockstep"):
        engine.add_request([5], GREEDY, lockstep=5)
    assert not engine.has_unfinished_requests()


def test_config_object_and_single_options_combine(llama):
    engine = Engine(llama, config=EngineConfig(block_size=32), max_num_seqs=3)
    assert (engine.blocks.block_size, engine.blocks.num_free_seats) == (32, 3)


# The model


def test_engine_does_not_keep_the_users_model_alive():
    model = make_tiny("llama")
    ref = weakref.ref(model)
    engine = Engine(model)
    del model
    gc.collect()
    assert ref() is None
    assert engine.generate([[5, 6]], GREEDY)[0].finish_reason == "length"


def test_neither_outputs_nor_anything_of_its_own_keep_a_dropped_engine_and_its_cache():
    model = make_tiny("llama")
    engine = Engine(model)
    outputs = engine.generate([[5, 6]], GREEDY)
    gone = [weakref.ref(engine), weakref.ref(engine.runner.kv_cache)]
    gc.collect()
    gc.disable()
    try:
        del engine
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()
    assert outputs[0].text == ""


def test_changed_weights_are_used_by_the_next_request():
    model = make_tiny("llama")
    engine = Engine(model)
    prompt = draw_prompts([20])[0]
    before = engine.generate([prompt], GREEDY)[0].token_ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = engine.generate([prompt], GREEDY)[0]
    assert after.token_ids == stock_greedy(model, prompt, NUM_TOKENS) != before
    assert after.metrics.num_cached_tokens == 0


def test_weights_changed_makes_running_requests_compute_again():
    model = make_tiny("llama")
    engine = Engine(model)
    prompt = draw_prompts([20])[0]
    engine.add_request(prompt, GREEDY)
    engine.step()
    first = engine.step()[0].token_ids[:]
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    engine.weights_changed()
    while engine.has_unfinished_requests():
        output = engine.step()[0]
    rest = stock_greedy(model, prompt + first, NUM_TOKENS - 2)
    assert output.token_ids == first + rest
