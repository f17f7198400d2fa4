"""Which slots each part of a batch reads and writes."""

from __future__ import annotations

from paged_backend.memory.state_slots import NO_SLOT, Span
from paged_backend.model.state_spans import Chunk, LoneSlots, StateSpans


def test_decodes_come_first_and_chunks_follow_each_other_in_the_pack():
    spans = StateSpans.of(
        [Span(7, 8, 3, 4), Span(9, 10, 5, 6)], [[Span(0, 4, NO_SLOT, 0), Span(4, 6, 0, 1)], [Span(2, 5, 7, 8)]]
    )
    assert spans.sources.tolist() == [3, 5]
    assert spans.targets.tolist() == [4, 6]
    assert spans.chunks == (Chunk(2, 6, NO_SLOT, 0), Chunk(6, 8, 0, 1), Chunk(8, 11, 7, 8))


def test_a_lone_sequence_goes_to_and_fro_between_two_slots_of_its_own():
    slots = LoneSlots(2)
    assert slots.spans([], [0, 1], [3, 2]).chunks == (Chunk(0, 3, NO_SLOT, 0), Chunk(3, 5, NO_SLOT, 2))
    second = slots.spans([0], [1], [4])
    assert (second.sources.tolist(), second.targets.tolist()) == ([0], [1])
    assert second.chunks == (Chunk(1, 5, 2, 3),)
    slots.restart()
    assert slots.spans([], [0], [1]).chunks[0].source == NO_SLOT
