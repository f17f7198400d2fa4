"""Agents and event streams: create_agent, LangGraph and astream_events agree with plain calls."""

from __future__ import annotations

import asyncio
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRetryMiddleware
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send
from pydantic import BaseModel
from scripted_engine import ScriptedService, write_sensibly

from paged_backend.integrations.langchain import ChatPaged, PagedLLM


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


QUESTION = {"messages": [HumanMessage("What is the weather in 'Oslo'?")]}


@pytest.fixture
def chat(service: ScriptedService) -> ChatPaged:
    service.writer = write_sensibly
    return ChatPaged.from_engine(service, model="tiny", max_tokens=300)


def kinds(messages: list[Any]) -> list[type]:
    return [type(message) for message in messages]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_agent_calls_its_tool_and_answers(chat: ChatPaged, is_async: bool) -> None:
    agent = create_agent(chat, [get_weather], system_prompt="Be brief.")
    result = asyncio.run(agent.ainvoke(QUESTION)) if is_async else agent.invoke(QUESTION)
    messages = result["messages"]
    assert kinds(messages) == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert messages[2].content == "sunny in Oslo"
    assert messages[3].content == "It is sunny, thank you."
    # The second turn begins with the first.
    assert messages[3].usage_metadata["input_token_details"]["cache_read"] > 0


class Report(BaseModel):
    """A report."""

    city: str


@pytest.mark.parametrize("strategy", [Report, ProviderStrategy(Report), ToolStrategy(Report)])
def test_an_agent_answers_in_a_format(service: ScriptedService, chat: ChatPaged, strategy: Any) -> None:
    agent = create_agent(chat, [], response_format=strategy)
    result = agent.invoke(QUESTION)
    assert result["structured_response"] == Report(city="Oslo")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.mark.parametrize("strategy", [Person, ProviderStrategy(Person)])
def test_an_answer_with_a_name_ends_the_agent_and_is_no_call(
    service: ScriptedService, chat: ChatPaged, strategy: Any
) -> None:
    service.writer = lambda *_: '{"name": "Anna", "age": 30}'
    agent = create_agent(chat, [get_weather], response_format=strategy)
    result = agent.invoke(QUESTION, {"recursion_limit": 6})
    assert result["structured_response"] == Person(name="Anna", age=30)
    assert kinds(result["messages"]) == [HumanMessage, AIMessage]


def test_middleware_may_set_the_priority(service: ScriptedService, chat: ChatPaged) -> None:
    class Urgent(AgentMiddleware):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(model_settings={"priority": 5, "temperature": 0.3}))

    create_agent(chat, [get_weather], middleware=[Urgent()]).invoke(QUESTION)
    assert service.params[-1].temperature == 0.3


def test_retry_middleware_leaves_errors_alone_that_would_come_again(service: ScriptedService, chat: ChatPaged) -> None:
    agent = create_agent(chat, [get_weather], middleware=[ModelRetryMiddleware(max_retries=2, on_failure="error")])
    with pytest.raises(ValueError, match="4096"):
        agent.invoke({"messages": [HumanMessage("x" * 5000)]})


def total(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    return merged


def essence(message: AIMessage) -> tuple[Any, ...]:
    usage = message.usage_metadata
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    return message.text, calls, usage["input_tokens"], usage["output_tokens"]


class Messages(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@pytest.mark.parametrize("words", ["What is the weather in 'Oslo'?", "Hello"])
def test_every_way_of_streaming_agrees_with_invoke(chat: ChatPaged, words: str) -> None:
    bound = chat.bind_tools([get_weather])
    expected = essence(bound.invoke(words))

    async def v2() -> list[Any]:
        events = [event async for event in bound.astream_events(words, version="v2")]
        chunks = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
        (end,) = [event["data"]["output"] for event in events if event["event"] == "on_chat_model_end"]
        return [total(chunks), end]

    async def v3() -> AIMessage:
        stream = await bound.astream_events(words, version="v3")
        async for _ in stream:
            pass
        return await stream.output

    async def graph() -> list[Any]:
        async def node(state: Messages) -> dict[str, Any]:
            return {"messages": [await bound.ainvoke(state["messages"])]}

        compiled = StateGraph(Messages).add_node("node", node).add_edge(START, "node").compile()
        state = {"messages": [HumanMessage(words)]}
        chunks = [chunk async for chunk, _ in compiled.astream(state, stream_mode="messages")]
        return [total(chunks), (await compiled.ainvoke(state))["messages"][-1]]

    seen = [*asyncio.run(v2()), asyncio.run(v3()), *asyncio.run(graph())]
    assert [essence(message) for message in seen] == [expected] * 5


class Answers(TypedDict):
    answers: Annotated[list[str], add]


def test_parallel_nodes_share_the_batch(chat: ChatPaged, seen: Any) -> None:
    async def answer(state: Any) -> dict[str, list[str]]:
        return {"answers": [(await chat.ainvoke(state["question"])).text]}

    def fan_out(state: Answers) -> list[Send]:
        return [Send("answer", {"question": f"Hello {word}"}) for word in ("a", "b", "c", "d", "e", "f")]

    graph = StateGraph(Answers).add_node("answer", answer).add_conditional_edges(START, fan_out).compile()
    result = asyncio.run(graph.ainvoke({"answers": []}))
    assert result["answers"] == ["It is sunny, thank you."] * 6
    assert seen.peak > 1


def test_tokens_of_an_llm_show_in_event_streams(service: ScriptedService) -> None:
    service.writer = lambda *_: "some words"
    llm = PagedLLM.from_engine(service, max_tokens=50)

    async def run() -> str:
        events = [event async for event in llm.astream_events("x", version="v2")]
        return "".join(str(event["data"]["chunk"]) for event in events if event["event"] == "on_llm_stream")

    assert asyncio.run(run()) == "some words"
