"""A run's shares are of what it says."""

from __future__ import annotations

import pytest

from paged_backend.lab.replay import Outcome
from paged_backend.lab.run import KVMoment, Run, useful_tokens


def test_moments_hold_until_the_next():
    moments = [KVMoment(0.0, 10, 5), KVMoment(1.0, 10, 10), KVMoment(4.0, 0, 0)]
    assert Run([], 4.0, moments, 1, 1).kv_utilisation == pytest.approx((5 + 30) / 40)


def test_nothing_is_nothing():
    assert Run([], 0.0, [], 0, 0).kv_utilisation == 0.0
    assert Run([], 0.0, [], 0, 0).waste == 0.0


def test_the_last_token_of_a_request_goes_through_no_model():
    outcomes = [Outcome(0.0, 1.0, 2.0, 5, 3, None, None, "length"), Outcome(0.0, 1.0, 2.0, 1, 1, None, None, "length")]
    assert useful_tokens(outcomes) == 8
