"""Memory through the engine's door: prefixes, forks, windows, pressure."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from block_checks import assert_all_blocks_are_back
from oracle import assert_greedy, draw_prompts, stock_greedy, stock_greedy_many
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.errors import RequestRefused
from paged_backend.model.twin import Twin

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
# Where it is prompts that take the memory.
NUM_SHORT = 10
SHORT = SamplingParams(max_tokens=NUM_SHORT, ignore_eos=True)


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


def memory_for(model, num_tokens: int, block_size: int) -> int:
    """Bytes of the blocks that ``num_tokens`` tokens fill."""
    per_token = sum(layer.bytes_per_token() for layer in Twin(model).layers)
    return -(-num_tokens // block_size) * block_size * per_token


def run(engine: Engine) -> dict[str, list]:
    outputs: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs.setdefault(output.request_id, []).append(output)
    return outputs


# Prefix cache


def test_second_run_of_prompts_with_a_long_common_beginning_computes_only_the_tails(llama):
    prefix = draw_prompts([200])[0]
    prompts = [prefix + tail for tail in draw_prompts([9] * 32, seed=2)]
    engine = Engine(llama, block_size=16, max_model_len=256)
    first = engine.generate(prompts, GREEDY)
    computed = engine.stats().num_prefill_tokens
    second = engine.generate(prompts, GREEDY)
    # 209 tokens: 13 full blocks are known by now, so one token of each prompt is computed.
    assert engine.stats().num_prefill_tokens - computed == 32 * 1
    assert all(output.metrics.num_cached_tokens == 208 for output in second)
    assert [output.token_ids for output in second] == [output.token_ids for output in first]
    for prompt, output in list(zip(prompts, second, strict=True))[::8]:
        assert_greedy(llama, prompt, output.token_ids, stock_greedy(llama, prompt, NUM_TOKENS))


def test_prompts_of_one_call_share_what_the_first_has_computed(llama):
    prefix = draw_prompts([160])[0]
    prompts = [prefix + tail for tail in draw_prompts([5] * 8, seed=2)]
    engine = Engine(llama, block_size=16, max_num_batched_tokens=165)
    engine.generate(prompts, GREEDY)
    assert engine.stats().num_cached_tokens == 7 * 160


def test_conversation_computes_only_its_new_turns(llama):
    engine = Engine(llama, block_size=4, max_model_len=256)
    history, computed = draw_prompts([20])[0], []
    for turn in draw_prompts([7] * 6, seed=5):
        prompt = history + turn
        before = engine.stats().num_prefill_tokens
        (output,) = engine.generate([prompt], GREEDY)
        computed.append(engine.stats().num_prefill_tokens - before)
        assert_greedy(llama, prompt, output.token_ids, stock_greedy(llama, prompt, NUM_TOKENS))
        history = prompt + output.token_ids
    # The last token of an answer is never fed, and at most one block is cut: turn, that token, three more.
    assert computed[0] == 27
    assert max(computed[1:]) <= 7 + 1 + 3


def test_prefix_caching_can_be_switched_off(llama):
    engine = Engine(llama, enable_prefix_caching=False)
    prompts = [draw_prompts([40])[0]] * 2
    engine.generate(prompts, GREEDY)
    engine.generate(prompts, GREEDY)
    assert engine.stats().num_cached_tokens == 0
    assert engine.stats().groups[0].num_cached_blocks == 0


def test_salted_requests_do_not_see_each_others_blocks(llama):
    engine = Engine(llama)
    prompt = draw_prompts([40])[0]
    cached = []
    for salt in ("a", "b", "a", None):
        engine.add_request(prompt, GREEDY, cache_salt=salt)
        ((output,),) = run(engine).values()
        cached.append(output.metrics.num_cached_tokens)
    assert cached == [0, 0, 32, 0]


def test_stale_prefixes_are_not_hit_after_the_weights_change():
    model = make_tiny("llama")
    engine = Engine(model)
    prompt = draw_prompts([40])[0]
    engine.generate([prompt], GREEDY)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.3)
    (output,) = engine.generate([prompt], GREEDY)
    assert output.metrics.num_cached_tokens == 0
    assert_greedy(model, prompt, output.token_ids, stock_greedy(model, prompt, NUM_TOKENS))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "llama4", "gpt_oss"])
def test_prefix_hits_are_right_under_windows_and_chunks(family):
    model = make_tiny(family)
    engine = Engine(model, block_size=4, max_num_batched_tokens=16)
    prefix = draw_prompts([60])[0]
    for tail in draw_prompts([3, 9, 14], seed=3):
        prompt = prefix + tail
        (output,) = engine.generate([prompt], GREEDY)
        assert_greedy(model, prompt, output.token_ids, stock_greedy(model, prompt, NUM_TOKENS))
        assert_all_blocks_are_back(engine)
    assert engine.stats().num_cached_tokens == 2 * 60


# Forks


def test_samples_of_one_prompt_share_its_blocks_and_copy_only_the_last(llama):
    engine = Engine(llama, block_size=16)
    prompt = draw_prompts([40])[0]
    engine.add_request(prompt, SamplingParams(max_tokens=4, n=4, temperature=1.0, seed=1, ignore_eos=True))
    engine.step()
    engine.step()
    # Two full blocks are shared by all; the third is one's own for each.
    assert engine.stats().groups[0].num_owned_blocks == 2 + 4
    assert engine.stats().num_prefill_tokens == 40
    run(engine)
    assert_all_blocks_are_back(engine)


@pytest.mark.parametrize("memory", [None, 8])
def test_samples_with_a_seed_are_the_same_whatever_the_memory(llama, memory):
    params = SamplingParams(max_tokens=24, n=4, temperature=1.0, seed=7, ignore_eos=True)
    prompt = draw_prompts([17])[0]
    reference = Engine(llama, enable_prefix_caching=False).generate([prompt], params)
    options = {} if memory is None else {"kv_cache_memory": memory_for(llama, memory * 8, 8), "block_size": 8}
    engine = Engine(llama, **options)
    others = [engine.add_request(other, GREEDY) for other in draw_prompts([12, 20])]
    outputs = engine.generate([prompt], params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in reference]
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    assert (engine.stats().num_preemptions > 0) == (memory is not None)
    run(engine)
    assert others
    assert_all_blocks_are_back(engine)


def test_greedy_samples_all_equal_stock(llama):
    prompt = draw_prompts([23])[0]
    outputs = Engine(llama, block_size=4).generate(
        [prompt], SamplingParams(max_tokens=NUM_TOKENS, n=3, ignore_eos=True)
    )
    expected = stock_greedy(llama, prompt, NUM_TOKENS)
    assert [output.token_ids for output in outputs] == [expected] * 3


def test_more_samples_than_seats_are_refused(llama):
    with pytest.raises(RequestRefused, match="n=3 samples cannot run at once; max_num_seqs is 2"):
        Engine(llama, max_num_seqs=2).add_request([5], SamplingParams(n=3, temperature=1.0))


# Windows


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "mistral", "llama4"])
def test_prompt_many_windows_long_gives_stocks_tokens_in_the_memory_that_theory_says(family):
    model = make_tiny(family, max_position_embeddings=512)
    prompts = draw_prompts([160, 200])
    engine = Engine(model, block_size=4, max_num_batched_tokens=16, max_model_len=256)
    for prompt in prompts:
        engine.add_request(prompt, SHORT)
    outputs, peaks = {}, [0] * len(engine.blocks.groups)
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
        engine.blocks.check_integrity()
        peaks = [max(peak, pool.num_owned) for peak, pool in zip(peaks, engine.blocks.pools, strict=True)]
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert_greedy(model, prompt, output.token_ids, stock_greedy(model, prompt, NUM_SHORT))
    for group, peak in zip(engine.blocks.groups, peaks, strict=True):
        theory = sum(group.blocks_for(len(prompt) + NUM_SHORT, 4, 16) for prompt in prompts)
        assert peak <= theory
        if group.rule.kind != "full":
            assert theory < sum(-(-len(prompt) // 4) for prompt in prompts) / 4
    assert_all_blocks_are_back(engine)


# Pressure


@pytest.mark.parametrize(
    ("family", "batching"), [("llama", "shared"), ("llama", "separate"), ("gemma2", "separate"), ("llama4", "shared")]
)
def test_five_percent_of_the_memory_changes_no_token(family, batching):
    model = make_tiny(family)
    rng = random.Random(3)
    lengths = [rng.randrange(5, 30) for _ in range(40)]
    prompts = draw_prompts(lengths)
    total = sum(length + NUM_SHORT for length in lengths)
    memory = memory_for(model, max(total // 20, max(lengths) + NUM_SHORT + 4), 4)
    engine = Engine(model, block_size=4, max_num_batched_tokens=16, kv_cache_memory=memory, max_model_len=64)
    outputs = engine.generate(prompts, SHORT)
    expected = stock_greedy_many(model, prompts, NUM_SHORT)
    for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
        assert_greedy(model, prompt, output.token_ids, tokens)
    stats = engine.stats()
    assert_all_blocks_are_back(engine)
    assert stats.peak_running < 40
    if family == "llama":
        assert stats.num_preemptions > 0
        assert stats.num_recomputed_tokens > 0


def test_preempted_request_keeps_its_tokens_and_hits_its_own_blocks(llama):
    engine = Engine(llama, block_size=4)
    prompt = draw_prompts([30])[0]
    engine.add_request(prompt, GREEDY)
    for _ in range(8):
        engine.step()
    (request,) = engine.scheduler.running
    step = engine.scheduler.schedule(0.0)
    engine.scheduler.preempt(request, step, 0.0)
    tokens = list(request.output.token_ids)
    ((output,),) = run(engine).values()
    assert output.token_ids[: len(tokens)] == tokens
    assert output.token_ids == stock_greedy(llama, prompt, NUM_TOKENS)
    # 37 tokens had been computed; nine full blocks were still cached.
    assert engine.stats().num_recomputed_tokens == 1
    assert output.metrics.num_preemptions == 1


def test_victim_comes_back_before_later_arrivals(llama):
    engine = Engine(llama, block_size=4, kv_cache_memory=memory_for(llama, 64, 4), max_model_len=64)
    order = []
    first, second, third = (engine.add_request(prompt, GREEDY) for prompt in draw_prompts([20, 20, 20]))
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step() if output.finished]
    assert engine.stats().num_preemptions > 0
    assert order == [first, second, third]


def test_request_larger_than_all_others_together_finishes_among_them(llama):
    engine = Engine(llama, block_size=4, kv_cache_memory=memory_for(llama, 200, 4), max_model_len=200)
    prompts = [*draw_prompts([9] * 6), *draw_prompts([170], seed=2), *draw_prompts([9] * 6, seed=3)]
    outputs = engine.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(llama, prompt, output.token_ids, stock_greedy(llama, prompt, NUM_TOKENS))


def test_progress_is_made_however_small_the_memory(llama):
    engine = Engine(llama, block_size=4, kv_cache_memory=memory_for(llama, 52, 4), max_model_len=52)
    for prompt in draw_prompts([30] * 12):
        engine.add_request(prompt, GREEDY)
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    # One after the other would take 12 * (20 decodes + a prefill).
    assert steps <= 12 * 21


def test_two_engines_in_one_process_do_not_disturb_each_other(llama):
    other = make_tiny("gpt2")
    engines = [Engine(llama), Engine(other), Engine(llama, block_size=7)]
    prompts = draw_prompts([20, 31])
    for engine in engines:
        for prompt in prompts:
            engine.add_request(prompt, GREEDY)
    outputs = [{} for _ in engines]
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, found in zip(engines, outputs, strict=True):
            found.update((output.request_id, output.token_ids) for output in engine.step())
    for model, found in zip((llama, other, llama), outputs, strict=True):
        assert list(found.values()) == [stock_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_random_arrivals_aborts_and_forks_in_a_tiny_cache_leave_every_block_free(family):
    rng = random.Random(11)
    model = make_tiny(family)
    engine = Engine(
        model,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        kv_cache_memory=memory_for(model, 96, 4),
        max_model_len=48,
    )
    threads = threading.active_count()
    live, finished = [], 0
    for _ in range(400):
        if rng.random() < 0.4:
            prompt = [rng.randrange(3, 6) for _ in range(rng.randint(1, 30))]
            params = SamplingParams(
                max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 1, 3]), temperature=1.0, seed=rng.randrange(99)
            )
            live.append(engine.add_request(prompt, params, cache_salt=rng.choice([None, "a"])))
        if live and rng.random() < 0.15:
            engine.abort(live.pop(rng.randrange(len(live))))
        finished += sum(output.finished for output in engine.step())
        engine.blocks.check_integrity()
    finished += sum(map(len, run(engine).values()))
    assert finished > 150
    assert engine.stats().num_preemptions > 0
    assert_all_blocks_are_back(engine)
    assert threading.active_count() == threads
