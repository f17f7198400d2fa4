"""AsyncEngine: the engine on a thread of its own, for callers in any number of threads and event loops."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Unpack

from paged_backend.engine.engine import Engine
from paged_backend.engine.exclusive import StaysHere
from paged_backend.engine.intake import Prompt
from paged_backend.errors import ConfigError, EngineClosed
from paged_backend.request.options import RequestOptions
from paged_backend.sampling_params import SamplingParams
from paged_backend.service.engine_thread import EXIT_PATIENCE_S, EngineThread
from paged_backend.service.handle import Handle
from paged_backend.stats import EngineStats


class AsyncEngine(StaysHere):
    """Lets many callers share one running batch, in streams or one by one.

        async with AsyncEngine(engine) as service:
            handle = service.submit(prompt, params, deadline_s=2.0)
            async for delta in handle:
                print(delta.text, end="")

    ``with AsyncEngine(engine) as service`` does the same for threads. All methods may be called from any thread.
    Nothing polls: without work the thread sleeps. While the service runs the engine is its own; use it through here.
    Leaving the block waits for what was submitted, or aborts it when an exception leaves the block. An engine that is
    closed is refused with EngineClosed; closing it while nothing is unfinished here ends the service too.

    Processors, stop conditions, hooks and callbacks run in the engine's thread. They may submit and cancel; pausing and
    closing, which would be everybody's, raise EngineBusy there, and so does waiting. One that raises fails its request
    alone. If a step itself raises, the thread ends, every caller gets EngineFailed with the cause, and ``start()``
    begins anew.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(
                f"AsyncEngine takes an Engine, got a {type(engine).__name__}; make one with Engine(model, tokenizer)"
            )
        engine.check_open()
        self.engine = engine
        self._thread: EngineThread | None = None
        self._pid = os.getpid()

    # Requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Handle:
        """Queue a prompt and return at once; the arguments are those of ``Engine.add_request``, seconds count from now.

        Texts are tokenised in the calling thread, so that the running batch does not wait for it.

        Raises QueueFull when ``max_waiting`` requests wait, RequestRefused (ContextOverflow when it could never fit),
        also for an option that there is not, EngineClosed before ``start`` and after ``close``, EngineFailed after the
        thread died.
        """
        thread = self._running_thread()
        # Before the work of preparing it, which an overloaded service should be spared.
        thread.check_open()
        thread.check_queue()
        return Handle(thread.submit(self.engine.prepare(prompt, params, **options)))

    @property
    def num_unfinished(self) -> int:
        """How many submitted requests are not over."""
        return 0 if self._thread is None else self._thread.num_unfinished

    # Between two steps; from a coroutine, call these through asyncio.to_thread.

    def pause(self) -> None:
        """Run no further step until ``resume``; returns when none is running, so that the model may be changed.

        Requests are still taken, they wait. Cancelling and time limits work on. ``close`` resumes.
        """
        self._running_thread().pause()

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._running_thread().resume()

    def weights_changed(self) -> None:
        """Say that the model's weights, adapters or dtype changed; nothing computed with the old ones is used again.

        Unfinished requests keep their tokens and go on with the new weights.
        """
        self._running_thread().call(self.engine.weights_changed)

    def stats(self) -> EngineStats:
        """The engine's numbers, taken between two steps."""
        thread = self._thread
        if thread is not None:
            with suppress(EngineClosed):
                return thread.call(self.engine.stats)
            thread.join()
        return self.engine.stats()

    # Life

    def start(self) -> AsyncEngine:
        """Start the thread, if none runs: at first, after ``close`` (whose end it waits for), and after a failure."""
        if os.getpid() != self._pid:
            raise EngineClosed("an engine does not survive a fork; make it in the process that uses it")
        if self._thread is not None:
            if not self._thread.is_closing:
                return self
            self._thread.join()
        self.engine.check_open()
        self._thread = EngineThread(self.engine)
        # A service that is dropped without being closed finishes what was submitted; its thread ends then.
        weakref.finalize(self, self._thread.close, graceful=True).atexit = False
        return self

    def close(self, *, graceful: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests and end the thread: when all are over, or now, which ends them with ``"abort"``.

        timeout_s: how long a graceful end may take before the rest is aborted. The engine stays open.
        """
        thread = self._thread
        if thread is None:
            return
        thread.check_outside()
        thread.close(graceful=graceful)
        try:
            if not thread.join(timeout_s if graceful else None):
                thread.close(graceful=False)
                thread.join()
        except BaseException:
            # Whoever interrupts the wait may close the engine next; the step must be over by then.
            thread.close(graceful=False)
            thread.join(EXIT_PATIENCE_S)
            raise

    async def aclose(self, *, graceful: bool = True) -> None:
        """``close`` for coroutines: the event loop goes on meanwhile. Cancelled, it aborts what is left."""
        thread = self._thread
        if thread is None:
            return
        thread.check_outside()
        thread.close(graceful=graceful)
        try:
            await asyncio.wrap_future(thread.ended)
        except BaseException:
            thread.close(graceful=False)
            raise
        thread.join()

    def __enter__(self) -> AsyncEngine:
        return self.start()

    def __exit__(self, error: type[BaseException] | None, *exc_info: object) -> None:
        self.close(graceful=error is None)

    async def __aenter__(self) -> AsyncEngine:
        return self.start()

    async def __aexit__(self, error: type[BaseException] | None, *exc_info: object) -> None:
        await self.aclose(graceful=error is None)

    def _running_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineClosed("the service is not started; use it in a with block, or call start()")
        return self._thread
