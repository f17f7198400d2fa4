"""A ticket tells whoever waits, from a thread or a task, and misses nobody."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paged_backend.errors import DeadlineExceeded, EngineClosed
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams
from paged_backend.service.ticket import Ticket, Wakes, await_until, call_at_end, sleep_until

PATIENCE_S = 60


class Thread:
    """What a ticket knows of the engine's thread."""

    def __init__(self) -> None:
        self.is_current = False
        self.cancelled: list[Ticket] = []

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)


def make_ticket(num_forks: int = 0) -> Ticket:
    request, *forks = (
        Request("r", [1, 2], SamplingParams(stop=["x"]), 0.0, 0, index=index) for index in range(num_forks + 1)
    )
    request.forks = tuple(forks)
    return Ticket(request, Thread(), None)


def end(ticket: Ticket, index: int = 0, wakes: Wakes | None = None) -> None:
    ticket.outputs[index].finish_reason = "stop"
    ticket.publish(ticket.outputs[index], Wakes() if wakes is None else wakes)


def test_a_ticket_is_over_when_the_last_sample_ended():
    ticket = make_ticket(num_forks=2)
    assert (ticket.request_id, len(ticket.outputs), ticket.stop) == ("r", 3, ("x",))
    ticket.outputs[1].token_ids += [5, 6]
    ticket.publish(ticket.outputs[1], Wakes())
    assert (ticket.num_tokens, ticket.ended, ticket.is_over) == ([0, 2, 0], [False] * 3, False)
    for index in (1, 0):
        end(ticket, index)
        assert not ticket.is_over
    end(ticket, 2)
    assert ticket.is_over


def test_a_failure_ends_a_ticket_and_is_kept_for_its_readers():
    ticket, error = make_ticket(num_forks=1), RuntimeError("no")
    ticket.fail(error, Wakes())
    assert (ticket.is_over, ticket.error) == (True, error)


def test_only_what_is_not_over_is_cancelled():
    ticket = make_ticket()
    ticket.cancel()
    end(ticket)
    ticket.cancel()
    assert ticket.engine_thread.cancelled == [ticket]


# Threads


def test_news_wake_who_waits_for_news_and_the_end_wakes_all():
    ticket, woken = make_ticket(), []
    ticket.waiting_for_news.append(lambda: woken.append("news"))
    ticket.waiting_for_end.append(lambda: woken.append("end"))
    ticket.publish(ticket.outputs[0], Wakes())
    assert woken == ["news"]
    ticket.publish(ticket.outputs[0], Wakes())
    assert woken == ["news"]
    end(ticket)
    assert woken == ["news", "end"]


def test_a_thread_sleeps_until_it_is_woken():
    ticket, done = make_ticket(), []

    def wait() -> None:
        sleep_until(ticket, ticket.waiting_for_end, lambda: ticket.is_over, PATIENCE_S)
        done.append(ticket.is_over)

    thread = threading.Thread(target=wait)
    thread.start()
    end(ticket)
    thread.join(PATIENCE_S)
    assert done == [True]


def test_what_is_there_already_is_not_waited_for():
    ticket = make_ticket()
    sleep_until(ticket, ticket.waiting_for_end, lambda: True, timeout=0)
    asyncio.run(await_until(ticket, ticket.waiting_for_end, lambda: True))
    assert ticket.engine_thread.cancelled == []


def test_a_thread_that_waited_too_long_is_told_and_forgotten_and_nothing_is_cancelled():
    ticket = make_ticket()
    with pytest.raises(DeadlineExceeded, match="request r is not over after 0 seconds"):
        sleep_until(ticket, ticket.waiting_for_end, lambda: False, timeout=0)
    assert not ticket.waiting_for_end
    assert ticket.engine_thread.cancelled == []


def test_a_thread_that_is_interrupted_cancels():
    ticket = make_ticket()

    def interrupted() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sleep_until(ticket, ticket.waiting_for_end, interrupted)
    assert ticket.engine_thread.cancelled == [ticket]


def test_the_engines_own_thread_must_not_wait():
    ticket = make_ticket()
    ticket.engine_thread.is_current = True
    with pytest.raises(EngineClosed, match="in the middle of a step"):
        sleep_until(ticket, ticket.waiting_for_end, lambda: False)


# Tasks


def test_all_tasks_of_a_loop_are_woken_by_one_call_into_it(monkeypatch):
    tickets, calls = [make_ticket() for _ in range(3)], []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.ensure_future(await_until(t, t.waiting_for_end, lambda: False)) for t in tickets]
        await asyncio.sleep(0)
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: calls.append(args) or call(*args))
        wakes = Wakes()
        for ticket in tickets:
            end(ticket, wakes=wakes)
        assert not any(task.done() for task in tasks)
        wakes.send()
        assert wakes == {}
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)

    asyncio.run(main())
    assert len(calls) == 1


def test_a_task_that_is_cancelled_cancels_its_request():
    ticket = make_ticket()

    async def main() -> None:
        task = asyncio.ensure_future(await_until(ticket, ticket.waiting_for_end, lambda: False))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ticket.engine_thread.cancelled == [ticket]


@pytest.mark.parametrize("when", ["before the news", "before they are sent"])
def test_a_loop_that_is_closed_cancels_what_its_tasks_waited_for(when):
    ticket, wakes, loop = make_ticket(), Wakes(), asyncio.new_event_loop()
    ticket.waiting_for_end.append(loop.create_future())
    ticket.waiting_for_news.append(loop.create_future())
    if when == "before they are sent":
        ticket.publish(ticket.outputs[0], wakes)
        assert ticket.engine_thread.cancelled == []
    loop.close()
    if when == "before the news":
        ticket.publish(ticket.outputs[0], wakes)
    wakes.send()
    assert ticket in ticket.engine_thread.cancelled


# Callbacks


def test_a_callback_is_called_once_at_the_end_or_at_once_if_it_is_over():
    ticket, called = make_ticket(), []
    call_at_end(ticket, lambda: called.append("early"))
    assert called == []
    end(ticket)
    assert called == ["early"]
    call_at_end(ticket, lambda: called.append("late"))
    assert called == ["early", "late"]
    assert not ticket.waiting_for_end


def test_a_callback_that_fails_is_logged_and_harms_nobody(caplog):
    ticket, called = make_ticket(), []

    def broken() -> None:
        raise ValueError("mine")

    call_at_end(ticket, broken)
    call_at_end(ticket, lambda: called.append(True))
    end(ticket)
    assert called == [True]
    assert "a callback failed" in caplog.text
