"""``generate(cache_impl="paged")`` returns what stock returns, or says what it does not serve."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import walk_models
from block_checks import assert_all_blocks_are_back
from stock_equality import (
    LENGTH,
    RAGGED,
    assert_equals_stock,
    assert_same_tokens,
    engine_of,
    engines_of,
    left_padded,
    paged,
    tokens_drawn_early,
)
from tiny_models import make_tiny
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

import paged_backend
from paged_backend import EngineConfig
from paged_backend.errors import (
    ConfigError,
    ContextOverflow,
    RequestRefused,
    UnsupportedCall,
    UnsupportedModel,
)

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gpt2", "opt", "phimoe", "llama4", "deepseek_v2", "gpt_oss"]


# Equality


@pytest.mark.filterwarnings("ignore::paged_backend.model.twin.ExpandedCacheWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rows_of_a_ragged_batch_equal_stock(family):
    assert_equals_stock(make_tiny(family), RAGGED, **LENGTH)


@pytest.mark.parametrize(
    "paged_config",
    [
        {"batching": "shared"},
        {"batching": "separate"},
        {"batching": "separate", "max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "block_size": 7},
        {"block_size": 1},
        {"block_size": 256},
        {"max_num_seqs": 2},
        {"max_waiting": 1},
        {"kv_cache_memory": 60_000},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_greedy_rows_equal_stock_under_every_engine_option(llama, paged_config):
    assert_equals_stock(llama, RAGGED, **LENGTH, paged_config=paged_config)


def test_an_unpadded_row_equals_stock(llama):
    inputs = {"input_ids": left_padded([9])["input_ids"]}
    assert assert_equals_stock(llama, inputs, **LENGTH).shape == (1, 25)


def test_an_unpadded_batch_without_a_mask_equals_stock(llama):
    assert_equals_stock(llama, {"inputs": left_padded([9, 9, 9])["input_ids"]}, **LENGTH)


def test_padding_inferred_from_the_pad_token_equals_stock(llama):
    assert_equals_stock(llama, {"input_ids": RAGGED["input_ids"]}, **LENGTH)


@pytest.mark.parametrize("length", [4.0, 4.5, torch.tensor(4), np.int64(4)], ids=repr)
def test_a_length_may_be_any_number_that_stock_takes(llama, length):
    assert_equals_stock(llama, RAGGED, **{**LENGTH, "max_new_tokens": length})
    assert_equals_stock(llama, RAGGED, **{**LENGTH, "max_new_tokens": None}, max_length=40 + length)


@pytest.mark.parametrize("min_p", [torch.tensor(1.0), 1, np.float32(1)], ids=repr)
def test_min_p_may_be_any_number_that_stock_takes(llama, min_p):
    # The likeliest token alone is left.
    assert_equals_stock(llama, RAGGED, **{**LENGTH, "do_sample": True}, min_p=min_p)


def test_rows_that_end_early_are_padded_like_stock(llama):
    eos = tokens_drawn_early(llama, 3)
    options = {**LENGTH, "eos_token_id": eos}
    out = assert_equals_stock(llama, RAGGED, **options, pad_token_id=200)
    assert (out == 200).any()
    assert_equals_stock(llama, RAGGED, **options)
    assert_equals_stock(llama, RAGGED, **{**options, "eos_token_id": eos[0]})


def test_a_batch_whose_rows_all_end_early_is_as_long_as_its_longest_row(llama):
    new = llama.generate(**RAGGED, **LENGTH)[:, 40:]
    eos = sorted({int(row[4]) for row in new})
    out = assert_equals_stock(llama, RAGGED, **{**LENGTH, "eos_token_id": eos})
    assert out.shape[1] < 40 + 16


@pytest.mark.parametrize("eos_token_id", [-1, 256, [300, 2]])
def test_end_of_sequence_tokens_outside_the_vocabulary_never_come_up(llama, eos_token_id):
    assert_equals_stock(llama, RAGGED, **{**LENGTH, "eos_token_id": eos_token_id}, pad_token_id=0)


def test_max_length_counts_the_padded_prompt_like_stock(llama):
    options = {"do_sample": False, "eos_token_id": None}
    assert assert_equals_stock(llama, RAGGED, **options, max_length=47).shape == (5, 47)
    assert paged(llama, max_new_tokens=3, max_length=47).shape == (5, 43)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_default_length_is_stocks(llama):
    assert assert_equals_stock(llama, RAGGED, eos_token_id=None).shape == (5, 60)


def test_a_max_length_criterion_of_the_caller_takes_precedence_like_stocks(llama):
    stops = StoppingCriteriaList([MaxLengthCriteria(44)])
    assert assert_equals_stock(llama, RAGGED, **LENGTH, stopping_criteria=stops).shape == (5, 44)
    # Stock looks at the length after a token only.
    stops = StoppingCriteriaList([MaxLengthCriteria(2)])
    assert assert_equals_stock(llama, RAGGED, **LENGTH, stopping_criteria=stops).shape == (5, 41)


def test_minimum_lengths_equal_stock(llama):
    eos = tokens_drawn_early(llama, 4)
    options = {**LENGTH, "eos_token_id": eos}
    assert_equals_stock(llama, RAGGED, **options, min_new_tokens=8)
    assert_equals_stock(llama, RAGGED, **options, min_length=46)
    assert_equals_stock(llama, RAGGED, **options, min_length=46, min_new_tokens=3, repetition_penalty=1.2)


@pytest.mark.filterwarnings("ignore:Unfeasible length")
def test_a_minimum_beyond_the_maximum_ends_at_the_maximum_like_stock(llama):
    eos = tokens_drawn_early(llama, 4)
    assert_equals_stock(llama, RAGGED, **{**LENGTH, "eos_token_id": eos}, min_new_tokens=99)


def test_the_models_own_generation_config_is_used(fresh):
    eos = tokens_drawn_early(fresh, 3)
    fresh.generation_config = GenerationConfig(
        max_new_tokens=11, eos_token_id=eos, pad_token_id=5, repetition_penalty=1.3, min_new_tokens=2
    )
    assert assert_equals_stock(fresh, RAGGED).shape[1] <= 51


def test_a_generation_config_argument_is_used_whole_and_in_parts(llama):
    whole = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=None, no_repeat_ngram_size=2)
    assert_equals_stock(llama, RAGGED, generation_config=whole)
    assert_equals_stock(llama, RAGGED, generation_config=whole, max_new_tokens=5)


def test_the_result_keeps_stocks_dtype_and_the_prompt_as_it_came(llama):
    inputs = {name: value.int() for name, value in RAGGED.items()}
    inputs["input_ids"][inputs["attention_mask"] == 0] = 77
    out = assert_equals_stock(llama, inputs, **LENGTH)
    assert out.dtype == torch.int64
    assert torch.equal(out[:, :40], inputs["input_ids"].long())


def test_num_return_sequences_expands_rows_like_stock(llama):
    torch.manual_seed(1)
    out = paged(llama, do_sample=True, num_return_sequences=3)
    assert out.shape == (15, 56)
    assert torch.equal(out[:, :40], RAGGED["input_ids"].repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in out[:, 40:].tolist()}) > 10


def test_an_empty_call_starts_from_the_bos_token_like_stock(llama):
    out = assert_equals_stock(llama, {}, **LENGTH)
    assert out[0, 0] == llama.generation_config.bos_token_id


def test_more_rows_than_run_at_once_equal_stock(llama):
    inputs = left_padded([1 + n % 9 for n in range(40)], seed=2)
    assert_equals_stock(llama, inputs, **{**LENGTH, "max_new_tokens": 4}, paged_config={"max_num_seqs": 7})


def test_longrope_within_its_original_length_equals_stock_and_leaves_the_buffers_alone():
    model = make_tiny("phi3_longrope")
    inputs = left_padded([5, 11, 3])
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert_equals_stock(model, inputs, **LENGTH)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    # Stock rewrites its own buffers beyond that length, and back for the next short call.
    model.generate(**inputs, **{**LENGTH, "max_new_tokens": 30})
    assert_equals_stock(model, inputs, **LENGTH)


def test_half_precision_follows_the_model(fresh):
    paged(fresh)
    fresh.half()
    inputs = left_padded([7, 3, 19])
    stock = fresh.generate(**inputs, **LENGTH, return_dict_in_generate=True, output_scores=True, output_logits=False)
    out = paged(fresh, inputs)
    assert out.dtype == torch.int64
    # Batch mates change half-precision rounding, so only tokens that stock is sure of can be compared.
    for row in range(3):
        for step, scores in enumerate(stock.scores):
            best = scores[row].topk(2).values
            if best[0] - best[1] < 0.1 * scores[row].abs().max():
                break
            assert out[row, 19 + step] == stock.sequences[row, 19 + step]
            assert step >= 0
    fresh.float()
    assert_equals_stock(fresh, inputs, **LENGTH)


# Sampling


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}


def test_manual_seed_reproduces_a_sampled_result(llama):
    torch.manual_seed(7)
    first, second = paged(llama, **SAMPLING), paged(llama, **SAMPLING)
    torch.manual_seed(7)
    assert torch.equal(paged(llama, **SAMPLING), first)
    assert torch.equal(paged(llama, **SAMPLING), second)
    assert not torch.equal(first, second)


def test_a_greedy_call_leaves_torchs_generator_alone(llama):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    paged(llama)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_top_k_of_one_is_greedy(llama):
    assert torch.equal(paged(llama, do_sample=True, top_k=1), paged(llama))


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6, "top_k": 0}, {"min_p": 0.1, "top_k": 0}, {"typical_p": 0.5}],
    ids=str,
)
def test_sampled_tokens_follow_stocks_distribution(llama, options):
    prompt = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    stock = llama.generate(
        **prompt, do_sample=True, **options, max_new_tokens=1, return_dict_in_generate=True, output_scores=True
    )
    probabilities = stock.scores[0][0].softmax(-1)
    torch.manual_seed(0)
    count = 600
    out = llama.generate(
        **prompt, do_sample=True, **options, max_new_tokens=1, num_return_sequences=count, cache_impl="paged"
    )
    counts = out[:, -1].bincount(minlength=256)
    assert not (counts * (probabilities == 0)).any()
    # Six standard deviations of each token's count.
    deviation = (count * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - count * probabilities).abs() <= 6 * deviation + 1).all()


def test_user_processors_and_processors_of_the_configuration_give_the_same_samples_as_fields(llama):
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    torch.manual_seed(5)
    as_fields = paged(llama, **SAMPLING)
    torch.manual_seed(5)
    as_processors = paged(llama, **SAMPLING, logits_processor=LogitsProcessorList([Nothing()]))
    assert torch.equal(as_fields, as_processors)


# Where cache_impl comes from


def test_cache_impl_may_come_in_a_generation_config_or_as_the_models_default(fresh):
    expected = fresh.generate(**RAGGED, **LENGTH)
    config = GenerationConfig(**LENGTH, cache_impl="paged", paged_config={"block_size": 7})
    assert torch.equal(fresh.generate(**RAGGED, generation_config=config), expected)
    assert engine_of(fresh).config.block_size == 7
    fresh.generation_config.cache_impl = "paged"
    assert torch.equal(fresh.generate(**RAGGED, **LENGTH), expected)
    assert len(engines_of(fresh)) == 2
    fresh.generation_config.paged_config = {"block_size": 7}
    fresh.generate(**RAGGED, **LENGTH)
    assert len(engines_of(fresh)) == 2
    # The argument goes first: this is stock.
    fresh.generate(**RAGGED, **LENGTH, cache_impl=None, num_beams=2)


def test_an_engine_config_is_taken_as_it_is(fresh):
    paged(fresh, paged_config=EngineConfig(block_size=8))
    assert engine_of(fresh).config == EngineConfig(block_size=8)


@pytest.mark.parametrize("cache_impl", ["pagde", "static", "PAGED", True, 1])
def test_a_misspelt_cache_impl_is_named_with_the_allowed_ones(llama, cache_impl):
    with pytest.raises(ConfigError, match=f"cache_impl={cache_impl!r} .*'paged'"):
        llama.generate(**RAGGED, **LENGTH, cache_impl=cache_impl)
    with pytest.raises(ConfigError, match=f"cache_impl={cache_impl!r}"):
        llama.generate(**RAGGED, generation_config=GenerationConfig(cache_impl=cache_impl))


def test_paged_config_without_cache_impl_is_an_error(llama):
    with pytest.raises(ConfigError, match="cache_impl='paged'"):
        llama.generate(**RAGGED, **LENGTH, paged_config={"block_size": 7})
    with pytest.raises(ConfigError, match="cache_impl='paged'"):
        llama.generate(**RAGGED, generation_config=GenerationConfig(**LENGTH, paged_config={"block_size": 7}))


# Refusals


REFUSED = {
    "num_beams=3": {"num_beams": 3},
    "constraints": {"constraints": [object()], "num_beams": 2},
    "force_words_ids": {"force_words_ids": [[1]], "num_beams": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "dola_layers": {"dola_layers": "low"},
    "custom_generate": {"custom_generate": lambda *args, **kwargs: None},
    "synced_gpus": {"synced_gpus": True},
    "use_cache=None": {"use_cache": None},
    "use_cache=0": {"use_cache": 0},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "position_ids": {"position_ids": torch.arange(1, 41)[None].expand(5, -1)},
}


@pytest.mark.parametrize(("named", "options"), REFUSED.items(), ids=REFUSED.keys())
def test_what_is_not_served_is_refused_by_name(llama, named, options):
    with pytest.raises(UnsupportedCall, match=named):
        paged(llama, **options)


def test_refusals_reach_what_a_configuration_asks_for(fresh):
    with pytest.raises(UnsupportedCall, match="num_beams=2"):
        paged(fresh, generation_config=GenerationConfig(num_beams=2))
    fresh.generation_config.num_beams = 4
    with pytest.raises(UnsupportedCall, match="num_beams=4"):
        paged(fresh)
    paged(fresh, num_beams=1)


def test_an_assistant_model_is_refused_by_name(llama):
    with pytest.raises(UnsupportedCall, match="assistant_model"):
        paged(llama, left_padded([9]), assistant_model=llama)


def test_a_cache_of_the_callers_is_refused_by_name(llama):
    cache = llama(RAGGED["input_ids"], use_cache=True).cache
    with pytest.raises(UnsupportedCall, match="cache"):
        paged(llama, cache=cache)


def test_padding_on_the_right_and_masks_with_holes_are_refused_by_name(llama):
    mask = torch.ones_like(RAGGED["input_ids"])
    mask[2, -3:] = 0
    with pytest.raises(UnsupportedCall, match=r"padding on the right \(row 2\)"):
        paged(llama, {**RAGGED, "attention_mask": mask})
    mask[2] = 1
    mask[3, 5] = 0
    with pytest.raises(UnsupportedCall, match=r"holes \(row 3\)"):
        paged(llama, {**RAGGED, "attention_mask": mask})
    mask[3] = 0
    with pytest.raises(UnsupportedCall, match="row 3"):
        paged(llama, {**RAGGED, "attention_mask": mask})


def test_a_mask_of_another_shape_and_a_batch_without_rows_are_refused_with_the_numbers(llama):
    ids = left_padded([5, 5])["input_ids"]
    for shape in ((2, 3), (2, 8), (3, 5)):
        for filled in (torch.ones, torch.zeros):
            mask = filled(shape, dtype=torch.long)
            mask[:, -1] = 1
            with pytest.raises(UnsupportedCall, match=re.escape(f"{shape} for inputs of (2, 5)")):
                paged(llama, {"input_ids": ids, "attention_mask": mask})
    embeds = torch.zeros(2, 5, 64)
    with pytest.raises(UnsupportedCall, match=re.escape("(2, 4) for inputs of (2, 5)")):
        paged(llama, {"inputs_embeds": embeds, "attention_mask": torch.ones(2, 4)})
    for name, nothing in (("input_ids", ids[:0]), ("inputs", ids[:0]), ("inputs_embeds", embeds[:0])):
        with pytest.raises(RequestRefused, match=re.escape(f"{tuple(nothing.shape)} hold no prompt")):
            paged(llama, {name: nothing})


def test_a_mask_of_one_row_that_hides_nothing_goes_for_all_rows_as_in_stock(llama):
    inputs = {"input_ids": left_padded([12, 12])["input_ids"], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    assert_equals_stock(llama, inputs, **LENGTH)
    inputs["attention_mask"][0, 0] = 0
    with pytest.raises(UnsupportedCall, match=re.escape("(1, 12) for inputs of (2, 12)")):
        paged(llama, inputs)


def test_padding_is_refused_by_name_where_the_model_counts_it():
    model = walk_models.build("WhisperForCausalLM")
    options = {**LENGTH, "pad_token_id": 0}
    assert_equals_stock(model, left_padded([9, 9]), **options)
    with pytest.raises(UnsupportedCall, match=r"padding \(row 1\) for WhisperForCausalLM, which takes no position_ids"):
        paged(model, left_padded([9, 8]), **options)


def test_a_pad_token_inside_a_prompt_without_a_mask_is_refused_with_the_way_out(llama):
    ids = left_padded([9, 9])["input_ids"]
    ids[1, 4] = 0
    with pytest.raises(UnsupportedCall, match="without an attention_mask"):
        paged(llama, {"input_ids": ids})
    assert_equals_stock(llama, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **LENGTH)


def test_a_token_outside_the_vocabulary_is_refused(llama):
    ids = torch.tensor([[5, 256, 3]])
    with pytest.raises(RequestRefused, match="256"):
        paged(llama, {"input_ids": ids})


def test_a_model_that_the_probe_refuses_is_named():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM"):
        paged(model, {"input_ids": torch.tensor([[5, 6]])})


def test_a_call_beyond_the_positions_is_refused_unless_it_ends_in_time():
    gpt2 = make_tiny("gpt2", n_positions=32)
    inputs = left_padded([20])
    with pytest.raises(ContextOverflow, match="32 tokens"):
        paged(gpt2, inputs, max_new_tokens=13)
    with pytest.raises(ContextOverflow, match="32"):
        paged(gpt2, left_padded([33]), max_new_tokens=1)
    eos = int(gpt2.generate(**inputs, **LENGTH | {"max_new_tokens": 5})[0, -1])
    assert_equals_stock(gpt2, inputs, **{**LENGTH, "max_new_tokens": 100, "eos_token_id": eos})


def test_a_budget_that_cannot_hold_a_row_is_refused_with_the_numbers(llama):
    with pytest.raises(ContextOverflow, match="kv_cache_memory"):
        paged(llama, paged_config={"kv_cache_memory": 20_000})


# Changes of the model between calls


def test_weights_changed_in_place_are_followed_at_once(fresh):
    before = assert_equals_stock(fresh, RAGGED, **LENGTH)
    weight = fresh.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    after_add = assert_equals_stock(fresh, RAGGED, **LENGTH)
    weight.data.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)), alpha=0.3)
    after_data_add = assert_equals_stock(fresh, RAGGED, **LENGTH)
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.5)
    fresh(**RAGGED, labels=RAGGED["input_ids"]).loss.backward()
    optimizer.step()
    after_step = assert_equals_stock(fresh, RAGGED, **LENGTH)
    results = [before, after_add, after_data_add, after_step]
    assert len({tuple(result.flatten().tolist()) for result in results}) == 4


def test_release_makes_a_small_edit_through_data_known(fresh):
    before = paged(fresh)
    weight = fresh.model.layers[1].mlp.down_proj.weight
    weight.data[7, 5] = 40.0
    paged_backend.release(fresh)
    after = assert_equals_stock(fresh, RAGGED, **LENGTH)
    with torch.no_grad():
        weight[7, 5] = 0.0
        weight[9, 3] = -40.0
    # No release: an in-place operation counts the version up.
    in_place = assert_equals_stock(fresh, RAGGED, **LENGTH)
    assert len({tuple(result.flatten().tolist()) for result in (before, after, in_place)}) == 3


def test_a_replaced_weight_is_followed_at_once(fresh):
    paged(fresh)
    other = make_tiny("llama", seed=9)
    fresh.load_state_dict(other.state_dict())
    assert_equals_stock(fresh, RAGGED, **LENGTH)
    fresh.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.flip(0).clone())
    assert_equals_stock(fresh, RAGGED, **LENGTH)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_adapters_switched_between_calls_are_followed_at_once(fresh):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(fresh, config, adapter_name="one")
    model.add_adapter("two", config)
    results = []
    for adapter in ("one", "two"):
        model.set_adapter(adapter)
        results.append(assert_equals_stock(model, RAGGED, **LENGTH))
    with model.disable_adapter():
        results.append(assert_equals_stock(model, RAGGED, **LENGTH))
    model.set_adapter("one")
    assert torch.equal(assert_equals_stock(model, RAGGED, **LENGTH), results[0])
    assert len({tuple(result.flatten().tolist()) for result in results}) == 3
    merged = model.merge_and_unload()
    assert_equals_stock(merged, RAGGED, **LENGTH)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Position ids are not")
def test_virtual_prompt_tokens_are_refused_by_name(fresh):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(fresh, config)
    with pytest.raises(UnsupportedCall, match="inputs_embeds"):
        paged(model, left_padded([9]))


def test_offloaded_weights_are_served(fresh):
    accelerate = pytest.importorskip("accelerate")
    expected = fresh.generate(**RAGGED, **LENGTH)
    accelerate.cpu_offload(fresh, execution_device="cpu")
    out = paged(fresh)
    assert torch.equal(out, expected)
    assert all(parameter.device.type == "meta" for parameter in fresh.parameters())


def test_a_model_in_training_mode_stays_in_it(fresh):
    expected = paged(fresh)
    fresh.train()
    assert torch.equal(paged(fresh), expected)
    assert fresh.training
    assert all(module.training for module in fresh.modules())


def test_two_models_in_one_process_do_not_mix(llama):
    gpt2 = make_tiny("gpt2")
    for _ in range(2):
        assert_equals_stock(llama, RAGGED, **LENGTH)
        assert_equals_stock(gpt2, RAGGED, **LENGTH)


def test_all_blocks_are_back_after_calls(fresh):
    paged(fresh)
    paged(fresh, **SAMPLING)
    assert_all_blocks_are_back(engine_of(fresh))


def test_eight_threads_at_once_each_get_what_they_get_alone(fresh):
    calls = [left_padded([3 + n, 9], seed=n) for n in range(8)]
    expected = [fresh.generate(**inputs, **LENGTH) for inputs in calls]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            results = list(pool.map(lambda inputs: paged(fresh, inputs), calls))
            assert all(map(torch.equal, results, expected))
    assert len(engines_of(fresh)) == 1
    assert engine_of(fresh).stats().peak_running > 2
    assert_all_blocks_are_back(engine_of(fresh))


def test_a_thread_whose_call_fails_disturbs_no_other(fresh):
    expected = paged(fresh)

    def fail(input_ids, scores):
        raise ZeroDivisionError("mine")

    def call(number):
        if number % 2:
            return paged(fresh)
        with pytest.raises(ZeroDivisionError):
            paged(fresh, logits_processor=LogitsProcessorList([fail]))
        return expected

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(result, expected) for result in pool.map(call, range(8)))


def test_same_tokens_means_the_same_but_for_near_ties():
    stock = torch.tensor([[5, 6, 7], [5, 6, 7]])
    scores = (torch.tensor([[0.0, 1.0, 1.0005], [0.0, 1.0, 2.0]]),)
    assert_same_tokens(stock.clone(), stock, scores)
    assert_same_tokens(torch.tensor([[5, 6, 1], [5, 6, 7]]), stock, scores)
    for wrong in ([[5, 6, 7], [5, 6, 1]], [[5, 1, 7], [5, 6, 7]], [[5, 6, 7, 8], [5, 6, 7, 8]]):
        with pytest.raises(AssertionError):
            assert_same_tokens(torch.tensor(wrong), stock, scores)
