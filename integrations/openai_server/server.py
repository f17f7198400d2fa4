"""The server: an application on a socket, which finishes what it began before it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paged_backend.integrations.openai_server.patient_protocol import PatientProtocol

# Connections that wait to be accepted.
_BACKLOG = 2048
# Seconds that a connection stays for a next request: longer than clients keep theirs, or some would be cut off when
# they begin to ask. httpx, which OpenAI's client uses, keeps them for 5.
KEEP_ALIVE_S = 30


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is any free one. Raises OSError, which names both."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}, port {port}: {error.strerror or error}") from error


def serve(
    app: FastAPI,
    listener: socket.socket,
    *,
    access_log: bool = False,
    drain_s: float | None = None,
    on_drain: Callable[[], object] = lambda: None,
) -> None:
    """Serve what ``create_app`` made until SIGINT or SIGTERM, then finish the requests that are under way.

    Until the last of them is over new ones are refused with 503. drain_s: seconds after which the rest is aborted.
    A second signal aborts them at once. on_drain: called when the first signal came.
    """
    server = DrainingServer(app, access_log=access_log, drain_s=drain_s, on_drain=on_drain)
    try:
        server.run([listener])
    finally:
        app.state.backend.close_at_once()
        listener.close()


class DrainingServer(uvicorn.Server):
    """uvicorn's, which goes on listening while it drains, so that clients and load balancers are told."""

    def __init__(
        self,
        app: FastAPI,
        *,
        access_log: bool = False,
        drain_s: float | None = None,
        on_drain: Callable[[], object] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=PatientProtocol,
            ws="none",
            lifespan="on",
            log_level="info" if access_log else "warning",
            access_log=access_log,
            server_header=False,
            # Whoever can set these headers could name any client.
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        super().__init__(config)
        self._gate = app.state.gate
        self._drain_s = drain_s
        self._on_drain = on_drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Called between any two instructions of the main thread, so the event loop does the rest.
        if self._gate.is_draining or self._loop is None:
            self._end_at_once()
            return
        self._gate.is_draining = True
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._drain_task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        self._on_drain()
        try:
            async with asyncio.timeout(self._drain_s):
                await self._gate.idle.wait()
        except TimeoutError:
            self._end_at_once()
        self.should_exit = True

    def _end_at_once(self) -> None:
        # What is cut off is meant to be.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.should_exit = self.force_exit = True
