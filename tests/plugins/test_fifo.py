"""The earliest arrival first, with nobody overtaken."""

from __future__ import annotations

from model_free import ModelFree

from paged_backend.plugins.fifo import Fifo


def test_requests_start_in_the_order_of_their_arrival():
    engine = ModelFree(Fifo(), max_num_seqs=1)
    for prompt in (9, 2, 5):
        engine.add(prompt, 2)
    engine.run()
    assert engine.start_orders == [0, 1, 2]
    engine.assert_sound()


def test_a_small_request_waits_behind_a_large_one_that_does_not_fit():
    engine = ModelFree(Fifo(), num_blocks=8, budget=32)
    engine.add(20, 8)
    engine.add(24, 2)
    engine.add(1, 1)
    engine.run()
    assert engine.start_orders == [0, 1, 2]


def test_a_preempted_request_goes_before_all_later_arrivals():
    engine = ModelFree(Fifo(), num_blocks=6, max_num_seqs=2)
    first, second = engine.add(8, 12), engine.add(8, 12)
    engine.add(2, 2)
    engine.run()
    assert second.output.metrics.num_preemptions > first.output.metrics.num_preemptions == 0
    assert engine.start_orders == [0, 1, 1, 2]
    engine.assert_sound()
