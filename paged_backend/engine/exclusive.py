"""Exclusive: what only one call at a time may use, and nobody once it is closed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from paged_backend.errors import EngineBusy, EngineClosed, NotPicklable

logger = logging.getLogger("paged_backend")


class Keeper(Protocol):
    """A thread that alone may call."""

    @property
    def is_current(self) -> bool:
        """Whether the caller runs inside this thread."""

    @property
    def num_unfinished(self) -> int:
        """How many requests it still has."""

    def leave(self) -> None:
        """End it if it has no requests; it is not over before it has given up what it keeps."""


class StaysHere:
    """Base of what holds a model, its cache and what runs: it belongs to its process."""

    def __reduce_ex__(self, protocol: object) -> str:
        raise NotPicklable(
            f"{type(self).__name__} holds a model, its cache and what runs, and cannot be copied or pickled; "
            "make one in the process that uses it, with Engine.from_pretrained"
        )


class Exclusive(StaysHere):
    """Base of the engine; methods marked ``alone`` are refused in the middle of each other. Never waits."""

    def __init__(self) -> None:
        self._closed = False
        # The call that has the turn. A dict, since neither another thread nor Ctrl-C can divide its setdefault().
        self._turn: dict[str, _Call] = {}
        # The thread that alone may call, or None for whichever comes.
        self.keeper: Keeper | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Free what is held; every further call raises EngineClosed."""
        self._closed = True

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(self, error: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self.close()
        except EngineBusy as busy:
            if error is None:
                raise
            # The caller's own error says more.
            logger.warning("the engine stays open: %s", busy)

    def check_open(self) -> None:
        """Raise EngineClosed once it is closed."""
        if self._closed:
            raise EngineClosed("the engine is closed; make a new one")

    def _take_turn(self, call: _Call) -> None:
        keeper = self.keeper
        if keeper is not None and not keeper.is_current:
            raise EngineBusy(
                "an AsyncEngine, or a LangChain model, runs this engine, and nobody else may call it meanwhile, nor "
                f"close it before its requests are over ({keeper.num_unfinished} are unfinished): use the methods of "
                "the AsyncEngine"
            )
        holder = self._turn.setdefault("holder", call)
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


class _Call:
    def __init__(self) -> None:
        self.thread = threading.get_ident()


Owner = TypeVar("Owner", bound=Exclusive)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def alone(method: Callable[Concatenate[Owner, Arguments], Result]) -> Callable[Concatenate[Owner, Arguments], Result]:
    """What changes the engine runs alone: other threads, and policies and hooks, which run inside, get EngineBusy."""

    @wraps(method)
    def run(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        self.check_open()
        call = _Call()
        try:
            self._take_turn(call)
            return method(self, *args, **kwargs)
        finally:
            # Nothing is called here, after which Ctrl-C could come before the turn is given back.
            try:
                if self._turn["holder"] is call:
                    del self._turn["holder"]
            except KeyError:
                pass

    return run
