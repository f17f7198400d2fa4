"""Whoever goes away takes the request along, however it was asked for, and others go on."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from langchain_core.exceptions import ModelAPIError
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from scripted_engine import ScriptedService, scripted_service
from service_checks import wait_until

from paged_backend.integrations.langchain import ChatPaged, PagedLLM

Model = ChatPaged | PagedLLM
LONG = {"max_tokens": 3500}


@pytest.fixture(params=["chat", "llm"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param).model_copy(update=LONG)


def ended(service: ScriptedService) -> None:
    wait_until(lambda: service.num_unfinished == 0)


def test_breaking_out_of_a_stream_ends_the_request(service: ScriptedService, model: Model) -> None:
    for _ in model.stream("x"):
        assert service.num_unfinished == 1
        break
    gc.collect()
    ended(service)


async def _break(model: Any) -> None:
    async for _ in model.astream("x"):
        break


async def _aclose(model: Any) -> None:
    stream = model.astream("x")
    await anext(stream)
    await stream.aclose()


async def _cancel_stream(model: Any) -> None:
    task = asyncio.create_task(_all(model.astream("x")))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _cancel_call(model: Any) -> None:
    task = asyncio.create_task(model.ainvoke("x"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _cancel_batch(model: Any) -> None:
    task = asyncio.create_task(model.abatch(["x", "y", "z"]))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _wait_too_long(model: Any) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(model.ainvoke("x"), 0.1)


async def _leave_events_v2(model: Any) -> None:
    events = model.astream_events("x", version="v2")
    async for event in events:
        if event["event"].endswith("_stream"):
            break
    await events.aclose()


async def _all(stream: Any) -> list[Any]:
    return [item async for item in stream]


WAYS = [_break, _aclose, _cancel_stream, _cancel_call, _cancel_batch, _wait_too_long, _leave_events_v2]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_an_async_caller_that_goes_away_ends_the_request(
    service: ScriptedService, model: Model, way: Callable[[Any], Awaitable[None]]
) -> None:
    async def run() -> None:
        await way(model)
        for _ in range(2000):
            if service.num_unfinished == 0:
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it went on")

    asyncio.run(run())


def test_a_chain_whose_stream_is_left_ends_the_request(service: ScriptedService, chat: ChatPaged) -> None:
    """An asynchronous one; of a synchronous chain with a parser core reads the whole stream first, see below."""
    chain = ChatPromptTemplate.from_template("{x}") | chat.bind(**LONG) | StrOutputParser()

    async def run() -> None:
        stream = chain.astream({"x": "y"})
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    ended(service)


# The generators that core left open end with the timeout.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_synchronous_chain_with_a_parser_is_guarded_by_its_timeout(service: ScriptedService, chat: ChatPaged) -> None:
    """Core drains such a chain when it is left; a timeout is what bounds it."""
    chain = ChatPromptTemplate.from_template("{x}") | chat.bind(**LONG, timeout=0.5) | StrOutputParser()
    stream = chain.stream({"x": "y"})
    next(stream)
    with suppress(TimeoutError):
        stream.close()
    ended(service)


def test_a_v3_stream_that_is_left_in_its_block_ends_the_request(service: ScriptedService, chat: ChatPaged) -> None:
    async def run() -> None:
        stream = await chat.bind(**LONG).astream_events("x", version="v3")
        async with stream:
            async for _ in stream:
                break
        for _ in range(2000):
            if service.num_unfinished == 0:
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it went on")

    asyncio.run(run())


def test_a_step_that_fails_raises_in_streams_at_once_and_the_next_call_works() -> None:
    from paged_backend.integrations.langchain import engines

    patch = pytest.MonkeyPatch()
    patch.setattr(engines, "load_service", lambda *_: scripted_service(lambda prompt, params: None))
    try:
        chat = ChatPaged(model="tiny", max_tokens=2000, ignore_eos=True)
        engine = chat.engine.service().engine
        stream = chat.stream("x")
        next(stream)

        def fail(*args: Any, **kwargs: Any) -> None:
            raise MemoryError("injected")

        patch.setattr(engine.scheduler, "schedule", fail)
        started = time.monotonic()
        with pytest.raises(ModelAPIError, match="injected"):
            list(stream)
        assert time.monotonic() - started < 5
        patch.undo()
        assert chat.invoke("x", max_tokens=3).usage_metadata["output_tokens"] == 3
    finally:
        patch.undo()
