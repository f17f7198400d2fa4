"""Ticket: how far a submitted request has come, written by the engine's thread and read by whoever waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from paged_backend.errors import DeadlineExceeded, EngineBusy
from paged_backend.outputs import RequestOutput
from paged_backend.request.request import Request

logger = logging.getLogger("paged_backend")

# Who is to be told: a task by its future, anything else by a call.
Waiter = Callable[[], object] | asyncio.Future[None]


class Runner(Protocol):
    """The engine's thread as its tickets know it."""

    @property
    def is_current(self) -> bool:
        """Whether the caller runs inside this thread."""

    def cancel(self, ticket: Ticket) -> None:
        """End a request before the next step; takes no lock."""


class Ticket:
    """What the engine's thread and a request's handle share; the thread writes, readers in any thread only read.

    It needs no lock. A reader puts its waiter down before it looks whether there is news, and the thread leaves the
    news before it collects the waiters, so that one of them always sees the other.
    """

    def __init__(self, request: Request, engine_thread: Runner, tokenizer: Any) -> None:
        self.engine_thread = engine_thread
        self.tokenizer = tokenizer
        self.stop = request.params.stop
        self.shown_special_tokens = request.params.shown_special_tokens
        self.outputs: list[RequestOutput] = [request.output, *(fork.output for fork in request.forks)]
        self.num_tokens = [0] * len(self.outputs)
        self.ended = [False] * len(self.outputs)
        self.error: Exception | None = None
        self.is_over = False
        self.waiting_for_news: deque[Waiter] = deque()
        self.waiting_for_end: deque[Waiter] = deque()

    @property
    def request_id(self) -> str:
        return self.outputs[0].request_id

    def cancel(self) -> None:
        """Ask for the end of the request. Any thread may do so at any moment, also while garbage is collected."""
        if not self.is_over:
            self.engine_thread.cancel(self)

    def publish(self, output: RequestOutput, wakes: Wakes) -> None:
        """Show readers what ``output`` came to; tasks to be woken join ``wakes``."""
        # A loop that is closed runs nobody's cleaning up: nobody waits any more.
        if any(not callable(waiter) and waiter.get_loop().is_closed() for waiter in tuple(self.waiting_for_end)):
            self.cancel()
        index = output.index
        self.num_tokens[index] = len(output.token_ids)
        if output.finish_reason is not None:
            self.ended[index] = True
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
                waiter = waiters.popleft()
                if callable(waiter):
                    waiter()
                else:
                    wakes.setdefault(waiter.get_loop(), []).append((self, waiter))


class Wakes(dict[asyncio.AbstractEventLoop, list[tuple[Ticket, asyncio.Future[None]]]]):
    """Tasks to be woken after a step: one call into each event loop, however many of its tasks have news."""

    def send(self) -> None:
        """Wake them, and begin anew."""
        for loop, waiting in self.items():
            try:
                loop.call_soon_threadsafe(_resolve, waiting)
            except RuntimeError:
                # The loop is closed, and its tasks are gone with it.
                for ticket, _ in waiting:
                    ticket.cancel()
        self.clear()


def _resolve(waiting: Iterable[tuple[Ticket, asyncio.Future[None]]]) -> None:
    for _, future in waiting:
        if not future.done():
            future.set_result(None)


def sleep_until(
    ticket: Ticket, waiters: deque[Waiter], is_there: Callable[[], bool], timeout: float | None = None
) -> None:
    """Block this thread until it is woken through ``waiters``, unless ``is_there()`` already.

    Raises DeadlineExceeded after ``timeout`` seconds. Interrupted by anything else, it cancels the request.
    """
    _check_outside(ticket)
    bell = threading.Lock()
    bell.acquire()
    waiters.append(bell.release)
    try:
        if is_there():
            return
        rang = bell.acquire(timeout=-1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX))
    except BaseException:
        ticket.cancel()
        raise
    if not rang and _forget(waiters, bell.release):
        raise DeadlineExceeded(f"request {ticket.request_id} is not over after {timeout} seconds")


async def await_until(ticket: Ticket, waiters: deque[Waiter], is_there: Callable[[], bool]) -> None:
    """Suspend this task until it is woken through ``waiters``, unless ``is_there()`` already.

    Cancelled, it cancels the request.
    """
    _check_outside(ticket)
    future = asyncio.get_running_loop().create_future()
    waiters.append(future)
    try:
        if not is_there():
            await future
    except BaseException:
        ticket.cancel()
        raise


def _check_outside(ticket: Ticket) -> None:
    if ticket.engine_thread.is_current:
        raise EngineBusy("the engine is in the middle of a step; what runs inside a step must not wait for it")


def call_at_end(ticket: Ticket, function: Callable[[], object]) -> None:
    """Have ``function`` called once the request is over: by the engine's thread, or now if it is."""

    def call() -> None:
        try:
            function()
        except Exception:
            logger.exception("a callback failed")

    ticket.waiting_for_end.append(call)
    if ticket.is_over and _forget(ticket.waiting_for_end, call):
        function()


def _forget(waiters: deque[Waiter], waiter: Waiter) -> bool:
    """Take a waiter back; False if it was woken at the very last moment."""
    with suppress(ValueError):
        waiters.remove(waiter)
        return True
    return False
