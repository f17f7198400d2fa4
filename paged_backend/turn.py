"""Turn: one call into an engine at a time, whoever makes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from paged_backend.errors import EngineBusy


class Turn:
    """Who is inside the engine: nobody, or one call of one thread. Never waits."""

    def __init__(self) -> None:
        # A dict, since setdefault() takes the turn in one step that neither a thread nor Ctrl-C can divide.
        self._call: dict[str, _Call] = {}

    def take(self, call: _Call) -> None:
        """Raise EngineBusy, which says who has the turn, if it is not free."""
        holder = self._call.setdefault("now", call)
        if holder is call:
            return
        if holder.thread == call.thread:
            raise EngineBusy(
                "the engine is in the middle of a call; what runs inside of it, such as a hook, a policy or a "
                "stop_condition, must not call it again"
            )
        raise EngineBusy(
            "another thread is in the middle of a call; an Engine belongs to one thread at a time: "
            "use AsyncEngine(engine), whose methods may be called from any thread"
        )

    def give_back(self, call: _Call) -> None:
        """Free the turn if ``call`` has it."""
        if self._call.get("now") is call:
            del self._call["now"]


class _Call:
    def __init__(self) -> None:
        self.thread = threading.get_ident()


class _TakesTurns(Protocol):
    _turn: Turn

    def _check_not_closed(self) -> None: ...


Owner = TypeVar("Owner", bound=_TakesTurns)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def alone(method: Callable[Concatenate[Owner, Arguments], Result]) -> Callable[Concatenate[Owner, Arguments], Result]:
    """What changes the engine runs alone: other threads, and policies and hooks, which run inside, are refused."""

    @wraps(method)
    def run(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        self._check_not_closed()
        call: Any = _Call()
        try:
            self._turn.take(call)
            return method(self, *args, **kwargs)
        finally:
            self._turn.give_back(call)

    return run
