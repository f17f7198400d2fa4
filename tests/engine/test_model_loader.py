"""A model that changed is served as it is now, or its engine says why not; nothing is ever half loaded."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch
from managed_blocks import make_manager
from oracle import draw_prompts, stock_greedy
from tiny_models import make_tiny

from paged_backend import AsyncEngine, Engine, SamplingParams, hookimpl
from paged_backend.engine.model_loader import ModelLoader
from paged_backend.errors import ConfigError, RequestFailed, UnsupportedModel
from paged_backend.memory.kv_cache import KVCache

NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = draw_prompts([20])[0]


@pytest.fixture
def llama():
    return make_tiny("llama")


def change(model) -> None:
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))


def break_model(model):
    """Make it one that cannot be proven; returns what repairs it."""
    hook = model.model.layers[1].register_forward_hook(
        lambda module, arguments, output: output * torch.rand(()) * 9 if torch.is_tensor(output) else output
    )
    return hook.remove


def no_cache(monkeypatch):
    make = KVCache.__init__

    def refuse(self, layers, groups, num_blocks, *args):
        if any(num_blocks):
            raise RuntimeError("can't allocate memory")
        make(self, layers, groups, num_blocks, *args)

    monkeypatch.setattr(KVCache, "__init__", refuse)


def run(engine):
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    return outputs


def test_requests_hear_why_the_changed_model_cannot_be_served_and_a_repaired_one_is(llama):
    heard = []

    class Listener:
        @hookimpl
        def request_finished(self, request, output):
            heard.append((request.request_id, output.finish_reason))

    engine = Engine(llama, plugins=[Listener()])
    running = engine.add_request(PROMPT, GREEDY)
    engine.step()
    waiting = engine.add_request(PROMPT[:7], GREEDY)
    repair = break_model(llama)
    with pytest.raises(UnsupportedModel):
        engine.weights_changed()
    assert heard == [(running, "error"), (waiting, "error")]
    outputs = run(engine)
    assert outputs.keys() == {running, waiting}
    assert all(isinstance(output.error, UnsupportedModel) for output in outputs.values())
    for call in (engine.add_request, lambda prompt: engine.generate([prompt])):
        with pytest.raises(UnsupportedModel):
            call(PROMPT)
    assert engine.stats().num_waiting == engine.stats().num_running == 0
    assert not engine.has_unfinished_requests()
    repair()
    change(llama)
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == stock_greedy(llama, PROMPT, NUM_TOKENS)
    engine.blocks.check_integrity()


def test_a_cache_that_cannot_be_had_again_fails_the_requests_and_is_tried_again(llama, monkeypatch):
    engine = Engine(llama)
    request_id = engine.add_request(PROMPT, GREEDY)
    engine.step()
    change(llama)
    with monkeypatch.context() as patch:
        no_cache(patch)
        # The proof needs a cache of its own.
        patch.setattr("paged_backend.engine.served_model.prove", lambda *args: None)
        patch.setattr(
            "paged_backend.engine.served_model.swap_modules", lambda twin, **options: engine._loader.served.swaps
        )
        with pytest.raises(ConfigError, match=r"find no memory for .* can't allocate memory"):
            engine.weights_changed()
        assert run(engine)[request_id].finish_reason == "error"
        assert engine.stats().reserved_bytes == 0
        with pytest.raises(ConfigError, match="find no memory"):
            engine.add_request(PROMPT, GREEDY)
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == stock_greedy(llama, PROMPT, NUM_TOKENS)
    assert engine.stats().reserved_bytes > 0


def test_a_model_that_is_gone_after_its_cache_was_lost_gets_another_one(monkeypatch):
    model = make_tiny("llama")
    engine = Engine(model)
    expected = engine.generate([PROMPT], GREEDY)[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr("paged_backend.engine.served_model.BlockManager", None)
        with pytest.raises(TypeError):
            engine.weights_changed()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == expected


def test_an_interrupted_reload_is_made_up_for_before_the_next_step(llama, monkeypatch):
    engine = Engine(llama)
    first = engine.outputs(engine.add_request(PROMPT, GREEDY))[0]
    engine.step()
    begun = list(first.token_ids)
    change(llama)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    for where in ("paged_backend.engine.served_model.prove", "paged_backend.engine.served_model.KVCache"):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.weights_changed()
    run(engine)
    assert first.token_ids == begun + stock_greedy(llama, PROMPT + begun, NUM_TOKENS - len(begun))


def test_a_service_tells_its_callers_why_the_changed_model_cannot_be_served_and_goes_on(llama):
    with AsyncEngine(Engine(llama)) as service:
        service.pause()
        handle = service.submit(PROMPT, GREEDY)
        assert service.stats().num_waiting == 1
        repair = break_model(llama)
        with pytest.raises(UnsupportedModel):
            service.weights_changed()
        service.resume()
        with pytest.raises(RequestFailed) as caught:
            handle.result(30)
        assert isinstance(caught.value.__cause__, UnsupportedModel)
        repair()
        assert service.submit(PROMPT, GREEDY).result(30).token_ids == stock_greedy(llama, PROMPT, NUM_TOKENS)


def test_weights_changed_tells_of_one_element_of_a_large_weight_edited_through_data():
    model = make_tiny("llama", vocab_size=512)
    engine = Engine(model)
    before = engine.generate([PROMPT], GREEDY)[0].token_ids
    weight = model.lm_head.weight
    assert weight.numel() > 1 << 14
    # Between two of the elements that are compared.
    weight.data[before[0], 1] -= 1e4
    weight.data[before[0], 1] *= -1 if stock_greedy(model, PROMPT, 1)[0] == before[0] else 1
    expected = stock_greedy(model, PROMPT, NUM_TOKENS)
    assert expected != before
    engine.weights_changed()
    output = engine.generate([PROMPT], GREEDY)[0]
    assert output.token_ids == expected
    assert output.metrics.num_cached_tokens == 0


def test_one_element_of_a_norm_edited_through_data_is_noticed(llama):
    engine = Engine(llama)
    before = engine.generate([PROMPT], GREEDY)[0].token_ids
    llama.model.norm.weight.data[37] = 30.0
    expected = stock_greedy(llama, PROMPT, NUM_TOKENS)
    assert expected != before
    output = engine.generate([PROMPT], GREEDY)[0]
    assert output.token_ids == expected
    assert output.metrics.num_cached_tokens == 0


def test_pinned_prefixes_outlive_a_reload_and_an_unpinned_one_does_not(llama):
    engine = Engine(llama, block_size=4)
    engine.pin_prefix(PROMPT[:8])
    engine.pin_prefix(PROMPT[8:18])
    # The same full blocks as were pinned.
    assert engine.unpin_prefix(PROMPT[8:16])
    engine.weights_changed()
    assert engine.blocks.pools[0].num_pinned == 2
    assert not engine.unpin_prefix(PROMPT[8:18])
    assert engine.unpin_prefix(PROMPT[:8])


def test_a_reload_frees_the_old_cache_before_it_takes_the_new_one(llama, monkeypatch):
    engine = Engine(llama)
    runner, reserved = engine.runner, []
    make = KVCache.__init__

    def noting(self, layers, groups, num_blocks, *args):
        reserved.append((list(num_blocks), runner.kv_cache.num_bytes))
        make(self, layers, groups, num_blocks, *args)

    monkeypatch.setattr(KVCache, "__init__", noting)
    engine.weights_changed()
    assert reserved[-1] == (list(engine.runner.kv_cache.num_blocks), 0)
    assert engine.generate([PROMPT], GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize("options", [{}, {"optimize": "none"}], ids=str)
def test_weights_written_while_requests_run_are_used_from_the_next_step_on(llama, options):
    engine = Engine(llama, **options)
    running = engine.add_request(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    before = list(engine.outputs(running)[0].token_ids)
    llama.load_state_dict(make_tiny("llama", seed=5).state_dict())
    added = engine.add_request([9, 8, 7], GREEDY)
    outputs = run(engine)
    assert outputs[added].token_ids == stock_greedy(llama, [9, 8, 7], NUM_TOKENS)
    # What runs keeps its tokens, and goes on as the new weights would.
    assert outputs[running].token_ids == before + stock_greedy(llama, PROMPT + before, 40 - len(before))


def test_a_cache_that_finds_no_memory_is_refused_with_the_numbers(llama, monkeypatch):
    make = mmap.mmap

    def little_left(where, num_bytes, **kwargs):
        if num_bytes > 100 << 20:
            raise OSError(12, "Cannot allocate memory")
        return make(where, num_bytes, **kwargs)

    monkeypatch.setattr("mmap.mmap", little_left)
    with pytest.raises(ConfigError, match=r"no memory for [\d,]+ bytes; give a smaller kv_cache_memory") as refused:
        Engine(llama, kv_cache_memory="1GiB")
    assert "Cannot allocate memory" in str(refused.value)


# Without a model


class Model:
    pass


class Served:
    """What a loader knows of a ServedModel; its cache is books only."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.twin = self
        self.reason: str | None = None
        self.fails = False

    def stale_reason(self, *, at_a_glance: bool) -> str | None:
        return self.reason if at_a_glance else f"{self.reason}, looked at closely"

    def make_cache(self, num_blocks: list[int] | None = None) -> None:
        self.log.append(f"make {num_blocks}")
        if self.fails:
            raise MemoryError("no room")
        self.blocks = make_manager("full", 8)

    def drop_cache(self) -> list[int]:
        self.log.append("drop")
        return [8]


