"""install, uninstall and release: what they patch, undo and free."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import runpy
import weakref

import pytest
import torch
from stock_equality import assert_equals_stock, engines_of, left_padded
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM, GenerationMixin

import paged_backend
from paged_backend.errors import ConfigError
from paged_backend.integrations.huggingface import engines, patches

INPUTS = left_padded([5, 9])
SHORT = {"max_new_tokens": 6}


def patched_functions():
    return vars(GenerationMixin)["generate"], vars(GenerationMixin)["_sample"]


def paged(model, **options):
    return model.generate(**INPUTS, **SHORT, cache_impl="paged", **options)


def test_importing_the_package_patches_nothing():
    paged_backend.uninstall()
    stock = patched_functions()
    for module in (paged_backend, patches):
        runpy.run_path(module.__file__)
    assert patched_functions() == stock


def test_installing_twice_is_installing_once():
    once = patched_functions()
    paged_backend.install()
    assert patched_functions() == once
    paged_backend.uninstall()
    assert patched_functions() != once


def test_one_uninstall_undoes_any_number_of_installs(fresh):
    for _ in range(3):
        paged_backend.install()
    paged_backend.uninstall()
    with pytest.raises(ValueError, match="cache_impl"):
        paged(fresh)


def test_uninstall_restores_the_very_functions_and_can_be_repeated():
    installed = patched_functions()
    paged_backend.uninstall()
    stock = patched_functions()
    assert stock == tuple(function.__wrapped__ for function in installed)
    paged_backend.uninstall()
    paged_backend.install()
    paged_backend.uninstall()
    assert patched_functions() == stock


def test_the_patches_keep_the_signatures(fresh):
    generate, sample = patched_functions()
    paged_backend.uninstall()
    stock_generate, stock_sample = patched_functions()
    from inspect import signature

    assert signature(generate) == signature(stock_generate)
    assert signature(sample) == signature(stock_sample)
    assert generate.__doc__ == stock_generate.__doc__


def test_a_patch_on_top_of_ours_stays_and_ours_lets_calls_through(fresh):
    ours = patched_functions()[0]
    calls = []

    @functools.wraps(ours)
    def theirs(model, *args, **kwargs):
        calls.append(sorted(kwargs))
        return ours(model, *args, **kwargs)

    stock_generate = ours.__wrapped__
    GenerationMixin.generate = theirs
    try:
        assert paged(fresh).shape == (2, 15)
        with pytest.warns(RuntimeWarning, match="patched again"):
            paged_backend.uninstall()
        assert patched_functions()[0] is theirs
        assert patched_functions()[1] is not ours
        # Without us, cache_impl is an unknown argument again.
        with pytest.raises(ValueError, match="cache_impl"):
            paged(fresh)
        assert len(calls) == 2
    finally:
        GenerationMixin.generate = stock_generate


def test_install_on_top_of_a_patch_that_hides_ours_serves_calls_once(fresh):
    ours = patched_functions()[0]
    stock_generate = ours.__wrapped__

    def theirs(model, *args, **kwargs):
        return ours(model, *args, **kwargs)

    GenerationMixin.generate = theirs
    try:
        paged_backend.install()
        assert patched_functions()[0] is not theirs
        fresh.generation_config.cache_impl = "paged"
        by_default = fresh.generate(**INPUTS, **SHORT)
        assert torch.equal(by_default, paged(fresh))
        paged_backend.uninstall()
        assert patched_functions()[0] is theirs
    finally:
        GenerationMixin.generate = stock_generate
        GenerationMixin._sample = vars(GenerationMixin)["_sample"].__wrapped__


def test_a_call_without_cache_impl_runs_stock_code(fresh, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("the paged engine was asked")

    monkeypatch.setattr("paged_backend.integrations.huggingface.patches.decode", never)
    fresh.generate(**INPUTS, **SHORT)
    fresh.generate(**INPUTS, **SHORT, cache_impl=None)
    fresh.generate(**INPUTS, **SHORT, num_beams=2)
    with pytest.raises(AssertionError, match="was asked"):
        paged(fresh)


def test_stock_is_the_same_before_during_and_after(fresh):
    paged_backend.uninstall()
    torch.manual_seed(3)
    before = fresh.generate(**INPUTS, **SHORT, do_sample=True)
    paged_backend.install()
    paged(fresh)
    torch.manual_seed(3)
    during = fresh.generate(**INPUTS, **SHORT, do_sample=True)
    paged_backend.uninstall()
    torch.manual_seed(3)
    after = fresh.generate(**INPUTS, **SHORT, do_sample=True)
    assert torch.equal(before, during)
    assert torch.equal(before, after)


def test_the_model_is_left_as_it_was(fresh):
    attributes = {name: set(vars(module)) for name, module in fresh.named_modules()}
    config, generation_config = fresh.config.to_dict(), fresh.generation_config.to_dict()
    implementation = fresh.config._attn_implementation
    buffers = {name: buffer.clone() for name, buffer in fresh.named_buffers()}
    paged(fresh)
    assert {name: set(vars(module)) for name, module in fresh.named_modules()} == attributes
    assert fresh.config.to_dict() == config
    assert fresh.generation_config.to_dict() == generation_config
    assert fresh.config._attn_implementation == implementation
    for name, buffer in fresh.named_buffers():
        assert torch.equal(buffer, buffers[name])


def test_pickle_deepcopy_and_save_pretrained_work_after_use(fresh, tmp_path):
    expected = paged(fresh)
    assert torch.equal(paged(copy.deepcopy(fresh)), expected)
    assert torch.equal(paged(pickle.loads(pickle.dumps(fresh))), expected)
    file = io.BytesIO()
    torch.save(fresh, file)
    file.seek(0)
    assert torch.equal(paged(torch.load(file, weights_only=False)), expected)
    fresh.save_pretrained(tmp_path)
    assert torch.equal(paged(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_the_engine_is_kept_between_calls_for_each_model_and_configuration(fresh):
    paged(fresh)
    paged(fresh, paged_config={})
    paged(fresh, paged_config=paged_backend.EngineConfig())
    assert len(engines_of(fresh)) == 1
    paged(fresh, paged_config={"block_size": 7, "scheduler_options": {}})
    paged(fresh, paged_config={"scheduler_options": {}, "block_size": 7})
    assert len(engines_of(fresh)) == 2
    assert engines_of(make_tiny("llama")) == []


def test_a_dead_model_takes_its_engine_and_cache_along():
    model = make_tiny("llama")
    paged(model)
    (engine,) = engines_of(model)
    gone = [weakref.ref(model), weakref.ref(engine), weakref.ref(engine.runner.kv_cache)]
    num_models = len(engines._by_model)
    del model, engine
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert len(engines._by_model) < num_models


def test_release_closes_the_engines_and_the_next_call_makes_new_ones(fresh):
    expected = paged(fresh)
    (engine,) = engines_of(fresh)
    paged_backend.release(fresh)
    assert engine.is_closed
    assert engines_of(fresh) == []
    assert torch.equal(paged(fresh), expected)
    paged_backend.release(make_tiny("gpt2"))


@pytest.mark.parametrize("wrong", [None, "gpt2", 5])
def test_releasing_what_is_no_model_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=f"release takes the model .* got a {type(wrong).__name__}"):
        paged_backend.release(wrong)


def test_plugins_of_paged_config_hear_of_the_steps(fresh):
    class Observer:
        steps = 0

        @paged_backend.hookimpl
        def step_finished(self, stats):
            self.steps += 1

    observer = Observer()
    paged(fresh, paged_config={"plugins": [observer]})
    assert observer.steps == 6
    paged(fresh, paged_config={"plugins": [observer]})
    assert observer.steps == 12
    paged(fresh)
    assert observer.steps == 12
    with pytest.raises(ConfigError, match="plugins"):
        paged(fresh, paged_config={"plugins": observer})


def test_an_unknown_engine_option_is_named(fresh):
    with pytest.raises(ConfigError, match="blocksize"):
        paged(fresh, paged_config={"blocksize": 7})
    with pytest.raises(ConfigError, match="paged_config"):
        paged(fresh, paged_config=["block_size", 7])


def test_generation_goes_on_in_a_fresh_install_with_the_kept_engine(fresh):
    expected = paged(fresh)
    (engine,) = engines_of(fresh)
    paged_backend.uninstall()
    paged_backend.install()
    assert torch.equal(paged(fresh), expected)
    assert engines_of(fresh) == [engine]
    assert_equals_stock(fresh, INPUTS, **SHORT)
