"""What callers hand in: each thing that cannot be used is refused by its name, and nothing is left behind."""

from __future__ import annotations

import math
from collections import UserDict

import numpy as np
import pytest
import torch
from tiny_models import make_tiny
from tiny_tokenizers import byte_level_bpe

from paged_backend import AsyncEngine, Engine, SamplingParams, SharedEngine, hookimpl
from paged_backend.errors import ConfigError, ContextOverflow, PluginError, RequestRefused

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


@pytest.fixture
def engine(llama):
    return Engine(llama)


# Prompts


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint8),
        torch.tensor([5, 6, 7], dtype=torch.int32),
        [np.int64(5), np.int64(6), np.int64(7)],
        (5, 6, 7),
        range(5, 8),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_are_taken_from_whatever_holds_integers_in_order(engine, prompt):
    expected = engine.generate([[5, 6, 7]], SHORT)[0].token_ids
    assert [output.token_ids for output in engine.generate(prompt, SHORT)] == [expected]
    (output,) = engine.outputs(engine.add_request(prompt, SHORT))
    assert output.prompt_token_ids == [5, 6, 7]
    assert all(type(token) is int for token in output.prompt_token_ids)


def test_rows_of_an_array_are_prompts(engine):
    rows = [[5, 6, 7], [8, 9, 10]]
    expected = [output.token_ids for output in engine.generate(rows, SHORT)]
    for prompts in (np.array(rows), torch.tensor(rows)):
        assert [output.token_ids for output in engine.generate(prompts, SHORT)] == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.tensor(5), r"must be 1-D with integer token ids, got \(\)"),
        (np.array(5), r"must be 1-D with integer ids, got \(\)"),
        (np.array([5.0]), "must be 1-D with integer ids"),
        ({"input_ids": [5]}, "got a dict; give its input_ids"),
        (UserDict(input_ids=[5]), "got a UserDict; give its input_ids"),
        (b"text", "decode it to a text"),
        (bytearray(b"text"), "decode it to a text"),
        ({5, 6}, "which has no order"),
        ([torch.tensor([5, 6])], "text or token ids"),
        ([torch.tensor(5.5)], "text or token ids"),
        (5, "text or token ids"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(engine, prompt, message):
    with pytest.raises(RequestRefused, match=message):
        engine.add_request(prompt)
    if not isinstance(prompt, list):
        with pytest.raises(RequestRefused, match=f"{message}|sequences of token ids"):
            engine.generate(prompt)
    assert not engine.has_unfinished_requests()


# Options of a request

BAD_OPTIONS = [
    ("priority", "high", "must be an int"),
    ("priority", True, "must be an int"),
    ("priority", 1.5, "must be an int"),
    ("priority", 10**400, "must be an int"),
    ("priority", None, "must be an int"),
    ("request_id", 5, "must be a text"),
    ("request_id", ["a"], "must be a text"),
    ("request_id", "", "must not be empty; leave it out"),
    ("client_id", {}, "must be a text"),
    ("cache_salt", 3, "must be a text"),
    ("stop_condition", 5, "must be called with a Request"),
    ("deadline_s", 10**400, "must be a positive number of seconds"),
    ("timeout_s", math.nan, "must be a positive number of seconds"),
    ("queue_timeout_s", -1, "must be a positive number of seconds"),
    ("lockstep", 5, "must be a Lockstep"),
    ("prompt_embeds", 5, "must be a tensor of floats"),
    ("priorty", 5, "choose from request_id, priority"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_OPTIONS, ids=lambda value: f"{value!r:.12}")
def test_an_option_that_cannot_be_used_is_refused_by_name_and_no_policy_is_blamed(llama, name, value, message):
    engine = Engine(llama, scheduler="priority")
    other = engine.add_request([5, 6], SHORT)
    for call in (engine.add_request, engine.generate, engine.prepare):
        with pytest.raises(RequestRefused, match=f"{name}.* {message}"):
            call([7, 8], **{name: value})
    assert engine.stats().num_waiting == 1
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == (other, "length")
    assert engine.stats().policy_errors == {}


def test_a_smaller_priority_goes_first_under_that_policy(llama):
    engine = Engine(llama, scheduler="priority", max_num_seqs=1)
    ids = [engine.add_request([5, 6], SHORT, priority=priority) for priority in (1, 2, np.int64(-1))]
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == [ids[2], ids[0], ids[1]]


@pytest.mark.parametrize("request_id", [[1], 5, None])
def test_an_id_that_is_no_text_is_refused_when_asked_about(engine, request_id):
    engine.add_request([5], SHORT)
    for call in (engine.abort, engine.outputs):
        with pytest.raises(RequestRefused, match="request_id must be a text"):
            call(request_id)
    assert engine.has_unfinished_requests()


def test_a_salt_that_is_no_text_is_refused_for_pins_too(engine):
    for call in (engine.pin_prefix, engine.unpin_prefix):
        with pytest.raises(RequestRefused, match=r"cache_salt must be a text, got \[1\]"):
            call([5] * 32, cache_salt=[1])
    assert engine.blocks.pools[0].num_pinned == 0


def test_a_number_that_a_caller_took_as_a_name_is_not_given_again(engine):
    assert engine.add_request([5], SHORT, request_id="1") == "1"
    ids = [engine.add_request([5], SHORT) for _ in range(3)]
    assert len({"1", *ids}) == 4
    assert all(len(engine.outputs(request_id)) == 1 for request_id in ids)


def test_several_prompts_cannot_share_an_id(engine):
    with pytest.raises(RequestRefused, match="2 prompts cannot share request_id='a'"):
        engine.generate([[5], [6]], SHORT, request_id="a")
    assert engine.generate([[5]], SHORT, request_id="a")[0].request_id == "a"
    assert not engine.has_unfinished_requests()


# How many tokens

SMALL = {"kv_cache_memory": 4 * 16 * 768}


def test_without_params_a_request_asks_for_what_the_cache_leaves(llama):
    engine = Engine(llama, **SMALL)
    (output,) = engine.outputs(engine.add_request([5] * 40))
    while engine.has_unfinished_requests():
        engine.step()
    assert len(output.token_ids) == 4 * 16 - 40
    with pytest.raises(ContextOverflow, match="can never fit"):
        engine.add_request([5] * 64)


def test_params_that_ask_for_more_than_the_cache_holds_are_refused(llama):
    engine = Engine(llama, max_model_len=200, **SMALL)
    with pytest.raises(ContextOverflow, match=r"max_tokens=256 .* beyond the 200 positions .*\(max_new_tokens"):
        engine.add_request([5] * 40, SamplingParams())
    with pytest.raises(ContextOverflow, match=r"max_tokens=100 can never fit.*\(max_new_tokens .*kv_cache_memory"):
        engine.add_request([5] * 40, SamplingParams(max_tokens=100))


# An engine


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "got None"),
        (5, "got 5"),
        ("gpt2", r"Engine.from_pretrained\('gpt2'\)"),
        (torch.zeros(3), "transformers model is wanted"),
    ],
)
def test_what_is_no_model_is_refused_with_the_way_to_get_one(model, message):
    with pytest.raises(ConfigError, match=message):
        Engine(model)


