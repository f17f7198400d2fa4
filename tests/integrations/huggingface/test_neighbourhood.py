"""``cache_impl="paged"`` through what people call ``generate`` from, and with models that others have changed."""

from __future__ import annotations

import warnings

import pytest
import torch
from block_checks import assert_all_blocks_are_back
from stock_equality import (
    LENGTH,
    RAGGED,
    assert_equals_stock,
    engine_of,
    engines_of,
    left_padded,
    paged,
)
from tiny_models import make_tiny
from tiny_tokenizers import byte_level_bpe
from transformers import GenerationConfig, LlamaForCausalLM, pipeline

from paged_backend.errors import ConfigError, UnsupportedCall, UnsupportedModel

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = ["Stop here.", "The quick brown fox jumps over the lazy dog, doesn't it? Yes!", "hello", "User: hi there"]


def num_steps(model):
    """Steps of all the engines that are kept for a model."""
    return sum(engine.stats().num_steps for engine in engines_of(model))


# Pipelines


@pytest.fixture(scope="module")
def speaker():
    """A tokenizer with a chat template, and a model of its vocabulary."""
    tokenizer = byte_level_bpe()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_tiny("llama", vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, bos_token_id=None)
    yield tokenizer, model
    tokenizer.chat_template = tokenizer.pad_token = None


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_pipeline_answers_texts_as_with_stock(speaker, batch_size):
    tokenizer, model = speaker
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 8, "do_sample": False, "batch_size": batch_size}
    expected = generator(TEXTS, **options)
    assert generator(TEXTS, **options, cache_impl="paged", paged_config={"block_size": 8}) == expected
    assert num_steps(model) > 0
    paged_by_default = pipeline("text-generation", model=model, tokenizer=tokenizer, cache_impl="paged")
    assert paged_by_default(TEXTS, **options) == expected


def test_a_pipeline_answers_chats_as_with_stock(speaker):
    tokenizer, model = speaker
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    options = {"max_new_tokens": 8, "do_sample": False, "batch_size": 2, "return_full_text": False}
    assert generator(chats, **options, cache_impl="paged") == generator(chats, **options)


def test_a_pipeline_takes_cache_impl_from_the_models_default(speaker):
    tokenizer, model = speaker
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = pipeline("text-generation", model=model, tokenizer=tokenizer)(TEXTS, **options)
    steps = num_steps(model)
    model.generation_config.cache_impl = "paged"
    try:
        assert pipeline("text-generation", model=model, tokenizer=tokenizer)(TEXTS, **options) == expected
        assert num_steps(model) > steps
    finally:
        del model.generation_config.cache_impl


def test_a_misspelt_cache_impl_is_named_through_a_pipeline(speaker):
    tokenizer, model = speaker
    with pytest.raises(ConfigError, match="pagged"):
        pipeline("text-generation", model=model, tokenizer=tokenizer)("hello", max_new_tokens=3, cache_impl="pagged")


# Training loops


def test_generation_between_optimizer_steps_follows_the_weights(fresh):
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.05)
    results = []
    for _ in range(4):
        fresh.eval()
        out = assert_equals_stock(fresh, RAGGED, **LENGTH)
        results.append(tuple(out.flatten().tolist()))
        fresh.train()
        loss = fresh(out, attention_mask=(out != 0).long(), labels=out).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(results)) == 4


def test_generation_leaves_gradients_and_autograd_alone(fresh):
    fresh(**RAGGED, labels=RAGGED["input_ids"]).loss.backward()
    before = {name: parameter.grad.clone() for name, parameter in fresh.named_parameters()}
    loss = fresh(**RAGGED, labels=RAGGED["input_ids"]).loss
    paged(fresh)
    loss.backward()
    for name, parameter in fresh.named_parameters():
        assert torch.allclose(parameter.grad, 2 * before[name], atol=1e-6)


def test_a_model_cast_back_and_forth_is_followed(fresh):
    paged(fresh)
    fresh.double()
    out = assert_equals_stock(fresh, RAGGED, **LENGTH)
    fresh.float()
    assert torch.equal(assert_equals_stock(fresh, RAGGED, **LENGTH), out)


# Changed models


def test_a_compiled_model_is_served(fresh):
    expected = fresh.generate(**RAGGED, **LENGTH)
    compiled = torch.compile(fresh, backend="eager")
    assert torch.equal(paged(compiled), expected)
    fresh.compile(backend="eager")
    assert torch.equal(paged(fresh), expected)


def test_forward_hooks_of_the_user_act_on_the_packed_tokens(fresh):
    stock = fresh.generate(**RAGGED, **LENGTH)
    shapes = []

    def shift(module, args, output):
        shapes.append(tuple(output.shape))
        return output + 0.3

    handle = fresh.model.layers[1].mlp.register_forward_hook(shift)
    out = assert_equals_stock(fresh, RAGGED, **LENGTH)
    assert not torch.equal(out, stock)
    packed = [shape for shape in shapes if shape[0] == 1]
    assert packed
    assert all(len(shape) == 3 for shape in packed)
    handle.remove()
    assert torch.equal(assert_equals_stock(fresh, RAGGED, **LENGTH), stock)


