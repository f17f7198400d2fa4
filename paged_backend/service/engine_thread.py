"""EngineThread: one thread that owns an engine, takes in what other threads ask for, and steps while there is work."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from paged_backend.engine.engine import Engine
from paged_backend.errors import EngineBusy, EngineClosed, EngineFailed, RequestRefused
from paged_backend.outputs import RequestOutput
from paged_backend.request.request import Request
from paged_backend.service.ticket import Ticket, Wakes

logger = logging.getLogger("paged_backend")

Result = TypeVar("Result")

# No wait is longer, nor, for a policy that asks to be called again at once, shorter.
LONGEST_WAIT_S, SHORTEST_WAIT_S = 3600.0, 0.001
# How long the interpreter's exit waits for a step to end.
EXIT_PATIENCE_S = 10.0


class EngineThread:
    """Runs an engine until it is closed or fails; then it is over, and a new one may run the same engine.

    Others reach the engine only through commands, which the thread runs between two steps. Without work it sleeps
    until a command comes, or until the moment that a policy or a time limit names.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.keeper is not None:
            raise EngineBusy("another AsyncEngine runs this engine; close that one first, or submit to it")
        self.engine = engine
        # Its put() takes no lock that could be held already, so that finalizers may call it.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Guards the tickets, the count and the states, against submit() in other threads.
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._num_on_their_way = 0
        self._is_closing = False
        self._at_once = False
        self._paused = False
        self._error: EngineClosed | None = None
        self._num_torch_threads = torch.get_num_threads()
        self.ended: Future[None] = _uncancellable()
        self._wakes = Wakes()
        self._ident: int | None = None
        self._thread = threading.Thread(target=self._run, name="paged-backend-engine", daemon=True)
        _engine_threads.add(self)
        # Before the thread runs, so that no call slips in.
        engine.keeper = self
        try:
            self._thread.start()
        except BaseException:
            engine.keeper = None
            raise

    # For any thread

    @property
    def is_current(self) -> bool:
        """Whether the caller runs inside this thread, in a hook or a processor."""
        return threading.get_ident() == self._ident

    @property
    def is_closing(self) -> bool:
        """Whether it takes nothing more; it may still be at work on what it took."""
        return self._is_closing

    @property
    def num_unfinished(self) -> int:
        return len(self._tickets)

    def check_open(self) -> None:
        """Raise EngineClosed, or EngineFailed with the cause, if nothing more can be submitted."""
        self.engine.check_open()
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._is_closing:
            raise EngineClosed("the service is closed; start() begins anew")

    def check_queue(self) -> None:
        """Raise QueueFull if no further request may wait."""
        self.engine.check_queue(self._num_on_their_way)

    def submit(self, request: Request) -> Ticket:
        """Hand a prepared request to the engine. Raises EngineClosed, EngineFailed, QueueFull or RequestRefused."""
        ticket = Ticket(request, self, self.engine.tokenizer)
        with self._lock:
            self.check_open()
            self.check_queue()
            if request.request_id in self._tickets:
                raise RequestRefused(f"request_id {request.request_id!r} is taken by an unfinished request")
            self._tickets[request.request_id] = ticket
            self._num_on_their_way += 1
            self._inbox.put(partial(self._enqueue, request, ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request before the next step. Takes no lock, for garbage is collected at any moment."""
        self._inbox.put(partial(self._abort, ticket))

    def call(self, function: Callable[[], Result]) -> Result:
        """Run ``function`` between two steps and wait for what it returns or raises."""
        if self.is_current:
            return function()
        command = _Call(function)
        with self._lock:
            self.check_open()
            self._inbox.put(command)
        result: Result = command.future.result()
        return result

    def check_outside(self) -> None:
        """Raise EngineBusy if the caller runs inside this thread, and so may neither stop it nor wait for it."""
        if self.is_current:
            raise EngineBusy(
                "what runs inside the engine's thread, such as a hook, a processor or a callback, must not pause or "
                "close the service, whose requests are everybody's; do it from another thread"
            )

    def pause(self) -> None:
        """Run no further step; returns when none is running. Requests wait; their time limits go on."""
        self.check_outside()
        self.call(partial(self._set_paused, True))

    def resume(self) -> None:
        """Take the steps up again."""
        self.check_outside()
        self.call(partial(self._set_paused, False))

    def close(self, *, graceful: bool) -> None:
        """Take nothing more; end when all requests are over (``graceful``), or abort them before the next step."""
        # Without the lock, since a finalizer may call this; the thread itself sets the states.
        self._inbox.put(partial(self._close, at_once=not graceful))

    def leave(self) -> None:
        """End without having anything to do, and wait for that; does nothing if there is an unfinished request."""
        with self._lock:
            if self._tickets:
                return
            self._is_closing = True
        self.close(graceful=True)
        self.join()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end; False if it did not come within ``timeout`` seconds."""
        self.check_outside()
        # Not on the thread itself: once interrupted, Python 3.11 takes a thread that runs for one that ended.
        try:
            self.ended.result(timeout)
        except TimeoutError:
            return False
        self._thread.join()
        return True

    # For the thread alone

    def _run(self) -> None:
        self._ident = threading.get_ident()
        failure: BaseException | None = None
        try:
            self._take_settings()
            while self._goes_on():
                if self._paused:
                    self._publish(self.engine.settle())
                elif self.engine.has_unfinished_requests():
                    self._publish(self.engine.step(drain=self._is_closing))
            self._abort_all()
        except BaseException as error:
            failure = error
            logger.error("the engine's thread ends with an error", exc_info=error)
        self._end(failure)

    def _take_settings(self) -> None:
        # These are per thread, and the engine's owner made them in another one.
        torch.set_num_threads(self._num_torch_threads)
        device = self.engine.twin.device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def _goes_on(self) -> bool:
        """Run the commands that came, after a sleep if there is nothing else to do; False when the end has come."""
        if self._inbox.empty() and (seconds := self._seconds_to_sleep()) != 0:
            try:
                command = self._inbox.get(timeout=seconds)
            except Empty:
                pass
            else:
                command()
        # No more than are there now, so that a flood of commands does not keep the steps from running.
        for _ in range(self._inbox.qsize()):
            self._inbox.get()()
        return not self._is_closing or (not self._at_once and bool(self._tickets))

    def _seconds_to_sleep(self) -> float | None:
        """0 if there is something to do, None if there will be nothing before a command comes."""
        if self._paused:
            until = self.engine.next_time_limit
        elif self._is_closing:
            return 0
        else:
            until = self.engine.held_until
            if until is None and self.engine.has_unfinished_requests():
                return 0
        if until is None:
            return None
        return min(max(until - self.engine.clock(), SHORTEST_WAIT_S), LONGEST_WAIT_S)

    def _enqueue(self, request: Request, ticket: Ticket) -> None:
        try:
            self.engine.enqueue(request)
        except Exception as error:
            self._drop(ticket)
            ticket.fail(error, self._wakes)
            self._wakes.send()
        finally:
            with self._lock:
                self._num_on_their_way -= 1

    def _abort(self, ticket: Ticket) -> None:
        if self._tickets.get(ticket.request_id) is ticket:
            self.engine.abort(ticket.request_id)

    def _abort_all(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
        for request_id in list(self._tickets):
            self.engine.abort(request_id)
        self._publish(self.engine.settle())

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _close(self, *, at_once: bool) -> None:
        with self._lock:
            self._is_closing = True
        self._at_once = self._at_once or at_once
        self._paused = False

    def _publish(self, outputs: list[RequestOutput]) -> None:
        """Tell the readers of a step's outputs."""
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is not None:
                ticket.publish(output, self._wakes)
                if ticket.is_over:
                    self._drop(ticket)
        self._wakes.send()

    def _drop(self, ticket: Ticket) -> None:
        with self._lock:
            del self._tickets[ticket.request_id]

    def _end(self, failure: BaseException | None) -> None:
        """Tell everybody who still waits, then leave the engine without requests, as the next thread expects it."""
        error = EngineClosed("the service was closed; start() begins anew")
        if failure is not None:
            error = EngineFailed(f"the engine's thread ended with {failure!r}; start() begins anew")
            error.__cause__ = failure
        with self._lock:
            self._is_closing = True
            self._error = error
        self._tell_all(error)
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Call):
                command.future.set_exception(error)
        if failure is not None:
            try:
                for request_id in self._tickets:
                    self.engine.abort(request_id)
                self.engine.settle()
            except Exception:
                logger.exception("the engine could not be tidied up")
        self._tickets.clear()
        # Another thread may be given the same one now.
        self._ident = self.engine.keeper = None
        self.ended.set_result(None)

    def _tell_all(self, error: EngineClosed) -> None:
        for ticket in self._tickets.values():
            ticket.fail(error, self._wakes)
        self._wakes.send()

    def _forked(self) -> None:
        """In the child of a fork this thread does not exist, and its locks may be held for ever."""
        self._lock = threading.Lock()
        self._is_closing = True
        self._error = EngineClosed("a forked process has no engine thread; make the engine in the process that uses it")
        for ticket in self._tickets.values():
            ticket.fail(self._error, Wakes())
        self._tickets.clear()
        self.engine.keeper = None
        self.ended = _uncancellable()
        self.ended.set_result(None)


class _Call:
    """A command whose caller waits for its result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.future: Future[Any] = Future()

    def __call__(self) -> None:
        try:
            self.future.set_result(self._function())
        except Exception as error:
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(error)
            raise


def _uncancellable() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


_engine_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


def _close_all() -> None:
    """At the interpreter's exit: a daemon thread inside torch must not be cut off."""
    running = [thread for thread in _engine_threads if not thread.ended.done()]
    for thread in running:
        thread.close(graceful=False)
    for thread in running:
        thread.join(EXIT_PATIENCE_S)


def _after_fork() -> None:
    for thread in list(_engine_threads):
        thread._forked()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
