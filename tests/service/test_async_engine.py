"""AsyncEngine: many callers in threads and event loops share one batch, and leave it as they please."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clock import Clock
from oracle import assert_greedy, draw_prompts, stock_greedy
from service_checks import PATIENCE_S, Raises, Script, Steps, assert_closed, assert_idle, greedy, wait_until
from tiny_models import make_tiny
from tiny_tokenizers import byte_tokenizer

from paged_backend import AsyncEngine, Delta, Engine, SamplingParams
from paged_backend.errors import (
    ConfigError,
    ContextOverflow,
    DeadlineExceeded,
    EngineBusy,
    EngineClosed,
    QueueFull,
    RequestFailed,
    RequestRefused,
    SamplingFailed,
)

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def llama(tokenizer):
    return make_tiny("llama", vocab_size=len(tokenizer))


@pytest.fixture
def engine(llama, tokenizer):
    return Engine(llama, tokenizer, max_num_seqs=64, kv_cache_memory="16MiB")


@pytest.fixture
def steps():
    """Holds the engine of ``held`` at the end of each of its steps."""
    steps = Steps()
    yield steps
    steps.free()


@pytest.fixture
def held(llama, tokenizer, steps):
    """A running service whose steps the test lets through one by one."""
    service = AsyncEngine(Engine(llama, tokenizer, plugins=[steps], kv_cache_memory="16MiB")).start()
    yield service
    steps.free()
    service.close(graceful=False)


def script(tokenizer, prompt: str, text: str) -> list[Script]:
    """Logits processors that make the answer to ``prompt`` be ``text``."""
    return [Script(len(tokenizer(prompt)["input_ids"]), tokenizer(text)["input_ids"])]


# Many callers, one batch


def test_callers_of_every_kind_at_once_get_what_each_gets_alone(llama, engine):
    lengths = [1 + 7 * n % 40 for n in range(99)]
    prompts = draw_prompts(lengths, seed=3)
    results: dict[int, list[int]] = {}
    overlap: list[bool] = []

    def in_a_thread(service, index):
        results[index] = service.submit(prompts[index], greedy()).result(PATIENCE_S).token_ids

    async def as_a_task(service, index):
        results[index] = (await service.submit(prompts[index], greedy())).token_ids

    async def as_a_stream(service, index):
        tokens = []
        async for delta in service.submit(prompts[index], greedy()):
            overlap.append(service.num_unfinished > 1)
            tokens += delta.token_ids
        results[index] = tokens

    async def everything():
        async with AsyncEngine(engine) as service:
            threads = [threading.Thread(target=in_a_thread, args=(service, index)) for index in range(8)]
            for thread in threads:
                thread.start()
            batch = [service.submit(prompt, greedy()) for prompt in prompts[8:72]]
            tasks = [asyncio.create_task(as_a_task(service, index)) for index in range(72, 96)]
            streams = [asyncio.create_task(as_a_stream(service, index)) for index in range(96, 99)]
            await asyncio.gather(*tasks, *streams)
            for index, handle in enumerate(batch, 8):
                results[index] = (await handle).token_ids
            await asyncio.to_thread(lambda: [thread.join(PATIENCE_S) for thread in threads])
            return service

    service = asyncio.run(everything())
    for index, prompt in enumerate(prompts):
        assert_greedy(llama, prompt, results[index], stock_greedy(llama, prompt, 8))
    stats = engine.stats()
    assert stats.peak_running > 30
    assert stats.num_steps < 99 * 8 / 4
    assert overlap[0], "the first token of a stream came only when everybody else was done"
    assert_closed(service)


def test_a_thousand_handles_are_answered(engine):
    async def main():
        async with AsyncEngine(engine) as service:
            handles = [service.submit([5 + n % 200, n // 200 + 3], greedy(2)) for n in range(1000)]
            outputs = await asyncio.gather(*handles)
            assert all(len(output.token_ids) == 2 for output in outputs)
            return service

    assert_closed(asyncio.run(main()))


def test_an_event_loop_is_woken_at_most_once_a_step(llama, tokenizer, steps):
    engine = Engine(llama, tokenizer, plugins=[steps], kv_cache_memory="16MiB")
    steps.free()
    calls = []

    async def consume(handle):
        return [delta async for delta in handle]

    async def main():
        async with AsyncEngine(engine) as service:
            loop = asyncio.get_running_loop()
            original = loop.call_soon_threadsafe

            def counted(*args, **kwargs):
                calls.append(args)
                return original(*args, **kwargs)

            loop.call_soon_threadsafe = counted
            await asyncio.gather(*(consume(service.submit([5, 6, n + 3], greedy(20))) for n in range(32)))
            assert len(calls) <= steps.num_finished
            assert calls

    asyncio.run(main())


def test_event_loops_in_several_threads_each_get_their_own(llama, engine):
    async def stream(service, prompt):
        return [token async for delta in service.submit(prompt, greedy()) for token in delta.token_ids]

    with AsyncEngine(engine) as service, ThreadPoolExecutor(4) as pool:
        prompts = draw_prompts((3, 9, 4, 12))
        results = list(pool.map(lambda prompt: asyncio.run(stream(service, prompt)), prompts))
    for prompt, tokens in zip(prompts, results, strict=True):
        assert_greedy(llama, prompt, tokens, stock_greedy(llama, prompt, 8))
    assert_closed(service)


# Deltas


def test_an_option_that_there_is_not_is_refused_as_add_request_refuses_it(engine):
    with AsyncEngine(engine) as service:
        with pytest.raises(RequestRefused, match="unknown request option 'prio'; choose from request_id, priority"):
            service.submit([5, 6, 7], prio=1)
        assert service.submit([5, 6, 7], priority=-1, metadata="mine").result().finish_reason is not None


def test_deltas_join_to_the_output_and_say_why_it_ended(engine):
    with AsyncEngine(engine) as service:
        handle = service.submit("hello", greedy(20))
        deltas = list(handle)
        output = handle.result()
    assert "".join(delta.text for delta in deltas) == output.text
    assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_no_delta_ever_holds_part_of_a_character(engine, tokenizer):
    text = "日本語と😀 and naïve Größe 👩‍👩‍👧 done"
    params = greedy(len(tokenizer(text)["input_ids"]), logits_processors=script(tokenizer, "say", text))
    with AsyncEngine(engine) as service:
        handle = service.submit("say", params)
        texts = [delta.text for delta in handle]
        assert "".join(texts) == handle.result().text == text
    assert not any("\ufffd" in piece for piece in texts)


def test_a_stop_string_is_held_back_until_it_is_sure(held, steps, tokenizer):
    text = "one STO two STOP three"
    params = SamplingParams(
        max_tokens=len(text), ignore_eos=True, stop=["STOP"], logits_processors=script(tokenizer, "say", text)
    )
    handle = held.submit("say", params)
    steps.free()
    texts = [delta.text for delta in handle]
    assert "".join(texts) == handle.result().text == "one STO two "
    assert handle.result().finish_reason == "stop"
    # The first STO came out only once the space after it had shown that it is no stop string.
    assert not any(piece.endswith(("S", "ST", "STO")) for piece in texts)


def test_a_reader_slower_than_the_engine_finds_several_tokens_in_one_delta(held, steps):
    handle = held.submit([5, 6, 7], greedy(6))
    stream = iter(handle)
    steps.wait()
    steps.go_on()
    assert len(next(stream).token_ids) == 1
    steps.wait(4)
    steps.go_on()
    steps.wait()
    assert len(next(stream).token_ids) == 4
    steps.free()
    assert [delta.finish_reason for delta in stream] == ["length"]


def test_every_loop_over_a_handle_begins_at_the_first_token(engine):
    async def read(handle):
        return [token async for delta in handle for token in delta.token_ids]

    async def main():
        async with AsyncEngine(engine) as service:
            handle = service.submit([5, 6, 7], greedy())
            first, second, output = await asyncio.gather(read(handle), read(handle), handle)
            assert first == second == output.token_ids == await read(handle)

    asyncio.run(main())


def test_deltas_of_several_samples_carry_their_index(engine):
    with AsyncEngine(engine) as service:
        handle = service.submit("hello", greedy(9, n=3, temperature=1.0, seed=4))
        tokens = {0: [], 1: [], 2: []}
        for delta in handle:
            tokens[delta.index] += delta.token_ids
    assert [tokens[index] for index in range(3)] == [output.token_ids for output in handle.outputs]
    assert len({tuple(row) for row in tokens.values()}) > 1
    assert all(len(row) == 9 for row in tokens.values())


def test_without_a_tokenizer_deltas_carry_tokens_only(llama):
    with AsyncEngine(Engine(llama)) as service:
        deltas = list(service.submit([5, 6, 7], greedy(3)))
    assert "".join(delta.text for delta in deltas) == ""
    assert sum(len(delta.token_ids) for delta in deltas) == 3


# Going away


def consumed(held, steps, consume):
    """Start a long request, let ``consume`` go away after two tokens; how many tokens it got in the end."""
    handle = held.submit([5, 6, 7], greedy(100))
    output = handle.outputs[0]
    steps.wait(2)
    steps.go_on()
    consume(handle)
    del handle
    # The thread is in its third step, or at the end of it; whoever is gone takes part in no fourth.
    steps.free()
    wait_until(lambda: held.num_unfinished == 0)
    assert output.finish_reason == "abort"
    assert_idle(held.engine)
    return len(output.token_ids)


def test_breaking_out_of_a_loop_frees_the_request_within_a_step(held, steps):
    def consume(handle):
        for _ in handle:
            break

    assert consumed(held, steps, consume) <= 3


def test_breaking_out_of_an_async_loop_frees_the_request_within_a_step(held, steps):
    def consume(handle):
        async def main():
            async for _ in handle:
                break

        asyncio.run(main())

    assert consumed(held, steps, consume) <= 3


def test_an_exception_in_a_loop_frees_the_request_within_a_step(held, steps):
    def consume(handle):
        def read():
            for _ in handle:
                raise KeyError

        with pytest.raises(KeyError):
            read()

    assert consumed(held, steps, consume) <= 3


@pytest.mark.parametrize("kind", ["close", "aclose", "cancel"])
def test_closing_a_stream_or_cancelling_frees_the_request_within_a_step(held, steps, kind):
    def consume(handle):
        stream = iter(handle)
        next(stream)
        if kind == "close":
            stream.close()
        elif kind == "aclose":
            asyncio.run(stream.aclose())
        else:
            handle.cancel()
        steps.free()
        assert handle.result(PATIENCE_S).finish_reason == "abort"
        assert [delta.finish_reason for delta in stream][-1] == "abort"

    assert consumed(held, steps, consume) <= 3


@pytest.mark.parametrize("streaming", [False, True])
def test_a_cancelled_task_frees_its_request_within_a_step(held, steps, streaming):
    async def wait(handle):
        if not streaming:
            return await handle
        return [delta async for delta in handle]

    def consume(handle):
        async def main():
            task = asyncio.create_task(wait(handle))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())

    assert consumed(held, steps, consume) <= 3


def test_a_handle_that_nobody_holds_frees_its_request_within_a_step(held, steps):
    assert consumed(held, steps, lambda handle: None) <= 3


def test_a_timed_out_wait_in_a_task_frees_its_request(held, steps):
    def consume(handle):
        async def main():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(handle, 0.01)

        asyncio.run(main())

    assert consumed(held, steps, consume) <= 3


def test_ctrl_c_while_waiting_frees_the_request(held, steps):
    def consume(handle):
        thread = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            handle.result()
        thread.join()

    assert consumed(held, steps, consume) <= 3


@pytest.mark.parametrize("wait", [lambda handle: aiter(handle).__anext__(), lambda handle: handle.__await__()])
def test_an_event_loop_that_is_closed_takes_its_requests_along(held, steps, wait):
    handle = held.submit([5, 6, 7], greedy(100))
    steps.wait()
    loop = asyncio.new_event_loop()
    waiting = wait(handle)

    async def put_down_a_waiter():
        return waiting.send(None)

    loop.run_until_complete(put_down_a_waiter())
    loop.close()
    steps.go_on()
    steps.wait()
    steps.free()
    # The coroutine still exists, so nothing but the closed loop tells that nobody will ever wake it.
    assert handle.result(PATIENCE_S).finish_reason == "abort"
    waiting.close()


def test_garbage_in_a_cycle_is_cancelled_too(held, steps):
    handle = held.submit([5, 6, 7], greedy(100))
    output = handle.outputs[0]
    steps.wait()
    cycle = [handle]
    cycle.append(cycle)
    del handle, cycle
    gc.collect()
    steps.free()
    wait_until(lambda: output.finished)
    assert output.finish_reason == "abort"


def test_waiting_with_a_timeout_leaves_the_request_alone(held, steps):
    handle = held.submit([5, 6, 7], greedy(4))
    for _ in range(3):
        with pytest.raises(DeadlineExceeded, match=r"not over after 0\.01 seconds"):
            handle.result(0.01)
    steps.free()
    assert handle.result(PATIENCE_S).finish_reason == "length"
    assert not handle._ticket.waiting_for_end


def test_a_callback_is_called_once_however_late_it_comes_and_may_fail(held, steps, caplog):
    calls = []

    def fail(handle):
        raise LookupError("a callback of mine")

    held.submit([5, 6, 7], greedy(3)).add_done_callback(lambda handle: calls.append(handle.outputs[0].finish_reason))
    handle = held.submit([5, 6, 7], greedy(3))
    handle.add_done_callback(fail)
    steps.free()
    handle.result(PATIENCE_S)
    wait_until(lambda: held.num_unfinished == 0)
    # The first handle was kept by its callback alone.
    assert calls == ["length"]
    handle.add_done_callback(lambda handle: calls.append("late"))
    assert calls == ["length", "late"]
    assert "a callback of mine" in caplog.text


# Limits


def test_a_full_queue_refuses_by_name_and_takes_again_later(llama, steps):
    engine = Engine(llama, plugins=[steps], max_num_seqs=1, max_waiting=2)
    with AsyncEngine(engine) as service:
        running = service.submit([5, 6, 7], greedy(4))
        steps.wait()
        waiting = [service.submit([8, 9, n], greedy(2)) for n in (3, 4)]
        with pytest.raises(QueueFull, match="2 requests wait already; max_waiting is 2"):
            service.submit([1, 2, 3], greedy())
        steps.free()
        assert [len(handle.result(PATIENCE_S).token_ids) for handle in (running, *waiting)] == [4, 2, 2]
        assert len(service.submit([1, 2, 3], greedy(3)).result(PATIENCE_S).token_ids) == 3
    assert_closed(service)


def test_waiting_too_long_in_the_queue_ends_with_timeout(llama, steps):
    clock = Clock()
    engine = Engine(llama, plugins=[steps], max_num_seqs=1, clock=clock)
    with AsyncEngine(engine) as service:
        running = service.submit([5, 6, 7], greedy(8), queue_timeout_s=5)
        waiting = service.submit([8, 9], greedy(4), queue_timeout_s=5)
        patient = service.submit([8, 9], greedy(4), queue_timeout_s=50)
        steps.wait(2)
        clock.now = 6.0
        steps.free()
        assert waiting.result(PATIENCE_S).finish_reason == "timeout"
        assert waiting.result().token_ids == []
        assert running.result(PATIENCE_S).finish_reason == "length"
        assert patient.result(PATIENCE_S).finish_reason == "length"
    assert_closed(service)


def test_a_time_limit_ends_a_running_request_with_its_tokens(llama, steps):
    clock = Clock()
    with AsyncEngine(Engine(llama, plugins=[steps], clock=clock)) as service:
        handle = service.submit([5, 6, 7], greedy(100), timeout_s=5)
        steps.wait(3)
        clock.now = 6.0
        steps.free()
        output = handle.result(PATIENCE_S)
    assert output.finish_reason == "timeout"
    assert len(output.token_ids) == 3


def test_seconds_count_from_the_submission(llama, steps):
    clock = Clock()
    engine = Engine(llama, plugins=[steps], clock=clock)
    with AsyncEngine(engine) as service:
        service.submit([5, 6, 7], greedy(2)).cancel()
        clock.now = 3.0
        handle = service.submit([5, 6, 7], greedy(2), deadline_s=2.0, priority=4, client_id="me")
        clock.now = 4.0
        steps.free()
        output = handle.result(PATIENCE_S)
    assert output.metrics.arrival_time == 3.0
    assert output.metrics.first_scheduled_time == 4.0


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([5, 99999], {}, RequestRefused),
        ("", {}, RequestRefused),
        ([5] * 300, {}, ContextOverflow),
        ([5], {"timeout_s": -1}, RequestRefused),
        ([5], {"params": {"max_tokens": 3, "colour": "red"}}, RequestRefused),
    ],
)
def test_what_can_never_run_is_refused_at_once(engine, prompt, options, error):
    with AsyncEngine(engine) as service:
        with pytest.raises(error):
            service.submit(prompt, **options)
        assert service.num_unfinished == 0


def test_a_taken_request_id_is_refused(held, steps):
    handle = held.submit([5, 6], greedy(3), request_id="mine")
    with pytest.raises(RequestRefused, match="'mine' is taken"):
        held.submit([5, 6], greedy(3), request_id="mine")
    steps.free()
    assert handle.result(PATIENCE_S).request_id == "mine"
    assert held.submit([5, 6], greedy(3), request_id="mine").result(PATIENCE_S).finish_reason == "length"


# Closing and starting


def test_leaving_the_block_waits_for_what_was_submitted(engine):
    with AsyncEngine(engine) as service:
        handles = [service.submit([5, 6, n + 3], greedy()) for n in range(5)]
    assert [handle.done for handle in handles] == [True] * 5
    assert {handle.result().finish_reason for handle in handles} == {"length"}
    assert_closed(service)


def test_while_a_service_runs_nobody_else_may_call_its_engine(llama, engine):
    (prompt,) = draw_prompts([6])
    with AsyncEngine(engine) as service:
        handle = service.submit(prompt, greedy(8))
        for call in (engine.step, lambda: engine.add_request(prompt), lambda: engine.generate([prompt])):
            with pytest.raises(EngineBusy, match="use the methods of the AsyncEngine"):
                call()
    expected = stock_greedy(llama, prompt, 8)
    for output in (handle.result(), engine.generate([prompt], greedy(8))[0]):
        assert_greedy(llama, prompt, output.token_ids, expected)


def test_an_engine_whose_service_has_requests_cannot_be_closed_and_they_go_on(held, steps):
    handle = held.submit([5, 6], greedy(3))
    steps.wait()
    with pytest.raises(EngineBusy, match=r"before its requests are over \(1 are unfinished\)"):
        held.engine.close()
    steps.free()
    assert handle.result(PATIENCE_S).finish_reason == "length"


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_whose_service_has_nothing_to_do_is_closed_with_it(engine, paused):
    service = AsyncEngine(engine).start()
    service.submit([5, 6], greedy(3)).result(PATIENCE_S)
    if paused:
        service.pause()
    wait_until(lambda: service.num_unfinished == 0)
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("paged-backend")]
    for call in (lambda: service.submit([5]), service.start, service.stats, service.pause):
        with pytest.raises(EngineClosed, match="the engine is closed; make a new one"):
            call()
    service.close()


def test_leaving_the_block_of_a_busy_engine_hides_no_error(held, steps, caplog):
    handle = held.submit([5, 6], greedy(3))
    steps.wait()
    with pytest.raises(ZeroDivisionError, match="mine"), held.engine:
        raise ZeroDivisionError("mine")
    assert "the engine stays open: an AsyncEngine" in caplog.text
    steps.free()
    assert handle.result(PATIENCE_S).finish_reason == "length"


def test_a_second_service_of_the_same_engine_is_refused_and_the_first_goes_on(llama, engine):
    with AsyncEngine(engine) as service:
        handle = service.submit([5, 6, 7], greedy(12))
        with pytest.raises(EngineBusy, match="another AsyncEngine runs this engine"):
            AsyncEngine(engine).start()
        assert_greedy(llama, [5, 6, 7], handle.result(PATIENCE_S).token_ids, stock_greedy(llama, [5, 6, 7], 12))
    with AsyncEngine(engine) as second:
        assert second.submit([5, 6, 7], greedy(12)).result(PATIENCE_S).token_ids == handle.result().token_ids


def test_an_exception_that_leaves_the_block_aborts_what_runs(held, steps):
    handles = [held.submit([5, 6, n + 3], greedy(100)) for n in range(3)]
    steps.wait()
    steps.free()
    with pytest.raises(KeyError), held:
        raise KeyError
    assert {handle.result().finish_reason for handle in handles} == {"abort"}
    assert_closed(held)


def test_an_exception_that_leaves_the_async_block_aborts_what_runs(engine):
    handles = []

    async def main():
        async with AsyncEngine(engine) as service:
            handles.extend(service.submit([5, 6, n + 3], greedy(200)) for n in range(3))
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert {handle.result().finish_reason for handle in handles} <= {"abort", "length"}
    assert "abort" in {handle.result().finish_reason for handle in handles}
    assert_idle(engine)


def test_the_event_loop_goes_on_while_a_service_closes(held, steps):
    async def main():
        handle = held.submit([5, 6, 7], greedy(5))
        closing = asyncio.create_task(held.aclose())
        await asyncio.sleep(0.01)
        assert not closing.done()
        steps.free()
        await closing
        assert handle.done

    asyncio.run(main())
    assert_closed(held)


def test_a_graceful_end_that_takes_too_long_is_cut_off(held, steps):
    handle = held.submit([5, 6, 7], greedy(100))
    steps.wait()
    threading.Timer(0.2, steps.free).start()
    held.close(timeout_s=0.05)
    assert handle.result().finish_reason == "abort"
    assert_closed(held)


def test_ctrl_c_while_a_service_closes_still_waits_for_the_step(held, steps):
    handle = held.submit([5, 6, 7], greedy(100))
    steps.wait()
    main_thread = threading.main_thread().ident
    timers = [
        threading.Timer(0.1, lambda: signal.pthread_kill(main_thread, signal.SIGINT)),
        threading.Timer(0.3, steps.free),
    ]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        held.close(graceful=False)
    assert handle.result().finish_reason == "abort"
    for timer in timers:
        timer.join()
    assert_closed(held)


def test_a_closed_service_takes_nothing_until_it_is_started_again(engine):
    service = AsyncEngine(engine)
    with pytest.raises(EngineClosed, match="not started"):
        service.submit([5])
    for _ in range(3):
        with service:
            assert service.submit([5, 6], greedy(3)).result(PATIENCE_S).finish_reason == "length"
        with pytest.raises(EngineClosed, match="closed"):
            service.submit([5])
    service.close()
    assert len(engine.generate([[5, 6]], greedy(3))[0].token_ids) == 3
    engine.close()
    with pytest.raises(EngineClosed, match="make a new one"):
        service.start()
    with pytest.raises(EngineClosed, match="make a new one"):
        AsyncEngine(engine)


def test_what_is_on_its_way_when_a_service_closes_at_once_is_aborted(held, steps):
    first = held.submit([5, 6], greedy(100))
    steps.wait()
    late = held.submit([5, 6], greedy(100))
    threading.Timer(0.05, steps.free).start()
    held.close(graceful=False)
    assert first.result().finish_reason == "abort"
    assert late.result().finish_reason == "abort"
    assert_closed(held)


@pytest.mark.parametrize("wrong", ["a/model-id", None, 5])
def test_a_service_of_something_else_than_an_engine_is_refused(wrong):
    with pytest.raises(ConfigError, match=rf"takes an Engine, got a {type(wrong).__name__}; make one with Engine"):
        AsyncEngine(wrong)


# A model that changes


def test_changed_weights_are_used_from_then_on(tokenizer):
    model = make_tiny("llama", vocab_size=len(tokenizer))
    prompt = [5, 6, 7] * 12
    with AsyncEngine(Engine(model, tokenizer)) as service:
        old = service.submit(prompt, greedy(10)).result(PATIENCE_S).token_ids
        service.pause()
        model.load_state_dict(make_tiny("llama", seed=7, vocab_size=len(tokenizer)).state_dict())
        service.weights_changed()
        service.resume()
        new = service.submit(prompt, greedy(10)).result(PATIENCE_S).token_ids
    assert new != old
    assert_greedy(model, prompt, new, stock_greedy(model, prompt, 10))


# One bad request


@pytest.mark.parametrize(
    ("error", "told"), [(ZeroDivisionError("mine"), ZeroDivisionError), (SystemExit(3), SamplingFailed)], ids=repr
)
def test_a_processor_that_raises_fails_its_request_alone(llama, engine, error, told):
    with AsyncEngine(engine) as service:
        good = service.submit([5, 6, 7], greedy(12))
        bad = service.submit([8, 9], greedy(12, logits_processors=[Raises(2, at=3, error=error)]))
        with pytest.raises(RequestFailed, match=type(error).__name__) as raised:
            bad.result(PATIENCE_S)
        assert isinstance(raised.value.__cause__, told)
        assert len(raised.value.output.token_ids) == 3
        assert_greedy(llama, [5, 6, 7], good.result(PATIENCE_S).token_ids, stock_greedy(llama, [5, 6, 7], 12))
    assert_closed(service)


def test_a_stream_gives_what_came_before_the_error(engine):
    seen: list[Delta] = []
    with AsyncEngine(engine) as service:
        handle = service.submit([8, 9], greedy(12, logits_processors=[Raises(2, at=3)]))
        with pytest.raises(RequestFailed):
            seen.extend(iter_into(seen, handle))
    assert sum(len(delta.token_ids) for delta in seen) == 3
    assert seen[-1].finish_reason == "error"


def iter_into(seen, handle):
    """Append as they come, so that what came before an error is kept."""
    for delta in handle:
        seen.append(delta)
    return []


def test_a_stop_rule_that_raises_fails_its_request_alone(engine):
    def rule(request):
        raise LookupError("mine")

    with AsyncEngine(engine) as service:
        good = service.submit([5, 6, 7], greedy(5))
        with pytest.raises(RequestFailed, match="LookupError"):
            service.submit([8, 9], greedy(12), stop_condition=rule).result(PATIENCE_S)
        assert good.result(PATIENCE_S).finish_reason == "length"


def test_a_tokenizer_that_raises_fails_its_request_alone(llama, tokenizer):
    class Moody(type(tokenizer)):
        def decode(self, token_ids, **kwargs):
            # Not at one length alone, which a slow reader may miss.
            if len(token_ids) >= 2:
                raise UnicodeError("not today")
            return super().decode(token_ids, **kwargs)

    moody = Moody(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    with AsyncEngine(Engine(llama, moody)) as service:
        good = service.submit([5, 6, 7], greedy(30))
        bad = service.submit([8, 9], greedy(100))
        with pytest.raises(RequestFailed, match="not today"):
            list(bad)
        assert bad.result(PATIENCE_S).finish_reason in ("abort", "length")
        stopping = service.submit([8, 9], greedy(100, stop=["never"]))
        with pytest.raises(RequestFailed, match="not today"):
            stopping.result(PATIENCE_S)
        assert good.result(PATIENCE_S).finish_reason == "length"
    assert_closed(service)


# Tokenizers, processes


def test_one_tokenizer_serves_many_threads(engine, tokenizer):
    def run(n):
        prompt = f"thread {n} says " * (1 + n % 5)
        handle = service.submit(prompt, greedy(12, stop=["\x00\x00"]))
        text = "".join(delta.text for delta in handle)
        return text == handle.result(PATIENCE_S).text

    with AsyncEngine(engine) as service, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(40)))


# The process forks while a request runs, and exits while a thread waits for one and nobody for another.
PROGRAM = f"""
import os, sys, threading
sys.path.insert(0, {str(SUPPORT)!r})
import torch
torch.set_num_threads(1)
from tiny_models import make_tiny
from paged_backend import AsyncEngine, Engine, SamplingParams
from paged_backend.errors import EngineClosed

