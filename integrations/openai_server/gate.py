"""Gate: whether the server is open, for whom, and how many are inside."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_backend.integrations.openai_server.api_error import ApiError, unavailable
from paged_backend.integrations.openai_server.api_keys import ApiKeys

# What anybody may ask at any time.
_OPEN_PATHS = frozenset({"/health"})


class Gate:
    """Lets requests in until ``is_draining``, with a key if there are keys; ``idle`` is set while none is inside."""

    def __init__(self, api_keys: ApiKeys | None = None) -> None:
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._api_keys = api_keys
        self._num_inside = 0

    def enter(self) -> None:
        self._num_inside += 1
        self.idle.clear()

    def leave(self) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self.idle.set()

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is sent away before its body is read; else ``scope["state"]`` holds the client of its key."""
        if self.is_draining:
            error = unavailable("the server is shutting down; ask another one, or again later")
            error.headers["Connection"] = "close"
            return error
        if self._api_keys is None:
            return None
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        client = self._api_keys.client(key.strip()) if kind.lower() == "bearer" else None
        if client is None:
            return ApiError(
                401,
                "the API key is wrong or missing; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope.setdefault("state", {})["client"] = client
        return None


class GateKeeper:
    """The application behind a Gate."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = self._gate.refusal(scope)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        has_begun = False

        async def begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        self._gate.enter()
        try:
            await self._app(scope, receive, begin)
        except asyncio.CancelledError:
            # The server ends at once, and there is a moment left to say so.
            if has_begun or not self._gate.is_draining:
                raise
            await unavailable("the server was shut down before the request was done").response()(scope, receive, send)
        finally:
            self._gate.leave()
