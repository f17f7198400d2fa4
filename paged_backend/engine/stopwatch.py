"""Stopwatch: where the wall time of a step goes."""

from __future__ import annotations

import time


class Stopwatch:
    """Splits a step's wall time into named laps, in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap under ``name``."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now
