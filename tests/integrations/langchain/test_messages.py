"""Messages as the dictionaries that conversations are made of."""

from __future__ import annotations

import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from paged_backend.integrations.langchain.errors import PagedInvalidRequestError
from paged_backend.integrations.langchain.messages import template_messages


def test_each_kind_has_its_role():
    chat = [SystemMessage("a"), HumanMessage("b"), AIMessage("c"), ToolMessage("d", tool_call_id="1")]
    roles = [message["role"] for message in template_messages([*chat, ChatMessage(role="judge", content="e")])]
    assert roles == ["system", "user", "assistant", "tool", "judge"]


def test_a_call_has_its_arguments_as_an_object():
    call = AIMessage("", tool_calls=[{"name": "f", "args": {"x": 1}, "id": "1"}])
    (message,) = template_messages([call])
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_an_invalid_call_is_shown_as_it_was_written():
    wrong = {"name": "f", "args": '{"x": ', "id": "1", "error": None, "type": "invalid_tool_call"}
    assert template_messages([AIMessage("so:", invalid_tool_calls=[wrong])])[0]["content"] == 'so:{"x": '


def test_the_result_of_a_function_without_a_call_is_the_users_words():
    (message,) = template_messages([FunctionMessage(name="f", content="7")])
    assert message == {"role": "user", "content": "<tool_response>\n7\n</tool_response>"}


def test_text_blocks_are_joined_and_blocks_that_an_answer_repeats_are_left_out():
    blocks = ["a", {"type": "text", "text": "b"}, {"type": "tool_use", "name": "f", "id": "1", "input": {}}]
    assert template_messages([AIMessage(blocks)])[0]["content"] == "ab"


def test_what_is_no_text_is_refused_by_name():
    with pytest.raises(PagedInvalidRequestError, match="HumanMessage holds content of type 'image_url'"):
        template_messages([HumanMessage([{"type": "image_url", "image_url": "x"}])])
    with pytest.raises(PagedInvalidRequestError, match="RemoveMessage cannot be part of a chat"):
        template_messages([RemoveMessage(id="1")])
