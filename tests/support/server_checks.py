"""What tests of the server share: an application driven without a socket, and one on a port of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from service_checks import PATIENCE_S, wait_until

from paged_backend.integrations.openai_server import listen
from paged_backend.integrations.openai_server.server import DrainingServer

MODEL = "tiny"
HI = [{"role": "user", "content": "hi"}]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "max_tokens": 8, "temperature": 0, **fields}


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 8, "temperature": 0, **fields}


def client_of(app: Any) -> httpx.AsyncClient:
    """A client that calls the application, and sees an answer when it is whole."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://server")


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end as OpenAI's do."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(each.removeprefix("data: ")) for each in events]


class Exchange:
    """One request to an application, whose client may go away at any moment."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.status: int | None = None
        self.answer = b""
        self.has_news = asyncio.Event()
        self._body: list[bytes] = [json.dumps(body).encode()]
        self._gone = asyncio.Event()
        given = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("server", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def go_away(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.answer += message.get("body", b"")
        self.has_news.set()


@dataclass
class Running:
    """An application on a port; ``url`` is where OpenAI's API begins."""

    url: str
    port: int
    server: DrainingServer
    thread: threading.Thread


@contextmanager
def running(app: Any, drain_s: float | None = None) -> Iterator[Running]:
    """Serve an application from a thread, and end that at once at the end."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = DrainingServer(app, drain_s=drain_s)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield Running(f"http://127.0.0.1:{port}/v1", port, server, thread)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        listener.close()
