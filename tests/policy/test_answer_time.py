"""A policy is slow when it is slow itself, and not for what the machine and the interpreter do meanwhile."""

from __future__ import annotations

import gc
import logging
import time

import pytest

from paged_backend.policy import answer_time
from paged_backend.policy.policy_errors import PolicyErrors, ask, call


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def limits(monkeypatch):
    """Limits that a test can pass without anybody waiting."""
    monkeypatch.setattr(answer_time, "SLOW_S", 0.02)
    monkeypatch.setattr(answer_time, "BLOCKED_S", 0.1)


def test_slow_answer_is_used_and_the_warning_says_so(limits, caplog):
    errors = PolicyErrors(strict=True)
    with caplog.at_level(logging.WARNING, logger="paged_backend"):
        assert call(errors, "mine", "victim", lambda: compute(0.03) or 7) == 7
    assert errors.counts == {"mine.victim (slow)": 1}
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("mine.victim (slow) computed for 0.0")
    assert message.endswith("its answer counts all the same, and further cases are only counted")
    errors.raise_first()


def test_waiting_is_slow_too(limits):
    errors = PolicyErrors()
    call(errors, "mine", "victim", lambda: time.sleep(0.3))
    assert errors.counts == {"mine.victim (slow)": 1}


def test_nobody_is_blamed_for_a_garbage_collection_inside_its_call(limits):
    class Garbage:
        """Takes long to be collected."""

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            compute(0.05)
            time.sleep(0.12)

    def collecting() -> int:
        garbage = Garbage()
        del garbage
        return gc.collect()

    errors = PolicyErrors()
    assert call(errors, "mine", "victim", collecting) > 0
    assert errors.counts == {}


@pytest.mark.parametrize(("in_line", "is_slow"), [(0.2, False), (0.0, True)])
def test_nobody_is_blamed_for_a_busy_machine(limits, monkeypatch, in_line, is_slow):
    readings = [5.0, 5.0 + in_line]
    monkeypatch.setattr(answer_time._Line, "now", lambda self: readings.pop(0))
    monkeypatch.setattr(answer_time, "_line", answer_time._Line())
    errors = PolicyErrors()
    call(errors, "mine", "victim", lambda: time.sleep(0.15))
    assert bool(errors.counts) == is_slow
    assert readings == []


def test_time_in_line_for_a_core_is_read_seldom_but_in_doubt():
    line = answer_time._Line()
    first = line.at_least(time.perf_counter())
    assert line.at_least(time.perf_counter()) == first
    assert line.now() >= first


def test_nobody_is_timed_where_the_time_of_the_machine_does_not_count(limits, monkeypatch):
    errors = PolicyErrors(times_answers=False)
    monkeypatch.setattr(answer_time, "thread_time", lambda: pytest.fail("the clock was read"))
    assert call(errors, "mine", "victim", lambda: time.sleep(0.03) or 7) == 7
    assert ask(errors, "text", "upper") == "TEXT"
    assert not errors.counts
