"""Inputs of the newer form, and the chats that they come to."""

from __future__ import annotations

from typing import Any

import pytest

from paged_backend.integrations.openai_server.api_error import ApiError
from paged_backend.integrations.openai_server.bodies import ChatBody
from paged_backend.integrations.openai_server.response_body import ResponseBody, chat_of

PARAMETERS = {"type": "object", "properties": {}}


def chat(**fields: Any) -> ChatBody:
    return chat_of(ResponseBody(**{"model": "m", "input": "hi", **fields}))


def messages(given: ChatBody) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in given.messages]


def test_a_text_is_the_users_and_instructions_are_the_systems():
    assert messages(chat(instructions="be brief")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_items_come_to_messages_and_calls_to_what_was_said_before_them():
    call = {
        "type": "function_call",
        "call_id": "1",
        "name": "f",
        "arguments": "{}",
        "id": "fc_1",
        "status": "completed",
    }
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "7"},
    ]
    user, assistant, tool = messages(chat(input=given))
    assert user == {"role": "user", "content": "ab"}
    assert (assistant["content"], [each["id"] for each in assistant["tool_calls"]]) == ("so", ["1", "2"])
    assert tool == {"role": "tool", "content": "7", "tool_call_id": "1"}


def test_tools_choices_and_forms_are_a_chats():
    tool = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": True}
    form = {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}
    found = chat(tools=[tool], tool_choice={"type": "function", "name": "f"}, text=form, reasoning={"effort": "low"})
    assert found.tools[0].function.parameters == PARAMETERS
    assert found.tool_choice.function.name == "f"
    assert found.response_format.json_schema.json_schema == PARAMETERS
    assert found.reasoning_effort == "low"


def test_logprobs_are_told_where_they_are_to_be_included():
    assert chat(top_logprobs=3).logprobs is False
    found = chat(top_logprobs=3, include=["message.output_text.logprobs"])
    assert (found.logprobs, found.top_logprobs) == (True, 3)


@pytest.mark.parametrize("fields", [{"input": [{"type": "reasoning"}]}, {"text": {"format": {"type": "json_schema"}}}])
def test_what_comes_to_no_chat_is_refused(fields: dict[str, Any]):
    with pytest.raises(ApiError):
        chat(**fields)
