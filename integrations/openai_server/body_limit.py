"""BodyLimit: how large a request's body may be, how long it may take to come, and how much all of them may hold."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_backend.integrations.openai_server.api_error import RETRY_AFTER_S

# Seconds for a whole body.
BODY_PATIENCE_S = 30.0


class BodyLimit:
    """Wraps the application, which hears of what is too much as it reads the body.

    max_bytes: of one body. max_held_bytes: of all bodies of requests under way.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_held_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reader = _Reader(self, scope, receive)
        try:
            await self._app(scope, reader, send)
        finally:
            self._num_held -= reader.num_read

    def take(self, num_bytes: int, of_body: int) -> None:
        """Count bytes in that came; raises HTTPException where they are too many."""
        self._num_held += num_bytes
        self.check(of_body)
        if self._num_held > self._max_held_bytes:
            raise HTTPException(
                429, "the bodies of other requests take all the room there is", {"Retry-After": str(RETRY_AFTER_S)}
            )

    def check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            # The connection stays: what is still to come is passed over, and a client that writes can read the answer.
            raise HTTPException(
                413, f"the body is larger than {self._max_bytes} bytes; send less, or raise the server's max_body_bytes"
            )


class _Reader:
    """The ``receive`` of one request."""

    def __init__(self, limit: BodyLimit, scope: Scope, receive: Receive) -> None:
        self.num_read = 0
        self._limit = limit
        self._receive = receive
        self._is_whole = False
        self._until = asyncio.get_running_loop().time() + BODY_PATIENCE_S
        length = Headers(scope=scope).get("content-length", "")
        self._length = int(length) if length.isascii() and length.isdigit() else 0

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        self._limit.check(self._length)
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the body did not come within {BODY_PATIENCE_S:g} seconds", {"Connection": "close"}
            ) from None
        if message["type"] == "http.request":
            self.num_read += len(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            self._limit.take(len(message.get("body", b"")), self.num_read)
        return message
