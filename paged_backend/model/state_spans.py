"""StateSpans: which slots of recurrent state each part of a batch reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paged_backend.memory.state_slots import NO_SLOT, Span


class Chunk(NamedTuple):
    """Tokens ``begin`` to ``end`` of a batch, of one sequence: they lead from a slot, NO_SLOT at the beginning of the
    sequence, to another."""

    begin: int
    end: int
    source: int
    target: int


@dataclass(frozen=True)
class StateSpans:
    """sources, targets: the slots of the decodes, int64 ``[num_decodes]``. chunks: in an order in which each slot is
    written before it is read."""

    sources: torch.Tensor
    targets: torch.Tensor
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, decodes: Sequence[Span], prefills: Sequence[Sequence[Span]]) -> StateSpans:
        """From one span of each decode, and the spans of each prefill chunk."""
        chunks, place = [], len(decodes)
        for spans in prefills:
            for span in spans:
                end = place + span.end - span.first
                chunks.append(Chunk(place, end, span.source, span.target))
                place = end
        return cls(
            torch.tensor([span.source for span in decodes], dtype=torch.int64, device="cpu"),
            torch.tensor([span.target for span in decodes], dtype=torch.int64, device="cpu"),
            tuple(chunks),
        )


class LoneSlots:
    """The slots of a few sequences that no books are kept of: each has two, and goes from one to the other."""

    def __init__(self, num_sequences: int) -> None:
        self.num_slots = 2 * num_sequences
        self.restart()

    def restart(self) -> None:
        """All sequences begin anew."""
        self._slots = [NO_SLOT] * (self.num_slots // 2)

    def spans(self, decodes: Sequence[int], chunks: Sequence[int], lengths: Sequence[int]) -> StateSpans:
        """The spans of sequences that decode, and of those that have a chunk of a length."""
        return StateSpans.of(
            [self._next(sequence, 1) for sequence in decodes],
            [[self._next(sequence, length)] for sequence, length in zip(chunks, lengths, strict=True)],
        )

    def _next(self, sequence: int, length: int) -> Span:
        source = self._slots[sequence]
        target = 2 * sequence + (source == 2 * sequence)
        self._slots[sequence] = target
        return Span(0, length, source, target)
