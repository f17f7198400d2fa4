"""Ticket: how far a submitted request has come, written by the engine's thread and read by whoever waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paged_backend.errors import DeadlineExceeded, EngineClosed

if TYPE_CHECKING:
    from paged_backend.engine_thread import EngineThread
    from paged_backend.request import Request, RequestOutput

logger = logging.getLogger("paged_backend")


class Ticket:
    """What the engine's thread and a request's handle share; the thread writes, readers in any thread only read.

    It needs no lock. A reader puts its waiter down before it looks whether there is news, and the thread leaves the
    news before it collects the waiters, so that one of them always sees the other.
    """

    def __init__(self, request: Request, engine_thread: EngineThread, tokenizer: Any) -> None:
        self.engine_thread = engine_thread
        self.tokenizer = tokenizer
        self.stop = request.params.stop
        self.outputs: list[RequestOutput] = [request.output, *(fork.output for fork in request.forks)]
        self.num_tokens = [0] * len(self.outputs)
        self.ended = [False] * len(self.outputs)
        self.error: Exception | None = None
        self.is_over = False
        self.waiting_for_news: deque[_Waiter] = deque()
        self.waiting_for_end: deque[_Waiter] = deque()

    @property
    def request_id(self) -> str:
        return self.outputs[0].request_id

    def cancel(self) -> None:
        """Ask for the end of the request. Any thread may do so at any moment, also while garbage is collected."""
        if not self.is_over:
            self.engine_thread.cancel(self)

    def publish(self, output: RequestOutput, wakes: Wakes) -> None:
        """Show readers what ``output`` came to; those to be woken join ``wakes``."""
        self.num_tokens[output.index] = len(output.token_ids)
        if output.finished:
            self.ended[output.index] = True
            self.is_over = all(self.ended)
        self._wake(wakes)

    def fail(self, error: Exception, wakes: Wakes) -> None:
        """End without a result: every reader gets ``error``."""
        self.error = error
        self.is_over = True
        self._wake(wakes)

    def _wake(self, wakes: Wakes) -> None:
        for waiters in (self.waiting_for_news, self.waiting_for_end) if self.is_over else (self.waiting_for_news,):
            while waiters:
                waiters.popleft().wake(wakes)


class Wakes:
    """Tasks to be woken after a step: one call into each event loop, however many of its tasks have news."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[_TaskWaiter]] = {}

    def add(self, waiter: _TaskWaiter) -> None:
        self._by_loop.setdefault(waiter.loop, []).append(waiter)

    def send(self) -> None:
        for loop, waiters in self._by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, waiters)
            except RuntimeError:
                # The loop is closed, and its tasks are gone with it.
                for waiter in waiters:
                    waiter.ticket.cancel()


def _resolve(waiters: Iterable[_TaskWaiter]) -> None:
    for waiter in waiters:
        if not waiter.future.done():
            waiter.future.set_result(None)


class _ThreadWaiter:
    """A thread that sleeps until it is woken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self, wakes: Wakes) -> None:
        self._lock.release()

    def sleep(self, seconds: float | None) -> bool:
        return self._lock.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX))


class _TaskWaiter:
    """A task of an event loop that awaits ``future``."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.loop = asyncio.get_running_loop()
        self.future = self.loop.create_future()

    def wake(self, wakes: Wakes) -> None:
        wakes.add(self)


class _Callback:
    """A function to be called by the engine's thread."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def wake(self, wakes: Wakes) -> None:
        try:
            self._function()
        except Exception:
            logger.exception("a callback failed")


_Waiter = _ThreadWaiter | _TaskWaiter | _Callback


def sleep_until(
    ticket: Ticket, waiters: deque[_Waiter], is_there: Callable[[], bool], timeout: float | None = None
) -> None:
    """Block this thread until ``is_there()``; DeadlineExceeded after ``timeout`` seconds.

    Interrupted by anything else, it cancels the request.
    """
    if is_there():
        return
    if ticket.engine_thread.is_current:
        raise EngineClosed("the engine is in the middle of a step; what runs inside a step must not wait for it")
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while True:
            waiter = _ThreadWaiter()
            waiters.append(waiter)
            if is_there():
                return
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not waiter.sleep(seconds):
                _forget(waiters, waiter)
                raise DeadlineExceeded(f"request {ticket.request_id} is not over after {timeout} seconds")
            if is_there():
                return
    except DeadlineExceeded:
        raise
    except BaseException:
        ticket.cancel()
        raise


async def await_until(ticket: Ticket, waiters: deque[_Waiter], is_there: Callable[[], bool]) -> None:
    """Suspend this task until ``is_there()``. Cancelled, it cancels the request."""
    try:
        while not is_there():
            waiter = _TaskWaiter(ticket)
            waiters.append(waiter)
            if is_there():
                return
            await waiter.future
    except BaseException:
        ticket.cancel()
        raise


def call_at_end(ticket: Ticket, function: Callable[[], object]) -> None:
    """Have ``function`` called once the request is over: by the engine's thread, or now if it is."""
    waiter = _Callback(function)
    ticket.waiting_for_end.append(waiter)
    if ticket.is_over and _forget(ticket.waiting_for_end, waiter):
        function()


def _forget(waiters: deque[_Waiter], waiter: _Waiter) -> bool:
    """Take a waiter back; False if it was woken at the very last moment."""
    with suppress(ValueError):
        waiters.remove(waiter)
        return True
    return False