def test_from_pretrained_wants_a_name(llama):
    with pytest.raises(ConfigError, match=r"see Engine\(model\)"):
        Engine.from_pretrained(llama)


@pytest.mark.parametrize("tokenizer", [5, "gpt2", byte_level_bpe])
def test_what_is_no_tokenizer_is_refused(llama, tokenizer):
    with pytest.raises(ConfigError, match="tokenizer or None is wanted"):
        Engine(llama, tokenizer)


@pytest.mark.parametrize("plugins", [5, "name", {"a": 1}, None])
def test_plugins_come_in_a_sequence(llama, plugins):
    with pytest.raises(ConfigError, match=r"plugins must be a sequence .* \[plugin\]"):
        Engine(llama, plugins=plugins)


@pytest.mark.parametrize("plugin", [5, None, "name", object()], ids=lambda plugin: type(plugin).__name__)
def test_a_plugin_without_hooks_is_refused(llama, plugin):
    with pytest.raises(PluginError, match="has no hooks"):
        Engine(llama, plugins=[plugin])


def test_a_clock_that_cannot_be_read_is_refused(llama):
    with pytest.raises(ConfigError, match="clock must be a function that returns seconds, got 5"):
        Engine(llama, clock=5)


@pytest.mark.parametrize("kind", [AsyncEngine, SharedEngine])
def test_a_model_in_place_of_an_engine_is_refused_with_the_fix(llama, kind):
    with pytest.raises(ConfigError, match=r"got a LlamaForCausalLM; make one with Engine\(model, tokenizer\)"):
        kind(llama)


