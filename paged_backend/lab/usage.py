"""Usage: blocks of memory that requests hold, and that the cache keeps, over time."""

from __future__ import annotations

# Enough for a plot; of more moments every other one is forgotten.
_MANY = 1024


class Usage:
    """A bounded number of moments, evenly thinned out: seconds, blocks that requests hold, blocks cached."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.moments: list[tuple[float, int, int]] = []
        self._stride = 1
        self._num_seen = 0

    def record(self, now: float, num_owned: int, num_cached: int) -> None:
        """A step is over."""
        if self._num_seen % self._stride == 0:
            self.moments.append((now, num_owned, num_cached))
            if len(self.moments) >= _MANY:
                del self.moments[1::2]
                self._stride *= 2
        self._num_seen += 1
