"""What is done for a client only as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def while_there(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do ``work``, and cancel it and raise ClientGone when the client goes away first.

    receive: that of a request whose body was read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        # By now the engine was told to forget the request; what the work still raises is nobody's.
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
