"""MaskRule: which earlier tokens a token may see."""

from __future__ import annotations

from typing import Literal, NamedTuple


class MaskRule(NamedTuple):
    """Causal attention, optionally limited to a sliding window or to the token's own chunk.

    ``full``: key j is visible to query i when ``j <= i``. ``window``: when also ``i - j < size``.
    ``chunk``: when also ``i // size == j // size``.
    """

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0

    def first_visible(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        if self.kind == "window":
            return max(0, position - self.size + 1)
        if self.kind == "chunk":
            return position // self.size * self.size
        return 0

    def max_visible(self, num_tokens: int) -> int:
        """The most tokens one query of a sequence of ``num_tokens`` sees."""
        return num_tokens if self.kind == "full" else min(num_tokens, self.size)

    @property
    def window(self) -> int | None:
        return self.size if self.kind == "window" else None

    @property
    def chunk(self) -> int | None:
        return self.size if self.kind == "chunk" else None

    def __str__(self) -> str:
        return self.kind if self.kind == "full" else f"{self.kind} {self.size}"


FULL = MaskRule()
