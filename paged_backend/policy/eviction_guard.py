"""EvictionGuard: asks an eviction policy, and reports what it does wrong."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from paged_backend.policies import CachedBlock, EvictionPolicy
from paged_backend.policy.policy_errors import FAILED, ErrorHandler, begin_answer, report_if_slow


class EvictionGuard:
    """An exception is reported through ``on_error(policy, method, error)`` and survived, all but Ctrl-C.

    Questions come by the thousand, so that reading clocks for each would take longer than the answers: whoever asks
    them times them together.
    """

    def __init__(self, policy: EvictionPolicy, on_error: ErrorHandler) -> None:
        self.policy = policy
        self.spares_awaited = bool(getattr(policy, "spares_awaited", EvictionPolicy.spares_awaited))
        self._on_error = on_error

    @contextmanager
    def timed(self, method: str) -> Generator[None]:
        """Report under the name of ``method`` if what is asked meanwhile takes longer than an answer should."""
        time = begin_answer(self._on_error)
        yield
        report_if_slow(self._on_error, self.policy, method, time)

    def add(self, block: CachedBlock) -> None:
        """``block`` may be dropped."""
        try:
            self.policy.add(block)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.report("add", error)

    def remove(self, block: CachedBlock) -> None:
        """``block`` may be dropped no more."""
        try:
            self.policy.remove(block)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.report("remove", error)

    def evict(self) -> Any:
        """What the policy would drop; FAILED if it raised."""
        try:
            return self.policy.evict()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.report("evict", error)
            return FAILED

    def report(self, method: str, error: BaseException | str) -> None:
        """Report what the policy did wrong."""
        self._on_error(self.policy, method, error)
