"""Answers to conversations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from scripted_engine import CHAT_TEMPLATE, ScriptedService, write_sensibly
from server_checks import HI, MODEL, Exchange, chat_body, client_of, events_of
from service_checks import wait_until

from paged_backend import turn_end_ids
from paged_backend.integrations.openai_server import create_app

PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Doubles a number.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}
ASKS = [{"role": "user", "content": "use the tool on 21"}]


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=chat_body(**{"max_tokens": 200, **fields}))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


async def refused(client: httpx.AsyncClient, **fields: Any) -> str:
    answer = await client.post(PATH, json=chat_body(**fields))
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


async def streamed(client: httpx.AsyncClient, **fields: Any) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """The messages that a stream adds up to, as clients add them, and its events."""
    answer = await client.post(PATH, json=chat_body(**{"max_tokens": 200, "stream": True, **fields}))
    events = events_of(answer.text)
    choices: dict[int, dict[str, Any]] = {}
    for each in events:
        for choice in each["choices"]:
            found = choices.setdefault(choice["index"], {"content": "", "tool_calls": [], "finish_reason": None})
            for name, value in choice["delta"].items():
                found[name] = value if name == "role" else found.get(name, type(value)()) + value
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    return choices, events


async def test_an_answer_goes_to_what_the_template_makes_of_the_messages(
    client: httpx.AsyncClient, service: ScriptedService
):
    service.writer = lambda prompt, params: "I am well."
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "are you?"}]},
    ]
    answer = await ask(client, messages=messages)
    assert answer["message"] == {"role": "assistant", "content": "I am well.", "refusal": None}
    assert (answer["finish_reason"], answer["logprobs"]) == ("stop", None)
    assert service.prompts == ["system: be brief\nuser: how are you?\nassistant: "]


async def test_an_answer_ends_with_its_turn_unless_no_end_is_wanted(
    client: httpx.AsyncClient, service: ScriptedService
):
    await ask(client, stop_token_ids=[7], max_tokens=1)
    await ask(client, ignore_eos=True, max_tokens=1)
    assert service.params[0].stop_token_ids == (7, *turn_end_ids(service.engine))
    assert turn_end_ids(service.engine)
    assert service.params[1].stop_token_ids == ()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_may_be_bounded(client: httpx.AsyncClient, name: str):
    answer = await ask(client, **{"max_tokens": None, name: 3}, ignore_eos=True)
    assert answer["finish_reason"] == "length"


async def test_an_answer_that_is_not_bounded_has_the_room_there_is(service: ScriptedService):
    service.writer = lambda prompt, params: "ok"
    app = create_app(service, model_names=[MODEL])
    async with client_of(app) as client:
        await client.post(PATH, json={"model": MODEL, "messages": HI})
        await client.post(PATH, json={"model": MODEL, "messages": [{"role": "user", "content": "x" * 4000}]})
    first, second = service.params
    assert first.max_tokens == 1024
    assert second.max_tokens == 4096 - len(service.prompts[1])


@pytest.mark.parametrize(
    ("choice", "calls"),
    [("auto", 1), (None, 1), ("none", 0), ("required", 1), ({"type": "function", "function": {"name": "double"}}, 1)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_as_the_choice_allows(
    client: httpx.AsyncClient, service: ScriptedService, choice: Any, calls: int, stream: bool
):
    service.writer = write_sensibly
    fields = {"messages": ASKS, "tools": [TOOL], "tool_choice": choice}
    if stream:
        message = (await streamed(client, **fields))[0][0]
        reason = message["finish_reason"]
    else:
        answer = await ask(client, **fields)
        message, reason = answer["message"], answer["finish_reason"]
    found = message.get("tool_calls") or []
    assert [(call["type"], call["function"]["name"]) for call in found] == [("function", "double")] * calls
    assert [json.loads(call["function"]["arguments"]) for call in found] == [{"x": 21}] * calls
    assert all(call["id"] for call in found)
    assert reason == ("tool_calls" if calls else "stop")
    # Calls of a stream are told apart by a number, and those of a whole answer have none.
    assert all(("index" in call) == stream for call in found)


async def test_a_forced_call_is_held_to_its_schema(client: httpx.AsyncClient, service: ScriptedService):
    """The model's weights are random, and know nothing of calls."""
    forced = {"type": "function", "function": {"name": "double"}}
    answer = await ask(client, tools=[TOOL, OTHER], tool_choice=forced, temperature=1, seed=1, max_tokens=300)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "double"
    assert list(json.loads(call["function"]["arguments"])) == ["x"]
    assert answer["message"]["content"] is None


async def test_several_calls_come_one_after_another_and_only_one_where_that_is_asked(
    client: httpx.AsyncClient, service: ScriptedService
):
    call = '<tool_call>{"name": "double", "arguments": {"x": 1}}</tool_call>'
    service.writer = lambda prompt, params: f"so {call}\n{call}"
    both = (await ask(client, tools=[TOOL]))["message"]
    assert (both["content"].strip(), len(both["tool_calls"])) == ("so", 2)
    choices, _ = await streamed(client, tools=[TOOL])
    assert [call["index"] for call in choices[0]["tool_calls"]] == [0, 1]
    assert len((await ask(client, tools=[TOOL], parallel_tool_calls=False))["message"]["tool_calls"]) == 1


async def test_what_was_to_be_a_call_and_is_none_is_told_as_it_was_written(
    client: httpx.AsyncClient, service: ScriptedService
):
    service.writer = lambda prompt, params: '<tool_call>{"name": </tool_call>'
    answer = await ask(client, tools=[TOOL])
    assert answer["message"]["content"] == '<tool_call>{"name": </tool_call>'
    assert answer["finish_reason"] == "stop"


