"""Answers in OpenAI's newer form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from scripted_engine import CHAT_TEMPLATE, ScriptedService, write_sensibly
from server_checks import MODEL, Exchange, client_of
from service_checks import wait_until

from paged_backend.integrations.openai_server import create_app

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "double",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", "temperature": 0, "max_output_tokens": 200, **fields}


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=body(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(PATH, json=body(stream=True, **fields))
    events = []
    for each in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = each.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    usage = {name: value for name, value in response["usage"].items() if name != "input_tokens_details"}
    return {**response, "id": None, "created_at": None, "output": output, "usage": usage}


async def test_an_answer_is_a_message(client: httpx.AsyncClient, service: ScriptedService):
    service.writer = lambda prompt, params: "I am well."
    response = await ask(client, instructions="be brief")
    (message,) = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert [(part["type"], part["text"]) for part in message["content"]] == [("output_text", "I am well.")]
    assert (response["status"], response["incomplete_details"], response["error"]) == ("completed", None, None)
    assert service.prompts == ["system: be brief\nuser: hi\nassistant: "]
    assert response["usage"]["output_tokens"] == 11
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 11


async def test_an_answer_that_was_cut_says_so(client: httpx.AsyncClient):
    response = await ask(client, max_output_tokens=2)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (await streamed(client, max_output_tokens=2))[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    "writes", ["It is so.", "", "<think>hm</think>so <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"]
)
async def test_a_stream_comes_to_the_whole(service: ScriptedService, writes: str):
    call = '{"name": "double", "arguments": {"x": 1}}'
    service.writer = lambda prompt, params: writes.replace("{CALL}", call)
    app = create_app(service, model_names=[MODEL], chat_template=CHAT_TEMPLATE + "{# <think></think> #}")
    async with client_of(app) as client:
        whole = await ask(client, tools=[TOOL])
        events = await streamed(client, tools=[TOOL])
    assert [events[0]["type"], events[1]["type"]] == ["response.created", "response.in_progress"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    texts: dict[int, str] = {}
    done: dict[int, dict[str, Any]] = {}
    for each in events:
        if each["type"].endswith(".delta"):
            texts[each["output_index"]] = texts.get(each["output_index"], "") + each["delta"]
        elif each["type"] == "response.output_item.done":
            done[each["output_index"]] = each["item"]
    assert list(done.values()) == events[-1]["response"]["output"]
    kinds = [item["type"] for item in done.values()]
    assert kinds == (["reasoning", "message", "function_call", "function_call"] if "think" in writes else ["message"])
    for index, item in done.items():
        told = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts.get(index, "") == told
    if "think" in writes:
        assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


async def test_a_conversation_goes_on_with_the_items_of_an_answer(client: httpx.AsyncClient, service: ScriptedService):
    service.writer = write_sensibly
    asked = [{"role": "user", "content": "use the tool on 21"}]
    (call,) = (await ask(client, input=asked, tools=[TOOL]))["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("double", {"x": 21})
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    answer = await ask(client, input=[*asked, call, result], tools=[TOOL])
    assert answer["output"][0]["content"][0]["text"] == "It is sunny, thank you."
    assert "\nresult: 42\n" in service.prompts[-1]


async def test_an_answer_is_held_to_its_form(client: httpx.AsyncClient):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = await ask(client, text=form, temperature=1)
    assert type(json.loads(response["output"][0]["content"][0]["text"])["ok"]) is bool
    assert response["text"]["format"]["schema"] == schema


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_told_where_they_are_to_be_included(
    client: httpx.AsyncClient, service: ScriptedService, stream: bool
):
    service.writer = lambda prompt, params: "ab"
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    response = (await streamed(client, **fields))[-1]["response"] if stream else await ask(client, **fields)
    told = response["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in told][:2] == ["a", "b"]
    assert {len(entry["top_logprobs"]) for entry in told} == {1}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"previous_response_id": "resp_1"}, "unknown argument 'previous_response_id'"),
        ({"background": True}, "background: input should be False"),
        ({"truncation": "auto"}, "truncation: input should be 'disabled'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"n": 2}, "unknown argument 'n'"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(client: httpx.AsyncClient, fields: dict[str, Any], why: str):
    answer = await client.post(PATH, json=body(**fields))
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_takes_its_request_along(app: Any, service: ScriptedService, stream: bool):
    exchange = Exchange(app, PATH, body(max_output_tokens=3000, stream=stream))
    await asyncio.to_thread(wait_until, lambda: service.num_unfinished > 0)
    exchange.go_away()
    await exchange.task
    await asyncio.to_thread(wait_until, lambda: service.num_unfinished == 0)
    assert exchange.status != 200 or (stream and b"response.incomplete" not in exchange.answer)