# What libraries say when they are imported is not meant.
print("it begins", file=sys.stderr, flush=True)
service = AsyncEngine(Engine(make_tiny("llama"))).start()
params = SamplingParams(max_tokens=200, ignore_eos=True)
handle = service.submit([5, 6, 7], params)
left = service.submit([5, 6, 7], SamplingParams(max_tokens=250, ignore_eos=True))
next(stream := iter(handle))
pid = os.fork()
if pid == 0:
    # What came before the fork is still there to be read.
    for ask in (handle.result, lambda: list(stream), lambda: service.submit([5]), service.pause, service.start):
        try:
            ask()
        except EngineClosed as error:
            print("child:", "fork" in str(error), flush=True)
    service.close()
    os._exit(7)
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
threading.Thread(target=lambda: print("parent:", handle.result().finish_reason)).start()
"""


@pytest.fixture(scope="module")
def program():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)


def test_a_forked_child_is_told_that_it_has_no_engine(program):
    lines = program.stdout.splitlines()
    assert [line for line in lines if line.startswith("child: ")] == ["child: True"] * 5
    assert "child ended with 7" in lines


def test_a_fork_does_not_disturb_the_parent_and_a_thread_that_waits_at_exit_is_answered(program):
    assert "parent: length" in program.stdout.splitlines()


def test_the_interpreter_exits_cleanly_while_a_request_runs(program):
    assert program.returncode == 0
    assert program.stderr.split("it begins\n")[1] == ""
