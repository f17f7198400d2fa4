"""CancelScope: the requests of one batch, which end together when the batch is left early."""

from __future__ import annotations

import weakref
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

from paged_backend.integrations.langchain.errors import PagedClosedError

if TYPE_CHECKING:
    from paged_backend import Handle

_current: ContextVar[CancelScope | None] = ContextVar("paged_backend_cancel_scope", default=None)


class CancelScope:
    """While it is open, requests submitted in its context, in worker threads and tasks too, belong to it.

    Left by an exception, it cancels those that run and refuses those to come: core's own batches would let them go on.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._is_cancelled = False
        self._outer: Token[CancelScope | None] | None = None

    @staticmethod
    def register(handle: Handle) -> None:
        scope = _current.get()
        if scope is not None:
            scope._handles.add(handle)
            if scope._is_cancelled:
                handle.cancel()
                raise PagedClosedError("the batch of this request was left")

    def cancel(self) -> None:
        self._is_cancelled = True
        for handle in list(self._handles):
            handle.cancel()

    def __enter__(self) -> CancelScope:
        self._outer = _current.set(self)
        return self

    def __exit__(self, error: type[BaseException] | None, *exc_info: object) -> None:
        assert self._outer is not None
        _current.reset(self._outer)
        if error is not None:
            self.cancel()
