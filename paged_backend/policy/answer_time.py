"""AnswerTime: how long a policy takes for an answer, but for what the machine and the interpreter take meanwhile."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from time import perf_counter, thread_time
from typing import Any

# Seconds of computing that one answer may take before it is reported; a step takes 5 to 100 ms.
SLOW_S = 0.1
# Wall seconds that it may take, computing or waiting.
BLOCKED_S = 1.0
# Reading how long a thread stood in line for a core takes as long as many answers do, so it is not done for each.
_REFRESH_S = 0.1


class AnswerTime:
    """The time since it was made, as spent by the thread that made it.

    Garbage collections are taken out, whoever left the garbage, and so is the time for which the thread could have run
    but others had the cores, as far as the system tells.
    """

    __slots__ = ("_began", "_collected", "_computed", "_in_line")

    def __init__(self) -> None:
        self._began, self._computed, self._collected = perf_counter(), thread_time(), _collections.seconds
        self._in_line = _line.at_least(self._began)

    def slowness(self) -> str | None:
        """What is to be said of an answer that computed for over ``SLOW_S`` or took over ``BLOCKED_S``, else None."""
        seconds = perf_counter() - self._began
        if seconds <= SLOW_S:
            return None
        collected = _collections.seconds - self._collected
        computed = thread_time() - self._computed - collected
        seconds -= collected
        if computed > SLOW_S:
            return f"computed for {computed:.2f} s, and everybody waited"
        if seconds > BLOCKED_S and (seconds := seconds - (_line.now() - self._in_line)) > BLOCKED_S:
            return f"took {seconds:.2f} s without computing, and everybody waited"
        return None


class _Collections:
    """Counts the seconds that garbage collections take, in whatever thread: all others wait for them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        now = perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.seconds += now - self._began


class _Line(threading.local):
    """How long this thread has stood in line for a core since it began, in seconds; 0 where the system does not say."""

    def __init__(self) -> None:
        self._seconds, self._read_at = 0.0, float("-inf")

    def now(self) -> float:
        with suppress(OSError, IndexError, ValueError), open("/proc/thread-self/schedstat") as file:
            self._seconds = int(file.read().split()[1]) / 1e9
        self._read_at = perf_counter()
        return self._seconds

    def at_least(self, moment: float) -> float:
        """What it was shortly before ``moment``: in doubt, time in line counts for an answer rather than against it."""
        return self._seconds if moment - self._read_at < _REFRESH_S else self.now()


_collections = _Collections()
_line = _Line()
