"""An eviction policy's answers come through, and what it does wrong is reported."""

from __future__ import annotations

import pytest

from paged_backend.plugins.eviction import Lru
from paged_backend.policies import CachedBlock
from paged_backend.policy.eviction_guard import EvictionGuard
from paged_backend.policy.policy_errors import FAILED

BLOCK = CachedBlock(3, 0, 0, 1, 0.0)


class Failing(Lru):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add(self, block):
        raise self.error

    remove = add

    def evict(self):
        raise self.error


def test_answers_come_through():
    guard = EvictionGuard(Lru(), pytest.fail)
    guard.add(BLOCK)
    assert guard.evict() == 3
    guard.remove(BLOCK)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit()], ids=repr)
def test_whatever_a_policy_raises_is_reported_under_the_method_and_survived(error):
    reported = []
    guard = EvictionGuard(Failing(error), lambda *args: reported.append(args[1:]))
    guard.add(BLOCK)
    guard.remove(BLOCK)
    assert guard.evict() is FAILED
    assert reported == [(method, error) for method in ("add", "remove", "evict")]


@pytest.mark.parametrize("method", ["add", "remove", "evict"])
def test_ctrl_c_passes(method):
    guard = EvictionGuard(Failing(KeyboardInterrupt()), pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        getattr(guard, method)(*() if method == "evict" else (BLOCK,))


def test_many_questions_are_timed_together(monkeypatch):
    monkeypatch.setattr("paged_backend.policy.answer_time.SLOW_S", 0.0)
    monkeypatch.setattr("paged_backend.policy.answer_time.thread_time", iter([0.0, 5.0]).__next__)
    reported = []
    guard = EvictionGuard(Lru(), lambda *args: reported.append(args))
    with guard.timed("add"):
        for _ in range(3):
            guard.add(BLOCK)
    ((policy, method, error),) = reported
    assert (policy, method) == (guard.policy, "add")
    assert "computed for 5" in str(error)


def test_a_policy_without_the_attribute_spares_what_is_awaited():
    assert EvictionGuard(object(), pytest.fail).spares_awaited  # type: ignore[arg-type]
