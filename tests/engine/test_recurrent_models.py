"""Models that keep recurrent state get stock's tokens, whatever happens to their requests."""

from __future__ import annotations

import pytest
import torch
from block_checks import assert_all_blocks_are_back
from oracle import assert_greedy, draw_prompts, stock_greedy
from recurrent_models import FAMILIES, STEPPED, make_recurrent
from torch import nn

from paged_backend import Engine, SamplingParams, hookimpl
from paged_backend.errors import ConfigError, RequestRefused, UnsupportedModel
from paged_backend.memory.state_cache import StateCache

pytestmark = pytest.mark.filterwarnings("ignore::paged_backend.model.twin.ExpandedCacheWarning")

# The longest crosses the pieces in which gated delta rules (64) and scans (16 here) run a prompt.
LENGTHS = (13, 71, 4, 33, 1)
NUM_TOKENS = 8
OPTIONS = {"block_size": 5, "max_num_seqs": 3, "max_num_batched_tokens": 24, "optimize": "none"}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


class Case:
    """A model, prompts, and what stock answers to each."""

    def __init__(self, family: str) -> None:
        self.model = make_recurrent(family)
        self.prompts = draw_prompts(LENGTHS)
        self.expected = [stock_greedy(self.model, prompt, NUM_TOKENS) for prompt in self.prompts]

    def check(self, outputs) -> None:
        for prompt, output, wanted in zip(self.prompts, outputs, self.expected, strict=True):
            assert_greedy(self.model, prompt, output.token_ids, wanted)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def every(request):
    return Case(request.param)


# One whose layers all mix, and one with attention and a grouped gated delta rule.
@pytest.fixture(scope="module", params=["mamba2", "qwen3_next"])
def case(request):
    return Case(request.param)


@pytest.fixture(scope="module")
def hybrid():
    return Case("qwen3_next")


def test_requests_that_join_at_different_steps_get_stocks_tokens(every):
    with Engine(every.model, **OPTIONS) as engine:
        outputs, pending, step = [], list(every.prompts), 0
        while pending or engine.has_unfinished_requests():
            if pending and step % 3 == 0:
                outputs += engine.outputs(engine.add_request(pending.pop(0), GREEDY))
            engine.step()
            engine.blocks.check_integrity()
            step += 1
        every.check(outputs)
        assert_all_blocks_are_back(engine)


@pytest.mark.parametrize("mutant", ["zeroed", "stale"])
def test_a_state_that_is_lost_or_left_behind_is_noticed_before_anything_is_served(every, mutant, monkeypatch):
    read, write = StateCache.read, StateCache.write
    if mutant == "zeroed":
        monkeypatch.setattr(StateCache, "read", lambda self, *at: torch.zeros_like(read(self, *at)))
    else:
        # Every write but the first of a state goes astray.
        written = set()

        def once(self, index, slots, rows):
            if (id(self), index) not in written:
                written.add((id(self), index))
                self.pools[index][:] = rows[:1]

        monkeypatch.setattr(StateCache, "write", once)
        assert write is not once
    with pytest.raises(UnsupportedModel):
        Engine(every.model, **OPTIONS)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_stats_say_how_a_prompt_goes_on_from_a_state(family):
    with Engine(make_recurrent(family), **OPTIONS) as engine:
        states = engine.stats().states
        assert states.mode == ("stepped" if family in STEPPED else "native")
        assert states.num_layers == len(FAMILIES[family])
        assert states.bytes_per_slot == engine.runner.states.bytes_per_slot > 0
        assert ("token by token" in engine.explain_memory()) == (family in STEPPED)


def test_passes_that_fail_half_way_change_nothing(case):
    with Engine(case.model, **OPTIONS) as engine:
        calls = 0

        def fail(*_):
            nonlocal calls
            calls += 1
            # The pass itself fails, not those that it is tried again in.
            if calls % 4 == 0:
                raise RuntimeError("out of memory")

        last = [module for module in engine.twin.module.modules() if isinstance(module, nn.Linear)][-1]
        handle = last.register_forward_pre_hook(fail)
        outputs = engine.generate(case.prompts, GREEDY)
        handle.remove()
        assert calls > 8
        going_on = [output.finish_reason == "length" for output in outputs]
        assert sum(going_on) > 2
        for prompt, output, wanted, went_on in zip(case.prompts, outputs, case.expected, going_on, strict=True):
            if went_on:
                assert_greedy(case.model, prompt, output.token_ids, wanted)
        case.check(engine.generate(case.prompts, GREEDY))
        assert_all_blocks_are_back(engine)


