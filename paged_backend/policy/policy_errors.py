"""PolicyErrors: what policies and plugins did wrong, counted, named once in the log, and raised for who asks for it."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from paged_backend.checks import describe
from paged_backend.errors import PluginError
from paged_backend.policy.answer_time import AnswerTime

logger = logging.getLogger("paged_backend")

ErrorHandler = Callable[[object, str, "BaseException | str"], None]


class SlowAnswer(Warning):
    """An answer came, but held up everybody; reported, never raised, since the answer counts."""


class _Failed:
    """What a policy answered that raised instead."""


FAILED = _Failed()


def ask(on_error: ErrorHandler, policy: object, method: str, *args: Any) -> Any:
    """Call a method of a policy; FAILED if it raised, which is reported, as is an answer that was slow to come."""
    time = begin_answer(on_error)
    try:
        return getattr(policy, method)(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        on_error(policy, method, error)
        return FAILED
    finally:
        report_if_slow(on_error, policy, method, time)


def call(
    on_error: ErrorHandler, policy: object, method: str, function: Callable[[], Any], *, may_take_long: bool = False
) -> Any:
    """``function()``; FAILED if it raised, which is reported against ``method`` of ``policy``, as is taking long.

    Even SystemExit is survived. Only Ctrl-C passes, since it is meant for the program.
    """
    time = None if may_take_long else begin_answer(on_error)
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        on_error(policy, method, error)
        return FAILED
    finally:
        report_if_slow(on_error, policy, method, time)


def begin_answer(on_error: ErrorHandler) -> AnswerTime | None:
    """What times an answer from now on; None where nobody wants to hear of slow ones."""
    return AnswerTime() if getattr(on_error, "times_answers", True) else None


def report_if_slow(on_error: ErrorHandler, policy: object, method: str, time: AnswerTime | None) -> None:
    """Report an answer that took longer than any should since ``time`` began."""
    if time is not None and (slowness := time.slowness()) is not None:
        on_error(policy, method, SlowAnswer(slowness))


class PolicyErrors:
    """The error handler of one engine.

    counts: how often each ``"policy.method"`` broke its contract; slow answers have a name of their own.
    times_answers: whether slow answers are reported; where time is not that of the machine, they cannot be.
    """

    def __init__(self, strict: bool = False, *, times_answers: bool = True) -> None:
        self.strict = strict
        self.times_answers = times_answers
        self.counts: Counter[str] = Counter()
        self._raised: PluginError | None = None

    def __call__(self, policy: object, method: str, error: BaseException | str) -> None:
        slow = isinstance(error, SlowAnswer)
        name = f"{name_of(policy)}.{method}" + (" (slow)" if slow else "")
        what = f"{error}" if slow or isinstance(error, str) else f"raised {describe(error)}"
        then = "its answer counts all the same" if slow else "the engine goes on as if it had not been asked"
        self.counts[name] += 1
        if self.counts[name] > 1:
            return
        logger.warning("%s %s; %s, and further cases are only counted", name, what, then)
        if self.strict and not slow and self._raised is None:
            self._raised = PluginError(f"{name} {what}")
            self._raised.__cause__ = error if isinstance(error, BaseException) else None

    def raise_first(self) -> None:
        """Under ``strict``, raise PluginError for a case that came up for the first time since the last call.

        The engine calls this when it is at rest, so that its books are right whoever catches the error.
        """
        error, self._raised = self._raised, None
        if error is not None:
            raise error


def name_of(policy: object) -> str:
    """How messages call a policy: a plugin's name, or the qualified name of a function or of an object's class."""
    if isinstance(policy, str):
        return policy
    named = policy if inspect.isclass(policy) or inspect.isroutine(policy) else type(policy)
    return f"{named.__module__}.{named.__qualname__}"
