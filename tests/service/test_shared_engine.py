"""SharedEngine: threads that come at once share one batch, and fail one by one."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from block_checks import assert_all_blocks_are_back
from oracle import draw_prompts
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams, SharedEngine
from paged_backend.errors import EngineClosed, RequestRefused

# Longer than any wait in here can take unless something hangs.
PATIENCE_S = 30


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


@pytest.fixture
def shared(llama):
    return SharedEngine(Engine(llama, elastic=True))


def request(prompt, max_tokens=8, **options):
    return {"prompt": prompt, "params": SamplingParams(max_tokens=max_tokens, ignore_eos=True), **options}


def alone(llama, prompt, max_tokens=8):
    (output,) = Engine(llama, elastic=True).generate(prompt, request(prompt, max_tokens)["params"])
    return output.token_ids


def tokens(outputs):
    return [output.token_ids for output in outputs]


def assert_idle(shared):
    assert_all_blocks_are_back(shared.engine)
    assert shared._leader is None
    assert not shared._inbox
    assert not shared._running
    assert not shared._abandoned


class Gate:
    """A stop condition that reports the first step and holds the engine there until it is opened."""

    def __init__(self, error: BaseException | None = None):
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.error = error

    def __call__(self, request):
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return False


@contextmanager
def threads(count):
    with ThreadPoolExecutor(count) as pool:
        yield pool


def wait_for_inbox(shared, count):
    """Until ``count`` submissions wait for the leader."""
    deadline = threading.Event()
    for _ in range(PATIENCE_S * 100):
        if len(shared._inbox) == count:
            return
        deadline.wait(0.01)
    raise AssertionError("nothing was submitted")


def lead_with(shared, pool, gate, prompt=(5, 6, 7), max_tokens=8) -> Future:
    """A thread that leads and stands in its first step until the gate opens."""
    future = pool.submit(shared.run, [request(list(prompt), max_tokens, stop_condition=gate)])
    assert gate.reached.wait(PATIENCE_S), future.exception(0)
    return future


def test_one_thread_gets_its_outputs_in_order(llama, shared):
    prompts = draw_prompts((5, 1, 30))
    outputs = shared.run([request(prompt) for prompt in prompts])
    assert tokens(outputs) == [alone(llama, prompt) for prompt in prompts]
    assert_idle(shared)


def test_no_requests_give_no_outputs(shared):
    assert shared.run([]) == []
    assert_idle(shared)


def test_threads_at_once_share_a_batch_and_get_what_they_get_alone(llama, shared):
    prompts = draw_prompts([3 + 2 * n for n in range(16)])
    expected = [alone(llama, prompt) for prompt in prompts]
    with threads(8) as pool:
        gate = Gate()
        leader = lead_with(shared, pool, gate)
        futures = [pool.submit(shared.run, [request(prompts[2 * n]), request(prompts[2 * n + 1])]) for n in range(7)]
        wait_for_inbox(shared, 7)
        gate.opened.set()
        results = [future.result(PATIENCE_S) for future in futures]
        leader.result(PATIENCE_S)
    assert [output for result in results for output in tokens(result)] == expected[:14]
    assert shared.engine.stats().peak_running == 15
    assert_idle(shared)


def test_many_threads_with_many_calls_each_all_come_out_right(llama, shared):
    prompts = draw_prompts([1 + n % 7 for n in range(24)])
    expected = [alone(llama, prompt, 1 + n % 5) for n, prompt in enumerate(prompts)]
    with threads(8) as pool:
        results = list(pool.map(lambda n: tokens(shared.run([request(prompts[n], 1 + n % 5)])), range(24)))
    assert results == [[row] for row in expected]
    assert_idle(shared)


def test_the_leader_leaves_when_its_own_requests_are_over(llama, shared):
    with threads(2) as pool:
        gate = Gate()
        leader = lead_with(shared, pool, gate, max_tokens=2)
        follower_gate = Gate()
        follower = pool.submit(shared.run, [request([9, 8], 6, stop_condition=follower_gate)])
        wait_for_inbox(shared, 1)
        gate.opened.set()
        assert follower_gate.reached.wait(PATIENCE_S)
        follower_gate.opened.set()
        leader.result(PATIENCE_S)
        assert tokens(follower.result(PATIENCE_S)) == [alone(llama, [9, 8], 6)]
    assert_idle(shared)


def test_a_refused_request_raises_in_its_own_thread_only(llama, shared):
    with threads(3) as pool:
        gate = Gate()
        leader = lead_with(shared, pool, gate)
        refused = pool.submit(shared.run, [request([5, 6]), request([5, 9999])])
        wait_for_inbox(shared, 1)
        fine = pool.submit(shared.run, [request([9, 8])])
        wait_for_inbox(shared, 2)
        gate.opened.set()
        with pytest.raises(RequestRefused, match="9999"):
            refused.result(PATIENCE_S)
        assert tokens(fine.result(PATIENCE_S)) == [alone(llama, [9, 8])]
        assert tokens(leader.result(PATIENCE_S)) == [alone(llama, [5, 6, 7])]
    assert_idle(shared)


def test_a_request_that_fails_is_its_own_threads_matter(llama, shared):
    with threads(2) as pool:
        gate = Gate(ZeroDivisionError("mine"))
        leader = lead_with(shared, pool, gate)
        follower = pool.submit(shared.run, [request([9, 8])])
        wait_for_inbox(shared, 1)
        gate.opened.set()
        (output,) = leader.result(PATIENCE_S)
        assert output.finish_reason == "error"
        assert isinstance(output.error, ZeroDivisionError)
        assert tokens(follower.result(PATIENCE_S)) == [alone(llama, [9, 8])]
    assert_idle(shared)


def test_a_leader_that_is_interrupted_takes_only_its_own_requests_along(llama, shared):
    with threads(3) as pool:
        gate = Gate(KeyboardInterrupt())
        leader = lead_with(shared, pool, gate)
        followers = [pool.submit(shared.run, [request(prompt)]) for prompt in ([9, 8], [4, 4, 4])]
        wait_for_inbox(shared, 2)
        gate.opened.set()
        with pytest.raises(KeyboardInterrupt):
            leader.result(PATIENCE_S)
        results = [tokens(future.result(PATIENCE_S)) for future in followers]
    assert results == [[alone(llama, [9, 8])], [alone(llama, [4, 4, 4])]]
    assert_idle(shared)
    assert tokens(shared.run([request([9, 8])])) == results[0]


def test_a_leader_whose_step_raises_hands_over_and_running_followers_keep_their_tokens(llama, shared, monkeypatch):
    step, failing = shared.engine.step, threading.Event()

    def sometimes(**options):
        if failing.is_set():
            failing.clear()
            raise RuntimeError("the machine is unwell")
        return step(**options)

    monkeypatch.setattr(shared.engine, "step", sometimes)
    with threads(2) as pool:
        gate, follower_gate = Gate(), Gate()
        leader = lead_with(shared, pool, gate, max_tokens=50)
        follower = pool.submit(shared.run, [request([9, 8], 6, stop_condition=follower_gate)])
        wait_for_inbox(shared, 1)
        gate.opened.set()
        assert follower_gate.reached.wait(PATIENCE_S)
        failing.set()
        follower_gate.opened.set()
        with pytest.raises(RuntimeError, match="unwell"):
            leader.result(PATIENCE_S)
        assert tokens(follower.result(PATIENCE_S)) == [alone(llama, [9, 8], 6)]
    assert_idle(shared)


def test_an_engine_that_keeps_failing_tells_every_thread(shared, monkeypatch):
    def never(**options):
        raise RuntimeError("the machine is dead")

    with threads(3) as pool:
        gate = Gate()
        leader = lead_with(shared, pool, gate)
        followers = [pool.submit(shared.run, [request([9, 8])]) for _ in range(2)]
        wait_for_inbox(shared, 2)
        monkeypatch.setattr(shared.engine, "step", never)
        gate.opened.set()
        for future in [leader, *followers]:
            with pytest.raises(RuntimeError, match="dead"):
                future.result(PATIENCE_S)
    assert_idle(shared)


@pytest.mark.parametrize("running", [False, True], ids=["waiting", "running"])
def test_ctrl_c_in_a_follower_gives_its_blocks_back(llama, shared, running):
    gate, follower_gate = Gate(), Gate()

    def press_ctrl_c():
        wait_for_inbox(shared, 1)
        if running:
            gate.opened.set()
            assert follower_gate.reached.wait(PATIENCE_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with threads(2) as pool:
        leader = lead_with(shared, pool, gate, max_tokens=4)
        presser = pool.submit(press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            shared.run([request([9, 8], 100, stop_condition=follower_gate)])
        presser.result(PATIENCE_S)
        gate.opened.set()
        follower_gate.opened.set()
        assert tokens(leader.result(PATIENCE_S)) == [alone(llama, [5, 6, 7], 4)]
    assert_idle(shared)


def test_waiting_for_the_engine_from_inside_its_own_step_is_refused(llama, shared):
    seen = []

    def nested(request_):
        with pytest.raises(EngineClosed, match="in the middle of a step"):
            shared.run([request([9, 8])])
        seen.append(request_.num_output_tokens)
        return False

    outputs = shared.run([request([5, 6, 7], 3, stop_condition=nested)])
    assert seen == [1, 2, 3]
    assert tokens(outputs) == [alone(llama, [5, 6, 7], 3)]
    assert_idle(shared)


def test_close_lets_running_threads_finish_and_takes_no_more(llama, shared):
    with threads(2) as pool:
        gate = Gate()
        leader = lead_with(shared, pool, gate)
        follower = pool.submit(shared.run, [request([9, 8])])
        wait_for_inbox(shared, 1)
        shared.close()
        assert not shared.engine.is_closed
        with pytest.raises(EngineClosed):
            shared.run([request([5])])
        gate.opened.set()
        assert tokens(leader.result(PATIENCE_S)) == [alone(llama, [5, 6, 7])]
        assert tokens(follower.result(PATIENCE_S)) == [alone(llama, [9, 8])]
    assert shared.engine.is_closed
    shared.close()


def test_the_cache_grows_to_the_lengths_of_all_who_run(shared):
    with threads(2) as pool:
        gate = Gate()
        leader = lead_with(shared, pool, gate, max_tokens=40)
        follower = pool.submit(shared.run, [request([7] * 100, 60), request([8] * 50, 60)])
        wait_for_inbox(shared, 1)
        gate.opened.set()
        leader.result(PATIENCE_S)
        follower.result(PATIENCE_S)
    assert shared.engine.stats().num_preemptions == 0
    assert_idle(shared)


def test_autocast_of_the_thread_that_leads_does_not_reach_the_requests_of_others(llama):
    # Operations in C++ know no autocast.
    shared = SharedEngine(Engine(llama, elastic=True, optimize="none"))
    leading, following = draw_prompts((12, 9))
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
    (expected,) = Engine(llama, elastic=True, optimize="none").generate(following, params)
    gate = Gate()

    def lead():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return shared.run([request(leading, 30, stop_condition=gate)])

    with threads(2) as pool:
        pool.submit(lead)
        assert gate.reached.wait(PATIENCE_S)
        future = pool.submit(shared.run, [{"prompt": following, "params": params}])
        wait_for_inbox(shared, 1)
        gate.opened.set()
        (output,) = future.result(PATIENCE_S)
    for got, want in zip(output.logprobs, expected.logprobs, strict=True):
        assert got == pytest.approx(want, abs=1e-5)
