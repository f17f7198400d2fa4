"""The thread that owns an engine sleeps without work, stands still when paused, and tells everybody when it dies."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from service_checks import (
    PATIENCE_S,
    Broken,
    Raises,
    Steps,
    assert_closed,
    assert_idle,
    break_steps,
    greedy,
    repair_steps,
    wait_until,
)
from tiny_models import make_tiny

from paged_backend import AsyncEngine, Engine
from paged_backend.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineFailed,
    RequestFailed,
)


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


@pytest.fixture
def steps():
    steps = Steps()
    yield steps
    steps.free()


@pytest.fixture
def engine(llama):
    return Engine(llama, max_num_seqs=64, kv_cache_memory="16MiB")


@pytest.mark.parametrize("error", [Broken("the machine is unwell"), MemoryError(), SystemExit(3)], ids=repr)
def test_everybody_hears_within_a_second_of_the_death_of_the_thread(llama, steps, error):
    engine = Engine(llama, plugins=[steps])
    service = AsyncEngine(engine).start()
    heard: list[tuple[float, BaseException]] = []

    def hear(ask) -> None:
        try:
            ask()
        except EngineFailed as failure:
            heard.append((time.monotonic(), failure.__cause__))

    async def await_it(handle):
        await handle

    async def stream(handle):
        async for _ in handle:
            pass

    handles = [service.submit([5, 6, n + 3], greedy(100)) for n in range(20)]
    asks = [lambda h=h: h.result() for h in handles[:5]]
    asks += [lambda h=h: list(h) for h in handles[5:10]]
    asks += [lambda h=h: asyncio.run(await_it(h)) for h in handles[10:15]]
    asks += [lambda h=h: asyncio.run(stream(h)) for h in handles[15:]]
    with ThreadPoolExecutor(len(asks)) as pool:
        futures = [pool.submit(hear, ask) for ask in asks]
        steps.wait()
        wait_until(lambda: sum(len(h._ticket.waiting_for_end) + len(h._ticket.waiting_for_news) for h in handles) == 20)
        break_steps(engine, error)
        died = time.monotonic()
        steps.free()
        for future in futures:
            future.result(PATIENCE_S)
    assert [cause for _, cause in heard] == [error] * 20
    assert max(moment for moment, _ in heard) - died < 1
    with pytest.raises(EngineFailed, match=r"start\(\) begins anew"):
        service.submit([5])
    service.close()
    repair_steps(engine)
    assert_closed(service)


def test_a_service_whose_thread_died_can_be_started_again(llama):
    engine = Engine(llama)
    service = AsyncEngine(engine).start()
    expected = service.submit([5, 6], greedy(4)).result(PATIENCE_S).token_ids
    for _ in range(3):
        break_steps(engine, Broken())
        with pytest.raises(EngineFailed):
            service.submit([5, 6], greedy(4)).result(PATIENCE_S)
        repair_steps(engine)
        service.start()
        assert service.submit([5, 6], greedy(4)).result(PATIENCE_S).token_ids == expected
    service.close()
    assert_closed(service)


def test_a_death_in_the_middle_of_a_step_leaves_the_engine_fit_for_a_restart(llama):
    engine = Engine(llama, max_num_batched_tokens=16)
    service = AsyncEngine(engine).start()
    expected = service.submit([5, 6] * 20, greedy(12)).result(PATIENCE_S).token_ids
    handles = [service.submit([5, 6] * 20, greedy(12)) for _ in range(4)]
    killer = service.submit([8, 9], greedy(12, logits_processors=[Raises(2, at=2, error=KeyboardInterrupt())]))
    for handle in (*handles, killer):
        with pytest.raises(EngineFailed, match="KeyboardInterrupt"):
            handle.result(PATIENCE_S)
    service.start()
    assert_idle(engine)
    assert service.submit([5, 6] * 20, greedy(12)).result(PATIENCE_S).token_ids == expected
    service.close()
    assert_closed(service)


def test_a_request_in_flight_when_the_thread_died_is_not_there_after_the_restart(llama, steps):
    engine = Engine(llama, plugins=[steps])
    service = AsyncEngine(engine).start()
    handle = service.submit([5, 6], greedy(100), request_id="mine")
    steps.wait()
    break_steps(engine, Broken())
    steps.free()
    with pytest.raises(EngineFailed):
        handle.result(PATIENCE_S)
    repair_steps(engine)
    service.start()
    assert_idle(engine)
    assert service.submit([5, 6], greedy(4), request_id="mine").result(PATIENCE_S).finish_reason == "length"
    service.close()


def test_what_kills_the_thread_is_logged_even_if_nobody_waits(llama, caplog):
    engine = Engine(llama)
    break_steps(engine, Broken("the machine is unwell"))
    service = AsyncEngine(engine).start()
    service.submit([5, 6], greedy(4)).cancel()
    service._thread._thread.join(PATIENCE_S)
    assert "the machine is unwell" in caplog.text
    repair_steps(engine)


def test_a_service_that_is_dropped_finishes_and_ends_its_thread(llama, steps):
    handle = AsyncEngine(Engine(llama, plugins=[steps])).start().submit([5, 6], greedy(4))
    gc.collect()
    steps.free()
    assert handle.result(PATIENCE_S).finish_reason == "length"
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("paged-backend")])


def test_an_idle_service_does_nothing_at_all(engine, monkeypatch):
    with AsyncEngine(engine) as service:
        service.submit([5, 6], greedy(2)).result(PATIENCE_S)
        looks = []
        monkeypatch.setattr(engine, "has_unfinished_requests", lambda: looks.append(1) or False)
        before = engine.stats().num_steps
        time.sleep(0.3)
        # One look at most, on its way to sleep.
        assert len(looks) <= 2
        assert engine.stats().num_steps == before
        monkeypatch.undo()


def test_a_policy_that_holds_requests_back_is_slept_for(llama):
    engine = Engine(llama, scheduler="window", scheduler_options={"window_ms": 300})
    with AsyncEngine(engine) as service:
        started = time.monotonic()
        handle = service.submit([5, 6], greedy(2))
        assert handle.result(PATIENCE_S).finish_reason == "length"
        waited = time.monotonic() - started
        assert waited >= 0.25
        # Two tokens, and the looks before and after the sleep.
        assert engine.stats().num_steps <= 6


def test_closing_does_not_wait_for_a_policy_that_holds_requests_back(llama):
    engine = Engine(llama, scheduler="window", scheduler_options={"window_ms": 60_000})
    with AsyncEngine(engine) as service:
        handle = service.submit([5, 6], greedy(3))
        started = time.monotonic()
    assert handle.result().finish_reason == "length"
    assert time.monotonic() - started < 30
    # Three tokens, and a look before the end was asked for.
    assert engine.stats().num_steps <= 6
    assert_closed(service)


def test_a_paused_service_waits_and_goes_on(engine):
    with AsyncEngine(engine) as service:
        expected = service.submit([5, 6], greedy(4)).result(PATIENCE_S).token_ids
        service.pause()
        steps = service.stats().num_steps
        handle = service.submit([5, 6], greedy(4))
        with pytest.raises(DeadlineExceeded):
            handle.result(0.1)
        assert service.stats().num_steps == steps
        service.resume()
        assert handle.result(PATIENCE_S).token_ids == expected


def test_cancelling_and_time_limits_work_while_paused(engine):
    with AsyncEngine(engine) as service:
        service.pause()
        cancelled, late = service.submit([5, 6], greedy()), service.submit([5, 6], greedy(), timeout_s=0.05)
        cancelled.cancel()
        assert cancelled.result(PATIENCE_S).finish_reason == "abort"
        assert late.result(PATIENCE_S).finish_reason == "timeout"
    assert_closed(service)


def test_closing_a_paused_service_finishes_its_requests(engine):
    with AsyncEngine(engine) as service:
        service.pause()
        handle = service.submit([5, 6], greedy(4))
    assert handle.result().finish_reason == "length"


async def awaited(handle):
    await handle


def test_waiting_for_a_request_inside_a_step_is_refused_and_submitting_is_not(engine):
    submitted = []

    def nested(request):
        if not submitted:
            submitted.append(service.submit([9, 8], greedy(2)))
            for wait in (submitted[0].result, lambda: asyncio.run(awaited(submitted[0]))):
                with pytest.raises(EngineBusy, match="in the middle of a step"):
                    wait()
        return False

    with AsyncEngine(engine) as service:
        handle = service.submit([5, 6], greedy(3), stop_condition=nested)
        assert handle.result(PATIENCE_S).finish_reason == "length"
        assert len(submitted[0].result(PATIENCE_S).token_ids) == 2


@pytest.mark.parametrize(
    "stop",
    [
        lambda service: service.close(),
        lambda service: service.close(graceful=False),
        lambda service: asyncio.run(service.aclose()),
        lambda service: service.pause(),
    ],
    ids=["close", "close at once", "aclose", "pause"],
)
def test_a_request_that_would_stop_the_service_for_all_gets_an_error_and_nobody_notices(engine, stop):
    def processor(input_ids, scores):
        stop(service)
        return scores

    with AsyncEngine(engine) as service:
        other = service.submit([5, 6, 7], greedy(12))
        bad = service.submit([8, 9], greedy(12, logits_processors=[processor]))
        with pytest.raises(RequestFailed, match="must not pause or close the service") as raised:
            bad.result(PATIENCE_S)
        assert isinstance(raised.value.__cause__, EngineBusy)
        assert other.result(PATIENCE_S).finish_reason == "length"
        assert service.submit([5, 6], greedy(3)).result(PATIENCE_S).finish_reason == "length"


def test_a_callback_may_not_close_the_service_either(engine, caplog):
    with AsyncEngine(engine) as service:
        called = threading.Event()

        def close(handle):
            called.set()
            service.close()

        service.submit([5, 6], greedy(3)).add_done_callback(close)
        assert called.wait(PATIENCE_S)
        assert service.submit([5, 6], greedy(3)).result(PATIENCE_S).finish_reason == "length"
    assert "must not pause or close the service" in caplog.text