def test_preempted_requests_begin_anew_or_from_a_state_that_was_kept(hybrid):
    with Engine(hybrid.model, **OPTIONS) as engine:
        engine.blocks.pools[0].num_blocks = 12
        engine.blocks.reset()
        prompts = draw_prompts([13, 14, 15])
        outputs = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
        assert engine.stats().num_preemptions > 0
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_greedy(hybrid.model, prompt, output.token_ids, stock_greedy(hybrid.model, prompt, 24))
        engine.blocks.check_integrity()


def test_samples_share_the_state_of_their_prompt(case):
    prompt = case.prompts[0]
    params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=1, ignore_eos=True, logprobs=1)
    with Engine(case.model, **OPTIONS) as engine:
        outputs = engine.generate([prompt], params)
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    for output in outputs:
        with torch.no_grad():
            logits = case.model(torch.tensor([prompt + output.token_ids]), use_cache=False).logits[0]
        wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for token, row, told in zip(output.token_ids, wanted, output.logprobs, strict=True):
            assert told[token] == pytest.approx(row[token].item(), abs=5e-3)


def test_turns_and_shared_beginnings_are_found_with_their_state(case):
    with Engine(case.model, **OPTIONS) as engine:
        draw = engine.twin.sample_token_ids

        def ask(prompt):
            (output,) = engine.generate([prompt], SamplingParams(max_tokens=14, ignore_eos=True))
            assert_greedy(case.model, prompt, output.token_ids, stock_greedy(case.model, prompt, 14))
            return output

        first = draw(37, 1)
        answer = ask(first)
        second = first + answer.token_ids + draw(20, 2)
        third = second + ask(second).token_ids + draw(9, 3)
        assert [ask(third).metrics.num_cached_tokens for _ in range(2)] == [80, 90]
        system = draw(50, 4)
        cached = [ask(system + draw(7 + i, 5 + i)).metrics.num_cached_tokens for i in range(3)]
        # The second one computes what the first one left no state of, and leaves it.
        assert cached == [0, 0, 50]


def test_a_pinned_beginning_is_found_after_many_others(hybrid):
    with Engine(hybrid.model, **OPTIONS, snapshot_memory="50kB") as engine:
        assert engine.stats().states.max_snapshots == 4
        system = engine.twin.sample_token_ids(20)
        assert engine.pin_prefix(system) == 20
        prompts = [[*system, 5], *draw_prompts([31] * 6, seed=2), [*system, 9]]
        cached = [engine.generate([prompt], GREEDY)[0].metrics.num_cached_tokens for prompt in prompts]
        assert (cached[0], cached[-1]) == (0, 20)


def test_weights_that_change_leave_no_state_behind(hybrid):
    model = make_recurrent("qwen3_next")
    with Engine(model, **OPTIONS) as engine:
        engine.generate(hybrid.prompts, GREEDY)
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
            model.model.embed_tokens.weight.mul_(0.5)
        outputs = engine.generate(hybrid.prompts, GREEDY)
    for prompt, output in zip(hybrid.prompts, outputs, strict=True):
        assert_greedy(model, prompt, output.token_ids, stock_greedy(model, prompt, NUM_TOKENS))


@pytest.mark.parametrize("options", [{"batching": "separate"}, {"optimize": "auto"}, {"enable_prefix_caching": False}])
def test_however_batches_are_run_the_tokens_are_stocks(case, options):
    with Engine(case.model, **OPTIONS | options) as engine:
        case.check(engine.generate(case.prompts, GREEDY))


def test_weights_of_8_bits_are_served_with_state(hybrid):
    with Engine(hybrid.model, **OPTIONS | {"optimize": "auto", "quantize": "int8"}) as engine:
        if not engine.stats().packed_bytes:
            pytest.skip("no C++ operations here")
        outputs = engine.generate(hybrid.prompts, GREEDY)
    assert all(len(output.token_ids) == NUM_TOKENS for output in outputs)


