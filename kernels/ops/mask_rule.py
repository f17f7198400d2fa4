"""MaskRule: which earlier tokens a token may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Causal attention, optionally limited to a sliding window or to the token's own chunk.

    ``full``: key j is visible to query i when ``j <= i``. ``window``: when also ``i - j < size``.
    ``chunk``: when also ``i // size == j // size``. ``size`` counts tokens, at least 1; with ``full`` it is 0.
    Raises ValueError for anything else.
    """

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "window", "chunk"):
            raise ValueError(f"a mask rule is 'full', 'window' or 'chunk', got {self.kind!r}")
        if self.kind == "full" and self.size:
            raise ValueError(f"full attention has no size, got {self.size}")
        if self.kind != "full" and self.size < 1:
            raise ValueError(f"a {self.kind} must be of at least 1 token, got {self.size}")

    def first_visible(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        if self.kind == "window":
            return max(0, position - self.size + 1)
        if self.kind == "chunk":
            return position // self.size * self.size
        return 0

    def visible(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Whether each query sees each key; the positions broadcast against each other to the shape of the answer."""
        mask = key_positions <= query_positions
        if self.kind == "window":
            mask &= key_positions > query_positions - self.size
        if self.kind == "chunk":
            mask &= key_positions // self.size == query_positions // self.size
        return mask

    def __str__(self) -> str:
        return self.kind if self.kind == "full" else f"{self.kind} {self.size}"


FULL = MaskRule()