class Serve:
    """Makes what is served, or fails with ``error``."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.error: BaseException | None = None
        self.fails = False

    def __call__(self, model: Model) -> Served:
        self.log.append("serve")
        if self.error is not None:
            raise self.error
        served = Served(self.log)
        served.fails = self.fails
        return served


def test_a_reload_drops_the_old_cache_before_it_makes_one_and_keeps_what_was_pinned():
    model, serve = Model(), Serve()
    loader = ModelLoader(model, serve)
    old = loader.served
    old.blocks.pin([1] * 8, "a")
    loader.reload("changed")
    assert serve.log == ["serve", "make None", "serve", "drop", "make [8]"]
    assert loader.served is not old
    assert list(loader.served.blocks.pins) == [("a", (1,) * 8)]
    assert loader.served.blocks.pools[0].num_pinned == 2
    assert loader.stale_reason(at_a_glance=True) is None


def test_the_twin_is_asked_how_closely_it_is_told_to_look():
    model = Model()
    loader = ModelLoader(model, Serve())
    loader.served.reason = "moved"
    assert loader.stale_reason(at_a_glance=True) == "moved"
    assert loader.stale_reason(at_a_glance=False) == "moved, looked at closely"


@pytest.mark.parametrize("error", [ValueError("cannot be proven"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["serve", "cache"])
def test_a_reload_that_fails_is_asked_for_until_one_does_not(where, error):
    model, serve = Model(), Serve()
    loader = ModelLoader(model, serve)
    old = loader.served
    old.blocks.pin([1] * 8)
    serve.error, serve.fails = (error, False) if where == "serve" else (None, True)
    for _ in range(2):
        with pytest.raises((type(error), MemoryError)):
            loader.reload("changed")
        assert loader.served is old
        assert loader.stale_reason(at_a_glance=True) == "changed"
    serve.error, serve.fails = None, False
    loader.reload("changed")
    assert loader.served is not old
    assert loader.stale_reason(at_a_glance=True) is None
    assert loader.served.blocks.pools[0].num_pinned == 2


def test_a_model_that_is_gone_is_served_on_with_a_new_cache():
    serve, model = Serve(), Model()
    loader = ModelLoader(model, serve)
    gone, served = weakref.ref(model), loader.served
    del model
    assert gone() is None
    loader.reload("its cache was lost")
    assert loader.served is served
    assert serve.log == ["serve", "make None", "drop", "make [8]"]
