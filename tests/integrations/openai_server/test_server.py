"""The server on a port: with OpenAI's own client, LangChain's over it, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from scripted_engine import ScriptedService, scripted_service, write_sensibly
from server_checks import HI, MODEL, Exchange, Running, chat_body, client_of, running, text_body
from service_checks import PATIENCE_S, Steps, assert_idle, wait_until

from paged_backend import Engine
from paged_backend.integrations.openai_server import ApiKeys, create_app, listen, serve

KEY = "sk-secret"


@pytest.fixture(scope="module")
def server(shared_service: ScriptedService) -> Iterator[Running]:
    app = create_app(shared_service, model_names=[MODEL], api_keys=ApiKeys({KEY: "ann"}))
    with running(app) as server:
        yield server


@pytest.fixture
def official(server: Running, service: ScriptedService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def chat(server: Running, service: ScriptedService) -> AsyncIterator[ChatOpenAI]:
    service.writer = write_sensibly
    # LangChain's own client would outlive the event loop.
    async with httpx.AsyncClient() as client:
        yield ChatOpenAI(
            model=MODEL, base_url=server.url, api_key=KEY, max_tokens=200, max_retries=0, http_async_client=client
        )


class Weather(BaseModel):
    """The weather of a place."""

    place: str
    degrees: int


@tool
def get_weather(place: str) -> str:
    """Tells the weather of a place."""
    return "sunny"


def test_openais_client_reads_an_answer_whole_and_streamed(official: openai.OpenAI, service: ScriptedService):
    service.writer = lambda prompt, params: "I am well."
    whole = official.chat.completions.create(model=MODEL, messages=HI, max_tokens=20)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("I am well.", "stop")
    assert whole.usage.total_tokens == len(service.prompts[0]) + 11
    stream = official.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I am well."
    assert last.usage == whole.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})


def test_openais_client_reads_texts_models_calls_and_logprobs(official: openai.OpenAI, service: ScriptedService):
    assert [model.id for model in official.models.list()] == [MODEL]
    assert official.models.retrieve(MODEL).id == MODEL
    service.writer = write_sensibly
    text = official.completions.create(model=MODEL, prompt="Hi", max_tokens=30, logprobs=1)
    assert text.choices[0].text == "It is sunny, thank you."
    assert len(text.choices[0].logprobs.tokens) == 24
    parsed = official.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "'Paris' 21"}], response_format=Weather, max_tokens=100
    )
    assert parsed.choices[0].message.parsed == Weather(place="Paris", degrees=21)
    told = official.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=3, logprobs=True, top_logprobs=1, extra_body={"top_k": 5, "priority": 2}
    )
    assert [entry.token for entry in told.choices[0].logprobs.content] == ["I", "t", " "]


def test_openais_client_reads_the_newer_form_too(official: openai.OpenAI, service: ScriptedService):
    service.writer = write_sensibly
    whole = official.responses.create(model=MODEL, input="hello", max_output_tokens=50)
    assert (whole.output_text, whole.status) == ("It is sunny, thank you.", "completed")
    with official.responses.stream(model=MODEL, input="hello", max_output_tokens=50) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == stream.get_final_response().output_text == whole.output_text
    parsed = official.responses.parse(model=MODEL, input="'Paris' 21", text_format=Weather)
    assert parsed.output_parsed == Weather(place="Paris", degrees=21)


async def test_langchain_speaks_the_newer_form_too(chat: ChatOpenAI):
    chat.use_responses_api = True
    assert (await chat.ainvoke("hello")).text == "It is sunny, thank you."
    assert "".join([chunk.text async for chunk in chat.astream("hello")]) == "It is sunny, thank you."
    called = await chat.bind_tools([get_weather]).ainvoke("the weather in 'Paris'")
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("get_weather", {"place": "Paris"})]


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 3}, openai.BadRequestError, None),
        ({"max_tokens": 10000}, openai.BadRequestError, "context_length_exceeded"),
        ({"extra_body": {"queue_timeout_s": 1e-9}}, openai.APIStatusError, "timeout"),
    ],
)
def test_openais_client_knows_what_went_wrong(
    official: openai.OpenAI, fields: dict[str, Any], kind: type[Exception], code: str | None
):
    with pytest.raises(kind) as told:
        official.chat.completions.create(**{"model": MODEL, "messages": HI, "max_tokens": 8, **fields})
    assert told.value.code == code


def test_openais_client_knows_that_its_key_is_wrong_and_that_the_queue_is_full(
    server: Running, official: openai.OpenAI, service: ScriptedService
):
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    # One that no request fits into.
    object.__setattr__(service.engine.config, "max_waiting", 0)
    try:
        with pytest.raises(openai.RateLimitError) as told:
            official.completions.create(model=MODEL, prompt="x")
    finally:
        object.__setattr__(service.engine.config, "max_waiting", None)
    assert told.value.response.headers["retry-after"] == "1"


def test_requests_of_a_key_are_its_clients(official: openai.OpenAI, service: ScriptedService, monkeypatch: Any):
    seen: list[dict[str, Any]] = []
    submit = service.submit
    monkeypatch.setattr(service, "submit", lambda *given, **options: seen.append(options) or submit(*given, **options))
    official.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_headers={"X-Priority": "4"})
    assert seen == [{"priority": 4, "client_id": "ann", "cache_salt": '["ann", null]'}]


async def test_langchain_over_it_chats_streams_calls_tools_and_keeps_to_schemas(chat: ChatOpenAI):
    answer = await chat.ainvoke("hello")
    assert answer.content == "It is sunny, thank you."
    assert answer.usage_metadata["output_tokens"] == 24
    assert "".join([chunk.text async for chunk in chat.astream("hello")]) == answer.content
    called = await chat.bind_tools([get_weather]).ainvoke("the weather in 'Paris'")
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("get_weather", {"place": "Paris"})]
    forced = await chat.bind_tools([get_weather], tool_choice="get_weather").ainvoke("hello")
    assert [call["name"] for call in forced.tool_calls] == ["get_weather"]
    chunks = [chunk async for chunk in chat.bind_tools([get_weather]).astream("the weather in 'Rome'")]
    merged = sum(chunks[1:], chunks[0])
    assert [call["args"] for call in merged.tool_calls] == [{"place": "Rome"}]
    assert await chat.with_structured_output(Weather).ainvoke("'Paris' 21") == Weather(place="Paris", degrees=21)
    assert [each.content for each in await chat.abatch(["a", "b"])] == [answer.content] * 2


def test_langchains_text_class_goes_on_with_texts(server: Running, service: ScriptedService):
    service.writer = lambda prompt, params: f"{prompt}!"
    with httpx.Client() as client:
        llm = OpenAI(model=MODEL, base_url=server.url, api_key=KEY, max_tokens=9, max_retries=0, http_client=client)
        assert llm.batch(["a", "b"]) == ["a!", "b!"]


async def test_a_stream_that_is_left_ends_its_request(server: Running, service: ScriptedService):
    async with openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(**body, stream=True)
        async for _ in stream:
            break
        assert service.num_unfinished == 1
        await stream.close()
        await asyncio.to_thread(wait_until, lambda: service.num_unfinished == 0)
        # And so does one that waits for the whole.
        waiting = asyncio.ensure_future(client.completions.create(**body))
        await asyncio.to_thread(wait_until, lambda: service.num_unfinished == 1)
        waiting.cancel()
        await asyncio.to_thread(wait_until, lambda: service.num_unfinished == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_blocks_of_a_client_that_leaves_are_free_after_the_step_that_runs(stream: bool):
    steps = Steps()
    service = scripted_service(lambda prompt, params: None, plugins=[steps], enable_prefix_caching=False)
    try:
        app = create_app(service, model_names=[MODEL])
        exchange = Exchange(app, "/v1/completions", text_body(max_tokens=100, ignore_eos=True, stream=stream))
        await asyncio.to_thread(steps.wait, 3)
        exchange.go_away()
        await exchange.task
        # The thread stands at the end of a step; the next thing that it does is to forget the request.
        steps.free()
        await asyncio.to_thread(wait_until, lambda: service.num_unfinished == 0)
        assert steps.num_finished <= 4
        service.pause()
        service.stats()
        assert_idle(service.engine)
    finally:
        steps.free()
        service.close(graceful=False)
        service.engine.close()


@pytest.fixture
def held() -> Iterator[tuple[Engine, Steps]]:
    """An engine that a test lets step, and which no other test uses."""
    steps = Steps()
    service = scripted_service(lambda prompt, params: None, plugins=[steps])
    service.close()
    yield service.engine, steps
    steps.free()
    service.engine.close()


def ask(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/chat/completions", json=chat_body(**fields), timeout=PATIENCE_S)


def test_at_the_first_signal_what_runs_is_finished_and_others_are_sent_away(held: tuple[Engine, Steps]):
    engine, steps = held
    with running(create_app(engine, model_names=[MODEL])) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server.url)
        steps.wait()
        server.server.handle_exit(signal.SIGINT, None)
        other = ask(server.url)
        assert (other.status_code, other.headers["connection"]) == (503, "close")
        assert httpx.get(f"http://127.0.0.1:{server.port}/health").status_code == 503
        steps.free()
        assert answer.result(PATIENCE_S).json()["usage"]["completion_tokens"] == 8
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
    assert engine.keeper is None


def test_a_second_signal_ends_it_at_once(held: tuple[Engine, Steps]):
    engine, steps = held
    app = create_app(engine, model_names=[MODEL])
    with running(app) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server.url)
        steps.wait()
        for _ in range(2):
            server.server.handle_exit(signal.SIGINT, None)
        assert answer.result(PATIENCE_S).status_code == 503
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
    steps.free()
    app.state.backend.close_at_once()
    assert_idle(engine)


def test_what_is_not_done_when_the_time_for_it_is_over_is_aborted(held: tuple[Engine, Steps]):
    engine, steps = held
    app = create_app(engine, model_names=[MODEL])
    with running(app, drain_s=0.05) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server.url)
        steps.wait()
        server.server.handle_exit(signal.SIGTERM, None)
        assert answer.result(PATIENCE_S).status_code == 503
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
    steps.free()
    app.state.backend.close_at_once()
    assert_idle(engine)


def test_served_from_the_main_thread_it_hears_the_signal_and_returns(held: tuple[Engine, Steps]):
    engine, steps = held
    steps.free()
    app = create_app(engine, model_names=[MODEL])
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    answers: list[int] = []

    def ask_and_interrupt() -> None:
        answers.append(ask(url).status_code)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ask_and_interrupt)
    thread.start()
    drains: list[bool] = []
    serve(app, listener, on_drain=lambda: drains.append(True))
    thread.join()
    assert (answers, drains) == ([200], [True])
    assert engine.keeper is None


def test_an_address_that_cannot_be_listened_on_is_named():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {port}: Address already in use"):
            listen("127.0.0.1", port)
    with pytest.raises(OSError, match="cannot listen on no such host, port 1"):
        listen("no such host", 1)


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_it_listens_where_it_is_told(host: str, family: socket.AddressFamily):
    try:
        listener = listen(host, 0)
    except OSError:
        assert family == socket.AF_INET6
        pytest.skip("this machine has no IPv6")
    with listener:
        assert (listener.family, listener.getsockname()[0]) == (family, host)


async def test_one_application_serves_several_event_loops(app: FastAPI):
    async def one() -> int:
        async with client_of(app) as client:
            return (await client.post("/v1/completions", json=text_body())).status_code

    assert [await one(), await asyncio.to_thread(asyncio.run, one())] == [200, 200]
