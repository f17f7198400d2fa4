"""A clock for engines whose seconds a test passes."""

from __future__ import annotations


class Clock:
    """Seconds that pass by hand, and by ``tick`` at every look."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now
