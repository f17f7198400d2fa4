"""PatientProtocol: HTTP connections that do not stay for ever with nothing to say."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds from a connection's first byte, or its beginning, to the end of a request's head.
HEAD_PATIENCE_S = 20.0
# Beyond as many, those without a request make room for new ones.
MAX_CONNECTIONS = 4096
# Files that a process needs beside its connections.
_OTHER_FILES = 128


def most_connections() -> int:
    """As many as the process may have open files for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - _OTHER_FILES
    return max(1, min(MAX_CONNECTIONS, files))


class PatientProtocol(H11Protocol):
    """uvicorn's, with an end to waiting for a request's head, and to connections without a request."""

    _waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > most_connections():
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._stop_waiting()
        elif self._waits is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """No request of it is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        # Those that are closed already leave the set later.
        others: list[Any] = [each for each in self.connections if each is not self]
        staying = [each for each in others if not each.transport.is_closing()]
        if len(staying) >= most_connections():
            next((each for each in staying if each.is_idle), self).transport.abort()

    def _wait(self) -> None:
        self._waits = self.loop.call_later(HEAD_PATIENCE_S, self._lose_patience)

    def _stop_waiting(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    def _lose_patience(self) -> None:
        self._waits = None
        if self.is_idle and not self.transport.is_closing():
            self.transport.abort()
