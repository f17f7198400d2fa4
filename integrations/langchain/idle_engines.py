"""IdleEngines: engines that no model object uses any more, kept for a while in case another one comes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paged_backend.errors import EngineClosed

# Further ones go at once, those first that are idle longest.
MOST_IDLE = 3


def after(seconds: float, function: Callable[[], None]) -> threading.Timer:
    """Call ``function`` after so many seconds, from a thread that sleeps until then."""
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), function)
    timer.daemon = True
    timer.start()
    return timer


@dataclass(eq=False)
class _Idle:
    service: Any
    # What the key tells by identity, which must not become another object's.
    options: Any
    timer: Any = None


class IdleEngines:
    """Each running AsyncEngine is closed, with its Engine, when its seconds are over; nothing polls.

    timer: ``after``, or what does the same by another clock. Finalizers may call ``put`` at any moment.
    """

    def __init__(self, timer: Callable[[float, Callable[[], None]], Any] = after) -> None:
        self._after = timer
        self._idle: dict[Hashable, _Idle] = {}
        # One that a finalizer in the middle of another call may take too.
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def put(self, key: Hashable, service: Any, options: Any, seconds: float) -> None:
        """Keep a service for others of its key; 0 seconds close it at once."""
        if seconds <= 0:
            close(service, with_engine=True)
            return
        idle = _Idle(service, options)
        with self._lock:
            leaving = [self._idle.pop(key, None)]
            self._idle[key] = idle
            while len(self._idle) > MOST_IDLE:
                leaving.append(self._idle.pop(next(iter(self._idle))))
        idle.timer = self._after(seconds, lambda: self._expire(key, idle))
        for other in leaving:
            _close(other)

    def take(self, key: Hashable) -> Any:
        """The service of this key, which is its caller's from now on, or None."""
        with self._lock:
            idle = self._idle.pop(key, None)
        if idle is None:
            return None
        if idle.timer is not None:
            idle.timer.cancel()
        return None if idle.service.engine.is_closed else idle.service

    def clear(self) -> bool:
        """Close all; whether there was any."""
        with self._lock:
            leaving = list(self._idle.values())
            self._idle.clear()
        for idle in leaving:
            _close(idle)
        return bool(leaving)

    def _expire(self, key: Hashable, idle: _Idle) -> None:
        with self._lock:
            if self._idle.get(key) is not idle:
                return
            del self._idle[key]
        _close(idle)

    def _forget(self) -> None:
        # In the child of a fork no thread runs them, and the lock may be held for ever.
        self._lock = threading.RLock()
        self._idle = {}


def _close(idle: _Idle | None) -> None:
    if idle is not None:
        if idle.timer is not None:
            idle.timer.cancel()
        close(idle.service, with_engine=True)


def close(service: Any, *, with_engine: bool) -> None:
    """End what a service runs, and close its engine too if that is wanted."""
    # Dropped by garbage collection inside of a step, both go with their last reference instead.
    with suppress(EngineClosed):
        service.close(graceful=False)
        if with_engine:
            service.engine.close()
