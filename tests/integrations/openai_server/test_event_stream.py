"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from paged_backend.errors import RequestFailed, RequestRefused
from paged_backend.integrations.openai_server import event_stream
from paged_backend.integrations.openai_server.disconnect import ClientGone
from paged_backend.integrations.openai_server.event_stream import EventStream, event


class Reader:
    """Goes away when it was sent ``until`` messages."""

    def __init__(self, until: int = 99, blocks: bool = False) -> None:
        self.messages: list[dict[str, Any]] = []
        self._until = until
        self._blocks = blocks
        self._gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        if len(self.messages) == self._until:
            self._gone.set()
        if self._blocks and message["type"] == "http.response.body":
            await asyncio.sleep(60)
        await asyncio.sleep(0)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


def counting(over: list[bool], count: int = 3, error: Exception | None = None) -> AsyncGenerator[bytes, None]:
    async def events() -> AsyncGenerator[bytes, None]:
        try:
            for number in range(count):
                yield b"%d," % number
                await asyncio.sleep(0)
            if error is not None:
                raise error
        finally:
            over.append(True)

    return events()


async def stream(reader: Reader, events: AsyncGenerator[bytes, None]) -> None:
    response = await EventStream.begin(SimpleNamespace(receive=reader.receive), events)
    await response({"type": "http"}, reader.receive, reader.send)


async def test_all_events_come_and_the_length_is_not_told():
    reader, over = Reader(), []
    await stream(reader, counting(over))
    assert (reader.text, over) == ("0,1,2,", [True])
    headers = dict(reader.messages[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert not reader.messages[-1]["more_body"]


async def test_an_error_before_the_first_event_has_a_status_of_its_own():
    over: list[bool] = []
    with pytest.raises(RequestRefused):
        await stream(Reader(), counting(over, 0, RequestRefused("no")))
    assert over == [True]


async def test_an_error_after_it_is_the_last_event():
    reader = Reader()
    await stream(reader, counting([], 1, RequestFailed("it broke")))
    told = json.loads(reader.text.removeprefix("0,data: "))
    assert told["error"] == {"message": "it broke", "type": "server_error", "param": None, "code": None}


async def test_an_error_that_nobody_foresaw_is_logged_and_not_told(caplog: pytest.LogCaptureFixture):
    reader = Reader()
    await stream(reader, counting([], 1, KeyError("secret")))
    assert "secret" not in reader.text
    assert "a stream failed" in caplog.text


async def test_a_reader_that_goes_away_ends_the_events():
    reader, over = Reader(until=3), []
    await stream(reader, counting(over, 10**9))
    assert over == [True]


async def test_a_client_that_goes_before_the_first_event_ends_them_too():
    reader, over = Reader(), []
    reader._gone.set()

    async def never() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(60)
            yield b""
        finally:
            over.append(True)

    with pytest.raises(ClientGone):
        await stream(reader, never())
    assert over == [True]


async def test_a_reader_that_takes_nothing_counts_as_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_stream, "READER_PATIENCE_S", 0.01)
    over: list[bool] = []
    await stream(Reader(blocks=True), counting(over, 10**9))
    assert over == [True]


def test_an_event_is_one_line_of_json():
    assert event({"a": "x\ny\ud800"}) == b'data: {"a":"x\\ny?"}\n\n'
    assert event({}, "done") == b"event: done\ndata: {}\n\n"
