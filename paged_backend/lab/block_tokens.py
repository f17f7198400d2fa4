"""BlockTokens: a prompt of which only the ids of its blocks are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

# Tokens of a block, in the traces that tell such ids.
SPAN = 512


class BlockTokens(Sequence[int]):
    """``length`` token ids, made as they are asked for: equal blocks hold equal tokens, others share none."""

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: Sequence[int], length: int) -> None:
        self._ids = ids
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            first, last = start // SPAN, (stop - 1) // SPAN
            if first == last:
                shift = (self._ids[first] - first) * SPAN
                return range(start + shift, stop + shift)
            tokens: list[int] = []
            for block in range(first, last + 1):
                shift = (self._ids[block] - block) * SPAN
                tokens += range(max(start, block * SPAN) + shift, min(stop, (block + 1) * SPAN) + shift)
            return tokens
        if not -self._length <= index < self._length:
            raise IndexError("no such token")
        index %= self._length
        return self._ids[index // SPAN] * SPAN + index % SPAN
