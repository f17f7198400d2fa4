"""The tensors that hold recurrent and convolution states, a slot for each state of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateSpec:
    """One state that a layer keeps of everything before a token, of the same size however much that was.

    name: of the module, and of the state in it. shape: of one sequence's state, in elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StateCache:
    """A pool ``[num_slots, *shape]`` for each state. Memory is reserved as slots come into use, and not touched before.

    A slot that was written is only read until its owner gives it up: what reads a state writes the next one elsewhere,
    so that a pass which fails half-way leaves everything as it was.
    """

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self.specs = tuple(specs)
        self.clear()

    def clear(self) -> None:
        """Give all memory back."""
        self.pools = [torch.empty(0, *spec.shape, dtype=spec.dtype, device=spec.device) for spec in self.specs]

    @property
    def num_slots(self) -> int:
        return self.pools[0].shape[0] if self.pools else 0

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of all states of one sequence."""
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Reserved bytes over all states."""
        return self.num_slots * self.bytes_per_slot

    def grow(self, num_slots: int, most: int | None = None) -> None:
        """Have at least ``num_slots``, and not more than ``most`` ahead of need; contents stay.

        Raises RuntimeError or MemoryError where there is no memory.
        """
        have = self.num_slots
        if num_slots <= have:
            return
        ahead = have * 3 // 2
        count = max(num_slots, ahead if most is None else min(ahead, most))
        pools = []
        for pool in self.pools:
            larger = pool.new_empty(count, *pool.shape[1:])
            larger[:have] = pool
            pools.append(larger)
        self.pools = pools

    def read(self, index: int, slots: torch.Tensor) -> torch.Tensor:
        """Copies of state ``index`` in ``slots``, int64 ``[B]``: ``[B, *shape]``."""
        return self.pools[index].index_select(0, slots.to(self.pools[index].device))

    def write(self, index: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put ``rows`` ``[B, *shape]`` into ``slots``, int64 ``[B]``, all of them different."""
        pool = self.pools[index]
        pool.index_copy_(0, slots.to(pool.device), rows.to(pool))
