"""EventStream: an answer as server-sent events, which ends when its reader goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paged_backend.errors import PagedBackendError
from paged_backend.integrations.openai_server.api_error import ApiError, as_api_error
from paged_backend.integrations.openai_server.disconnect import ClientGone, while_there

logger = logging.getLogger("paged_backend")

DONE = b"data: [DONE]\n\n"
# Seconds that a reader may take for what the connection holds, before it counts as gone.
READER_PATIENCE_S = 120.0


def event(content: Any, name: str | None = None) -> bytes:
    """One event; ``name`` is its type where the reader tells several apart."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {text}\n\n".encode(errors="replace")


class EventStream(Response):
    """Sends ``first`` and then ``rest``, whose generator is closed at the end or when the reader is gone.

    An error in the middle is an event of its own, after which the stream ends.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        # How long it is shows at its end.
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    @classmethod
    async def begin(cls, request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
        """Wait for the first event, so that what goes wrong before has a status of its own."""
        try:
            return cls(await while_there(request.receive, anext(events)), events)
        except BaseException:
            await events.aclose()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await while_there(receive, self._send(send))
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for body in self._events():
            try:
                async with asyncio.timeout(READER_PATIENCE_S):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                raise ClientGone from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        yield self._first
        try:
            async for body in self._rest:
                yield body
        except Exception as error:
            if not isinstance(error, (PagedBackendError, ApiError)):
                logger.exception("a stream failed")
            yield event(as_api_error(error).body)
