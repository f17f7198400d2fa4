"""PaddedServer: batches of requests that are padded to the longest and answered together."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from paged_backend.lab.replay import Outcome
from paged_backend.lab.run import KVMoment, Run, useful_tokens
from paged_backend.lab.trace import TraceRequest

# Runs a batch; returns the seconds on the clock at which it began, and at which each further token of all was there.
ExecuteBatch = Callable[[Sequence[TraceRequest]], Sequence[float]]


class PaddedServer:
    """Serves one batch after the other, each formed of whoever waits, at most ``batch``, by arrival.

    execute: runs a batch, in real or virtual time. clock: seconds. sleep_until: lets time pass. window_s: how long the
    oldest waits for a full batch; None for not at all. on_finished: told how many were answered.
    """

    def __init__(
        self,
        execute: ExecuteBatch,
        clock: Callable[[], float],
        sleep_until: Callable[[float], None],
        *,
        batch: int,
        window_s: float | None = None,
        on_finished: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._execute = execute
        self._clock = clock
        self._sleep_until = sleep_until
        self._batch = batch
        self._window_s = window_s
        self._on_finished = on_finished

    def run(self, trace: Sequence[TraceRequest]) -> Run:
        """Serve ``trace`` to its end. The first token of a request counts when it is computed, its end when the batch
        is over."""
        arriving, waiting = deque(enumerate(trace)), deque[tuple[int, TraceRequest]]()
        outcomes: dict[int, Outcome] = {}
        memory: list[KVMoment] = []
        computed = 0
        while arriving or waiting:
            now = self._clock()
            while arriving and arriving[0][1].arrival <= now:
                waiting.append(arriving.popleft())
            wakeup = self._wakeup(waiting, arriving, now)
            if wakeup is not None:
                self._sleep_until(wakeup)
                continue
            rows = [waiting.popleft() for _ in range(min(self._batch, len(waiting)))]
            batch = [request for _, request in rows]
            times = self._execute(batch)
            for order, request in rows:
                outcomes[order] = Outcome(
                    request.arrival,
                    times[1],
                    times[-1],
                    len(request.prompt),
                    request.output_length,
                    None,
                    request.client_id,
                    "length",
                )
            memory += memory_of(batch, times)
            width, height = max(len(request.prompt) for request in batch), len(batch)
            computed += height * (width + max(request.output_length for request in batch) - 1)
            self._on_finished(len(batch))
        ordered = [outcomes[order] for order in range(len(trace))]
        return Run(ordered, self._clock(), memory, computed, useful_tokens(ordered))

    def _wakeup(
        self, waiting: Sequence[tuple[int, TraceRequest]], arriving: Sequence[tuple[int, TraceRequest]], now: float
    ) -> float | None:
        """When to look again; None when a batch begins now."""
        next_arrival = arriving[0][1].arrival if arriving else None
        if not waiting:
            return next_arrival
        if self._window_s is None or len(waiting) >= self._batch or next_arrival is None:
            return None
        closes_at = waiting[0][1].arrival + self._window_s
        return None if now >= closes_at else min(closes_at, next_arrival)


class VirtualClock:
    """The time of padded batches that nobody runs. steps_of: seconds of each step of a batch."""

    def __init__(self, steps_of: Callable[[Sequence[TraceRequest]], Sequence[float]]) -> None:
        self._steps_of = steps_of
        self._now = 0.0

    def read(self) -> float:
        """The time, in seconds."""
        return self._now

    def set_forward(self, moment: float) -> None:
        """Let time pass."""
        self._now = max(self._now, moment)

    def execute(self, batch: Sequence[TraceRequest]) -> list[float]:
        """Let the time of a batch pass; what PaddedServer wants to hear of it."""
        times = list(itertools.accumulate(self._steps_of(batch), initial=self._now))
        self._now = times[-1]
        return times


def memory_of(batch: Sequence[TraceRequest], times: Sequence[float]) -> list[KVMoment]:
    """Slots that a padded cache has at each step of a batch, and those that hold a token of somebody unfinished."""
    width, moments = max(len(request.prompt) for request in batch), []
    for step, time in enumerate(times[:-1]):
        filled = sum(len(request.prompt) + step for request in batch if step < request.output_length)
        moments.append(KVMoment(time, len(batch) * (width + step), filled))
    return [*moments, KVMoment(times[-1], 0, 0)]