def test_triton_without_a_gpu_is_refused_before_the_model_is_blamed(llama):
    with pytest.raises(ConfigError, match=r"attention_backend='triton' cannot run .* on cpu: it runs on CUDA"):
        Engine(llama, attention_backend="triton")


def test_a_refusal_by_a_plugin_reaches_nobody_else(llama):
    class Doorman:
        @hookimpl
        def admit_request(self, request, stats):
            return "full" if request.client_id == "b" else None

    engine = Engine(llama, plugins=[Doorman()])
    kept = engine.add_request([5], SHORT, client_id="a")
    with pytest.raises(RequestRefused, match="full"):
        engine.add_request([5], SHORT, client_id="b")
    assert [output.request_id for output in engine.step()] == [kept]


def test_a_misspelt_sampling_parameter_is_named_with_those_there_are(llama):
    with Engine(llama) as engine, pytest.raises(RequestRefused, match="unknown sampling parameter 'max_token'; choose"):
        engine.add_request([5], {"max_token": 3})


def test_the_end_of_positions_where_rope_changes_is_told_with_its_reason():
    model = make_tiny("phi3_longrope")
    with Engine(model) as engine, pytest.raises(ContextOverflow, match=r"32 positions .* changes its frequencies"):
        engine.add_request([5] * 40)
    with pytest.raises(ConfigError, match=r"32 positions .* changes its frequencies"):
        Engine(model, max_model_len=256)


def test_a_request_that_fits_no_more_when_it_is_queued_is_refused_with_the_numbers(llama):
    # 4 blocks of 16 tokens.
    engine = Engine(llama, kv_cache_memory=60_000)
    request = engine.prepare([5] * 30, SamplingParams(max_tokens=30))
    engine.pin_prefix([6] * 16)
    with pytest.raises(ContextOverflow, match=r"60 tokens need 4 blocks .* which has 4, 1 of them pinned"):
        engine.enqueue(request)
    assert not engine.has_unfinished_requests()
    engine.unpin_prefix([6] * 16)
    engine.enqueue(request)
    assert engine.has_unfinished_requests()


@pytest.mark.parametrize("computed_before", [0, 20, 40])
def test_a_request_that_begins_with_a_pinned_prefix_has_its_blocks_as_room(llama, computed_before):
    # 4 blocks of 16 tokens.
    engine = Engine(llama, kv_cache_memory=60_000, max_num_batched_tokens=20)
    engine.pin_prefix([6] * 32)
    if computed_before:
        engine.add_request([6] * computed_before, SamplingParams(max_tokens=1), request_id="before")
        for _ in range(computed_before // 20):
            engine.step()
        engine.abort("before")
    assert len(engine.generate([[6] * 33], SamplingParams(max_tokens=31))[0].token_ids) == 31
    assert len(engine.generate([[6] * 33])[0].token_ids) == 31
    engine.enqueue(engine.prepare([6] * 33, SamplingParams(max_tokens=31)))
    with pytest.raises(ContextOverflow, match="which has 4, 2 of them pinned"):
        engine.generate([[7] * 33], SamplingParams(max_tokens=31))