def test_a_class_that_overrides_generate_and_calls_super_is_served(fresh):
    class Polite(LlamaForCausalLM):
        def generate(self, *args, max_new_tokens=3, **kwargs):
            return super().generate(*args, max_new_tokens=max_new_tokens + 1, **kwargs)

    fresh.__class__ = Polite
    options = {"do_sample": False, "eos_token_id": None}
    assert paged(fresh).shape == (5, 57)
    assert torch.equal(fresh.generate(**RAGGED, **options, cache_impl="paged"), fresh.generate(**RAGGED, **options))


def test_a_class_with_a_decoding_loop_of_its_own_is_refused_by_name(fresh):
    class Own(LlamaForCausalLM):
        def _sample(self, input_ids, **kwargs):
            return input_ids

    fresh.__class__ = Own
    with pytest.raises(UnsupportedCall, match="Own"):
        paged(fresh)
    assert torch.equal(fresh.generate(**RAGGED, **LENGTH), RAGGED["input_ids"])


def test_a_class_that_feeds_its_model_something_else_is_refused_by_name(fresh):
    class Feeds(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
            return {**inputs, "token_type_ids": torch.ones_like(input_ids)}

    fresh.__class__ = Feeds
    with pytest.raises(UnsupportedCall, match="token_type_ids"):
        paged(fresh)


def test_an_instance_whose_generate_was_replaced_keeps_it(fresh):
    fresh.generate = lambda *args, **kwargs: sorted(kwargs)
    assert fresh.generate(cache_impl="paged") == ["cache_impl"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_quantised_model_is_served():
    torchao = pytest.importorskip("torchao")
    model = make_tiny("llama")
    torchao.quantization.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
    assert_equals_stock(model, RAGGED, **LENGTH)


def test_a_generation_config_saved_with_cache_impl_is_used_after_loading(fresh, tmp_path):
    fresh.generation_config = GenerationConfig(max_new_tokens=7, cache_impl="paged", paged_config={"block_size": 8})
    fresh.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    out = loaded.generate(**RAGGED)
    assert out.shape == (5, 47)
    assert engine_of(loaded).config.block_size == 8


def test_generate_inside_a_processor_of_the_same_engine_is_refused_and_of_another_model_served(fresh):
    other = make_tiny("gpt2")

    def asks_the_other(input_ids, scores):
        drawn = paged(other, {"input_ids": input_ids[:, -3:]}, max_new_tokens=1)
        return scores + torch.nn.functional.one_hot(drawn[:, -1], 256) * 100.0

    out = paged(fresh, left_padded([9]), logits_processor=[asks_the_other], max_new_tokens=4)
    for step in range(4):
        window = out[:, 6 + step : 9 + step]
        assert out[0, 9 + step] == paged(other, {"input_ids": window}, max_new_tokens=1)[0, -1]

    def asks_itself(input_ids, scores):
        paged(fresh, {"input_ids": input_ids}, max_new_tokens=1)
        return scores

    with pytest.raises(RuntimeError, match="in the middle of a step"):
        paged(fresh, left_padded([9]), logits_processor=[asks_itself])


def test_a_refused_model_is_refused_again_and_keeps_no_engine():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).eval()
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="BloomForCausalLM"):
            paged(model, {"input_ids": torch.tensor([[5, 6]])})
    assert engines_of(model) == []


def test_calls_warn_of_nothing(fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paged(fresh)
        paged(fresh, do_sample=True, no_repeat_ngram_size=2)


# What people have reported of other paged paths


def test_short_prompts_that_begin_alike_share_their_beginning(fresh):
    prefix, tails = left_padded([64])["input_ids"], left_padded([5, 5], seed=8)["input_ids"]
    for number, tail in enumerate(tails):
        inputs = {"input_ids": torch.cat([prefix, tail[None]], dim=1)}
        assert_equals_stock(fresh, inputs, **LENGTH, paged_config={"block_size": 16})
        assert engine_of(fresh).stats().num_cached_tokens == 64 * number


def test_an_engine_whose_step_fails_tells_the_caller_and_serves_the_next_call(fresh, monkeypatch):
    expected = paged(fresh)
    engine = engine_of(fresh)
    forward, calls = engine.runner.forward, []

    def fails_at_the_third(batch):
        calls.append(batch)
        if len(calls) >= 3:
            raise MemoryError("no more")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", fails_at_the_third)
    with pytest.raises(MemoryError, match="no more"):
        paged(fresh)
    with pytest.raises(MemoryError, match="no more"):
        paged(fresh, no_repeat_ngram_size=2)
    monkeypatch.undo()
    assert_all_blocks_are_back(engine)
    assert torch.equal(paged(fresh), expected)


def test_the_cache_is_as_large_as_the_calls_need(fresh):
    per_token = 2 * 3 * 2 * 16 * 4
    paged(fresh)
    # Five rows of at most 56 tokens, each in whole blocks of 16 and one to spare.
    assert engine_of(fresh).stats().reserved_bytes <= 5 * (64 + 16) * per_token
