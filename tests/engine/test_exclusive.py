"""An engine belongs to one call of one thread at a time, and says so to anybody else."""

from __future__ import annotations

import random
import signal
import threading

import pytest
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams, hookimpl
from paged_backend.errors import EngineBusy, EngineClosed

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
PATIENCE_S = 30
CALLS = {
    "step": lambda engine: engine.step(),
    "settle": lambda engine: engine.settle(),
    "add_request": lambda engine: engine.add_request([5], SHORT),
    "enqueue": lambda engine: engine.enqueue(engine.prepare([5], SHORT)),
    "generate": lambda engine: engine.generate([[5]], SHORT),
    "abort": lambda engine: engine.abort("0"),
    "pin_prefix": lambda engine: engine.pin_prefix([5] * 20),
    "unpin_prefix": lambda engine: engine.unpin_prefix([5] * 20),
    "fit": lambda engine: engine.fit([5]),
    "weights_changed": lambda engine: engine.weights_changed(),
    "close": lambda engine: engine.close(),
}


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


class Pausing:
    """Stops each step at its end until it may go on."""

    def __init__(self) -> None:
        self.arrived, self.allowed = threading.Event(), threading.Event()

    @hookimpl
    def step_finished(self, stats) -> None:
        self.arrived.set()
        assert self.allowed.wait(PATIENCE_S)


@pytest.mark.parametrize("name", ["step", "generate"])
def test_a_second_thread_is_told_to_use_the_async_engine_and_harms_nothing(llama, name):
    expected = Engine(llama).generate([[5, 6]], SHORT)[0].token_ids
    pausing = Pausing()
    engine = Engine(llama, plugins=[pausing])
    results = []

    def run() -> None:
        if name == "generate":
            results.extend(engine.generate([[5, 6]], SHORT))
        else:
            results.extend(engine.outputs(engine.add_request([5, 6], SHORT)))
            while engine.has_unfinished_requests():
                engine.step()

    thread = threading.Thread(target=run)
    thread.start()
    assert pausing.arrived.wait(PATIENCE_S)
    for call in CALLS.values():
        with pytest.raises(EngineBusy, match=r"one thread at a time: use AsyncEngine\(engine\)"):
            call(engine)
    pausing.allowed.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert [output.token_ids for output in results] == [expected]
    assert engine.generate([[5, 6]], SHORT)[0].token_ids == expected


def test_two_threads_one_after_the_other_are_fine(llama):
    engine = Engine(llama)
    expected = engine.generate([[5, 6]], SHORT)[0].token_ids
    results = []
    thread = threading.Thread(target=lambda: results.extend(engine.generate([[5, 6]], SHORT)))
    thread.start()
    thread.join(PATIENCE_S)
    assert results[0].token_ids == expected


@pytest.mark.parametrize("hook", ["request_added", "step_finished", "request_finished"])
def test_a_hook_that_calls_back_gets_an_answer_each_time_and_the_request_its_tokens(llama, hook):
    answers = {}

    def call_back() -> None:
        for name, call in CALLS.items():
            try:
                answers[name] = call(engine)
            except EngineBusy as error:
                answers[name] = error
        stats.append(engine.stats())

    stats = []
    plugin = type("Plugin", (), {hook: hookimpl(staticmethod(call_back))})()
    expected = Engine(llama).generate([[5, 6]], SHORT)[0].token_ids
    engine = Engine(llama, plugins=[plugin])
    assert engine.generate([[5, 6]], SHORT)[0].token_ids == expected
    assert answers.keys() == CALLS.keys()
    for answer in answers.values():
        assert isinstance(answer, EngineBusy)
        assert "must not call it again" in str(answer)
    assert stats
    assert engine.stats().policy_errors == {}
    engine.blocks.check_integrity()


def test_a_hook_that_is_told_of_the_new_engine_may_use_it(llama):
    seen = []

    class Eager:
        @hookimpl
        def engine_started(self, engine) -> None:
            seen.append((engine.stats().num_steps, engine.generate([[5, 6]], SHORT)[0].finish_reason))

    engine = Engine(llama, plugins=[Eager()])
    assert seen == [(0, "length")]
    assert engine.stats().policy_errors == {}


def test_a_hook_that_asks_a_closed_engine_hears_that_it_is_closed(llama):
    answers = []

    class Curious:
        @hookimpl
        def engine_stopped(self, engine) -> None:
            for call in (engine.stats, engine.step, engine.explain_memory):
                with pytest.raises(EngineClosed, match="the engine is closed") as caught:
                    call()
                answers.append(caught.value)

    engine = Engine(llama, plugins=[Curious()])
    engine.close()
    assert len(answers) == 3
    assert engine.is_closed


def test_a_closed_engine_cannot_be_entered(llama):
    engine = Engine(llama)
    engine.close()
    with pytest.raises(EngineClosed, match="make a new one"), engine:
        pass


def test_a_call_that_raises_gives_its_turn_back(llama):
    engine = Engine(llama)
    with pytest.raises(ValueError, match="empty"):
        engine.add_request([])
    assert engine.generate([[5]], SHORT)[0].finish_reason == "length"


def test_ctrl_c_at_any_moment_of_a_call_gives_the_turn_back(llama):
    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    def call_until_interrupted(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            engine.abort("nobody")

    engine, moments = Engine(llama), random.Random(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            with pytest.raises(KeyboardInterrupt):
                call_until_interrupted(moments.uniform(1e-5, 2e-4))
            assert engine.abort("nobody") is False
    finally:
        signal.signal(signal.SIGALRM, before)