async def test_a_conversation_goes_on_with_the_result_of_a_call(client: httpx.AsyncClient, service: ScriptedService):
    service.writer = write_sensibly
    message = (await ask(client, messages=ASKS, tools=[TOOL]))["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
    answer = await ask(client, messages=[*ASKS, message, result], tools=[TOOL])
    assert answer["message"]["content"] == "It is sunny, thank you."
    assert '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>\nresult: 42\n' in service.prompts[-1]


@pytest.mark.parametrize(
    ("form", "is_right"),
    [
        ({"type": "json_object"}, lambda value: isinstance(value, dict)),
        (
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "strict": True,
                    "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
                },
            },
            lambda value: type(value["ok"]) is bool,
        ),
    ],
)
async def test_an_answer_is_held_to_its_form(
    client: httpx.AsyncClient, service: ScriptedService, form: Any, is_right: Any
):
    if form["type"] == "json_object":
        service.writer = lambda prompt, params: '{"a": 1}'
    answer = await ask(client, response_format=form, temperature=1, seed=1)
    assert is_right(json.loads(answer["message"]["content"]))


async def test_text_is_the_form_of_any_answer(client: httpx.AsyncClient, service: ScriptedService):
    await ask(client, response_format={"type": "text"}, max_tokens=2)
    assert not service.params[0].is_constrained


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_an_entry_for_each_token(client: httpx.AsyncClient, service: ScriptedService, stream: bool):
    service.writer = lambda prompt, params: "aé"
    fields = chat_body(logprobs=True, top_logprobs=2, stream=stream)
    answer = await client.post(PATH, json=fields)
    events = events_of(answer.text) if stream else [answer.json()]
    told = [choice["logprobs"]["content"] for each in events for choice in each["choices"] if choice["logprobs"]]
    entries = [entry for each in told for entry in each]
    assert bytes(byte for entry in entries for byte in entry["bytes"] or ())[:3].decode() == "aé"
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    # Both bytes of the second letter, and the end of the sequence.
    assert len(entries) == 4


async def test_n_answers_are_told_apart(client: httpx.AsyncClient, service: ScriptedService):
    answer = (await client.post(PATH, json=chat_body(n=3, temperature=1, seed=5))).json()
    whole = {each["index"]: each["message"]["content"] for each in answer["choices"]}
    choices, _ = await streamed(client, n=3, temperature=1, seed=5, max_tokens=8)
    assert {index: choice["content"] for index, choice in choices.items()} == whole
    assert len(set(whole.values())) == 3
    assert answer["usage"]["completion_tokens"] == 24
    assert [choice["role"] for choice in choices.values()] == ["assistant"] * 3


async def test_the_last_event_tells_the_usage_where_it_is_wanted(client: httpx.AsyncClient):
    _, events = await streamed(client, stream_options={"include_usage": True}, max_tokens=3, ignore_eos=True)
    assert [each["usage"] for each in events[:-1]] == [None] * (len(events) - 1)
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 3)
    _, events = await streamed(client, max_tokens=3)
    assert all("usage" not in each for each in events)


async def test_reasoning_is_told_apart_from_the_answer(service: ScriptedService):
    service.writer = lambda prompt, params: "<think>hm, 2</think>\n\n4"
    app = create_app(service, model_names=[MODEL], chat_template=CHAT_TEMPLATE + "{# <think></think> #}")
    async with client_of(app) as client:
        answer = (await client.post(PATH, json=chat_body(max_tokens=50))).json()
        choices, _ = await streamed(client)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, 2", "4")
    assert (choices[0]["reasoning_content"], choices[0]["content"]) == ("hm, 2", "4")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


async def test_variables_of_the_template_may_be_set(service: ScriptedService):
    template = "{{ mood }} {{ reasoning_effort }} {{ messages[0].content }}"
    async with client_of(create_app(service, model_names=[MODEL], chat_template=template)) as client:
        await ask(client, chat_template_kwargs={"mood": "glad"}, reasoning_effort="low", max_tokens=1)
    assert service.prompts == ["glad low hi"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: input should be 'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type: input should be 'text', got 'image_url'",
        ),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1"}}]},
                ]
            },
            "the arguments of a tool call must be a JSON object, got '[1'",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "is neither a tool (double)",
        ),
        ({"tool_choice": "required"}, "tool_choice='any' needs tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: input should be 'function'"),
        ({"tools": [TOOL] * 129}, "tools: list should have at most 128 items"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            "cannot be followed",
        ),
        ({"top_logprobs": 2}, "top_logprobs goes with logprobs: true only"),
        ({"stream_options": {}}, "stream_options goes with stream: true only"),
        ({"functions": []}, "unknown argument 'functions'"),
        ({"chat_template_kwargs": {"tokenize": False}}, "which is no variable of a template"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "beyond the 4096 positions"),
        ({"modalities": ["audio"]}, "modalities[0]: input should be 'text'"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(client: httpx.AsyncClient, fields: dict[str, Any], why: str):
    assert why in await refused(client, **fields)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_takes_its_request_along(app: Any, service: ScriptedService, stream: bool):
    exchange = Exchange(app, PATH, chat_body(max_tokens=3000, ignore_eos=True, stream=stream, n=2))
    if stream:
        await exchange.has_news.wait()
    else:
        await asyncio.to_thread(wait_until, lambda: service.num_unfinished > 0)
    exchange.go_away()
    await exchange.task
    await asyncio.to_thread(wait_until, lambda: service.num_unfinished == 0)
    assert exchange.status != 200 or (stream and not exchange.answer.endswith(b"[DONE]\n\n"))
