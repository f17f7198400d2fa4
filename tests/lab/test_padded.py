"""Padded batches are formed by arrival, answered as a whole, and take memory for their padding."""

from __future__ import annotations

import pytest

from paged_backend.lab.padded import PaddedServer, memory_of
from paged_backend.lab.trace import TraceRequest


class Clock:
    """Virtual time; each step of a batch takes a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.batches: list[list[int]] = []

    def set_forward(self, moment: float) -> None:
        assert moment > self.now
        self.now = moment

    def execute(self, batch):
        self.batches.append([len(request.prompt) for request in batch])
        start = self.now
        self.now += max(request.output_length for request in batch)
        return [start + step for step in range(int(self.now - start) + 1)]


def serve(requests, batch=2, window_s=None):
    clock, answered = Clock(), []
    server = PaddedServer(
        clock.execute,
        lambda: clock.now,
        clock.set_forward,
        batch=batch,
        window_s=window_s,
        on_finished=answered.append,
    )
    return server.run(requests), clock, answered


def request(arrival: float, prompt: int, output: int) -> TraceRequest:
    return TraceRequest(arrival, range(prompt), output)


def test_a_batch_is_of_who_waits_by_arrival_and_answered_when_its_longest_is_done():
    run, clock, answered = serve([request(0, 3, 2), request(0, 5, 4), request(0, 7, 1)])
    assert clock.batches == [[3, 5], [7]]
    assert [outcome.finished for outcome in run.outcomes] == [4.0, 4.0, 5.0]
    assert [outcome.first_token for outcome in run.outcomes] == [1.0, 1.0, 5.0]
    assert answered == [2, 1]
    assert run.seconds == 5.0


def test_without_a_window_nobody_waits_for_company():
    _, clock, _ = serve([request(0, 3, 2), request(0.5, 5, 4)])
    assert clock.batches == [[3], [5]]


def test_a_window_waits_for_a_full_batch_as_long_as_it_says():
    _, clock, _ = serve([request(0, 3, 2), request(0.5, 5, 4), request(9, 7, 1), request(20, 9, 1)], window_s=3.0)
    assert clock.batches == [[3, 5], [7], [9]]
    run, _, _ = serve([request(0, 3, 2), request(7, 5, 4)], window_s=3.0)
    assert run.outcomes[0].first_token == 4.0


def test_nobody_waits_once_nobody_else_will_come():
    run, _, _ = serve([request(0, 3, 2)], window_s=60.0)
    assert run.outcomes[0].finished == 2.0


def test_padding_is_counted_as_computed_in_vain():
    run, _, _ = serve([request(0, 2, 1), request(0, 6, 3)])
    # Two rows of six prompt tokens and two more; of them 2 and 6 + 2 were needed.
    assert run.computed_tokens == 16
    assert run.useful_tokens == 10
    assert run.waste == pytest.approx(6 / 16)


def test_slots_of_padding_and_of_finished_rows_are_not_filled():
    moments = memory_of([request(0, 2, 1), request(0, 6, 3)], [0.0, 1.0, 2.0, 4.0])
    assert [tuple(moment) for moment in moments] == [(0.0, 12, 8), (1.0, 14, 7), (2.0, 16, 8), (4.0, 0, 0)]


def test_utilisation_of_memory_is_weighted_by_time():
    run, _, _ = serve([request(0, 2, 1), request(0, 6, 3)])
    assert run.kv_utilisation == pytest.approx((8 + 7 + 8) / (12 + 14 + 16))
