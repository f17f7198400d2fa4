"""Work for a client that may go away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paged_backend.integrations.openai_server.disconnect import ClientGone, while_there


class Client:
    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_what_the_work_returns_or_raises_is_passed_on():
    async def fails() -> None:
        raise KeyError("x")

    assert await while_there(Client().receive, asyncio.sleep(0, 5)) == 5
    with pytest.raises(KeyError):
        await while_there(Client().receive, fails())


async def test_when_the_client_goes_the_work_is_over_before_anybody_hears_of_it():
    client, over = Client(), []

    async def work() -> None:
        try:
            client.gone.set()
            await asyncio.sleep(60)
        finally:
            over.append(True)

    with pytest.raises(ClientGone):
        await while_there(client.receive, work())
    assert over == [True]


async def test_cancelled_it_takes_the_work_along():
    over = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            over.set()

    task = asyncio.ensure_future(while_there(Client().receive, work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert over.is_set()
    assert len(asyncio.all_tasks()) == 1
