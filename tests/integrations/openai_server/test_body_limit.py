"""Bodies that are too large, too slow or too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from server_checks import MODEL, Exchange, client_of, text_body

from paged_backend.integrations.openai_server import body_limit, create_app
from paged_backend.integrations.openai_server.body_limit import BodyLimit

PATH = "/v1/completions"


@pytest.fixture
def narrow(service: Any) -> Any:
    return create_app(service, model_names=[MODEL], max_body_bytes=200)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_body_that_says_it_is_too_large_is_refused_unread(narrow: Any):
    exchange = Exchange(narrow, PATH, text_body(), {"content-length": "201"})
    await exchange.task
    assert exchange.status == 413
    assert b"larger than 200 bytes" in exchange.answer
    assert exchange._body


async def test_a_body_that_does_not_say_how_large_it_is_is_refused_when_it_is_too_large(narrow: Any):
    headers = {"content-type": "application/json"}
    async with client_of(narrow) as client:
        answer = await client.post(PATH, content=chunks(*[b" " * 50] * 5), headers=headers)
        assert answer.status_code == 413
        assert (await client.post(PATH, json=text_body())).status_code == 200


async def test_a_body_that_does_not_come_is_given_up(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body_limit, "BODY_PATIENCE_S", 0.01)
    exchange = Exchange(app, PATH, {})
    exchange._body.clear()
    await exchange.task
    assert exchange.status == 408


async def test_bodies_together_hold_no_more_than_they_may():
    begun = asyncio.Event()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        begun.set()
        await scope["until"].wait()

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 60, "more_body": False}

    limit, until = BodyLimit(inner, 100, 100), asyncio.Event()
    scope = {"type": "http", "headers": [], "until": until}
    first = asyncio.ensure_future(limit(scope, receive, None))
    await begun.wait()
    with pytest.raises(Exception, match="take all the room") as told:
        await limit(scope, receive, None)
    assert told.value.status_code == 429
    until.set()
    await first
    await limit(scope, receive, None)
