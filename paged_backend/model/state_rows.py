"""StateRows: the states of some sequences where they lie, for functions that need no copy of them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StateRows(NamedTuple):
    """Stands in for a state ``[B, ...]``: row b is in slot ``sources[b]`` of ``pool``, and goes to slot ``targets[b]``.

    Both are int64 ``[B]``. What understands it reads and writes the pool; all else fails.
    """

    pool: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> StateRows:
        """With the slots where the pool is."""
        return cls(pool, sources.to(pool.device), targets.to(pool.device))

    def copy_(self, other: object) -> StateRows:
        """What a cache does with the state after a call, which is in its place already."""
        if other is not self:
            raise TypeError("a state that was updated where it lies is replaced by another one")
        return self