def test_memory_holds_the_states_of_running_requests_and_limits_how_many_run(hybrid):
    with Engine(hybrid.model, **OPTIONS) as engine:
        each = 2 * engine.runner.states.bytes_per_slot
    with Engine(hybrid.model, **OPTIONS, kv_cache_memory=4 * each) as engine:
        hybrid.check(engine.generate(hybrid.prompts, GREEDY))
        stats = engine.stats()
        assert stats.peak_running == 2
        assert stats.states.num_reserved_slots * stats.states.bytes_per_slot <= 6 * each
        with pytest.raises(
            RequestRefused, match="n=3 samples cannot run at once; kv_cache_memory holds the states of 2"
        ):
            engine.add_request([5], SamplingParams(n=3, temperature=1.0))
    with pytest.raises(ConfigError, match=f"give at least {2 * each:,} bytes"):
        Engine(hybrid.model, **OPTIONS, kv_cache_memory=2 * each - 1)


def test_states_are_never_reserved_beyond_what_requests_and_prefixes_may_take(hybrid):
    with Engine(hybrid.model, **OPTIONS) as engine:
        each = engine.runner.states.bytes_per_slot
    # Growing by half at a time would come to 9 slots.
    with Engine(hybrid.model, **OPTIONS | {"max_num_seqs": 3}, snapshot_memory=each) as engine:
        engine.generate(hybrid.prompts, GREEDY)
        assert engine.stats().states.num_reserved_slots <= 2 * 3 + 1


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_an_elastic_engine_gives_back_the_states_of_many_requests(family):
    model, prompts = make_recurrent(family), draw_prompts([9] * 24)
    with Engine(model, block_size=5, optimize="none", elastic=True) as engine:
        engine.fit([12] * 24)
        engine.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
        assert engine.stats().states.num_reserved_slots >= 48
        engine.fit([12] * 20)
        assert engine.stats().states.num_reserved_slots >= 48
        engine.fit([12])
        assert engine.stats().states.num_reserved_slots == 0
        (output,) = engine.generate(prompts[:1], GREEDY)
        assert_greedy(model, prompts[0], output.token_ids, stock_greedy(model, prompts[0], NUM_TOKENS))


def test_without_attention_memory_is_told_in_states_alone():
    with Engine(make_recurrent("mamba2"), **OPTIONS) as engine:
        text = engine.explain_memory()
    assert "No layer keeps keys and values." in text
    assert "3 layers keep a state of everything before, 33.0 KiB a request" in text


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_a_patch_of_the_mixers_class_acts_as_on_stock(family, monkeypatch):
    model = make_recurrent(family)
    with Engine(model, **OPTIONS) as engine:
        name = engine.twin.mixers[0].name
    kind = type(model.get_submodule(name))
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: 0.5 * own(self, *args, **kwargs))
    prompt = draw_prompts([30])[0]
    with Engine(model, **OPTIONS) as engine:
        (output,) = engine.generate([prompt], GREEDY)
    assert_greedy(model, prompt, output.token_ids, stock_greedy(model, prompt, NUM_TOKENS))


def test_memory_for_less_than_one_snapshot_is_refused_with_what_one_takes(hybrid):
    with pytest.raises(ConfigError, match=r"snapshot_memory=10 does not hold .* at least 12,288 bytes"):
        Engine(hybrid.model, **OPTIONS, snapshot_memory=10)


def test_a_long_answer_holds_two_states(hybrid):
    with Engine(hybrid.model, **OPTIONS, enable_prefix_caching=False) as engine:
        engine.generate([hybrid.prompts[0]], SamplingParams(max_tokens=60, ignore_eos=True))
        assert engine.stats().states.num_reserved_slots == 2
        assert engine.stats().states.num_held_slots == 0


@pytest.mark.parametrize(("lengths", "first_step"), [([80, 70], 80), ([80, 10], 90), ([20, 70], 90)])
def test_a_chunk_shorter_than_a_piece_of_a_scan_waits_for_the_next_step(hybrid, lengths, first_step):
    steps = []

    class Listener:
        @hookimpl
        def step_finished(self, stats):
            steps.append(stats.num_prefill_tokens)

    options = OPTIONS | {"max_num_batched_tokens": 96, "enable_prefix_caching": False}
    prompts = draw_prompts(lengths)
    with Engine(hybrid.model, plugins=[Listener()], **options) as engine:
        outputs = engine.generate(prompts, GREEDY)
    assert steps[0] == first_step
    assert sum(steps) == sum(lengths)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(hybrid.model, prompt, output.token_ids, stock_greedy(hybrid.model, prompt, NUM_TOKENS))
