"""Messages as dictionaries, told in words where a template does not know what they are."""

from __future__ import annotations

import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from paged_backend.integrations.langchain.errors import PagedInvalidRequestError
from paged_backend.integrations.langchain.messages import conversations, knows_tools

KNOWS_ALL = "{% for t in tools %}{% endfor %}{{ m.tool_calls }}{% if m.role == 'tool' %}{% endif %}"
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = AIMessage("", tool_calls=[{"name": "f", "args": {"x": 1}, "id": "1"}])


def first(*messages, template=KNOWS_ALL, tools=()):
    return next(conversations(messages, tools, template))


def test_each_kind_has_its_role():
    chat = [SystemMessage("a"), HumanMessage("b"), AIMessage("c"), ToolMessage("d", tool_call_id="1")]
    roles = [message["role"] for message in first(*chat, ChatMessage(role="judge", content="e"))]
    assert roles == ["system", "user", "assistant", "tool", "judge"]


def test_a_template_that_knows_calls_gets_them_as_they_are():
    (message,) = first(CALL)
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_a_template_that_does_not_gets_calls_and_results_in_words():
    call, result = first(CALL, ToolMessage("7", tool_call_id="1"), template="{{ messages }}")
    assert call["content"] == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\n7\n</tool_response>"}


def test_an_invalid_call_is_shown_as_it_was_written():
    wrong = {"name": "f", "args": '{"x": ', "id": "1", "error": None, "type": "invalid_tool_call"}
    assert first(AIMessage("so:", invalid_tool_calls=[wrong]))[0]["content"] == 'so:{"x": '


@pytest.mark.parametrize("system", [[], [SystemMessage("be brief")]])
def test_a_template_without_tools_gets_them_in_the_system_message(system):
    shown = first(*system, HumanMessage("hi"), template="{{ messages }}", tools=[TOOL])
    assert [message["role"] for message in shown] == ["system", "user"]
    assert '"name": "f"' in shown[0]["content"]


def test_a_template_that_refuses_may_have_turns_and_then_no_system_message():
    chat = [SystemMessage("s"), AIMessage("a"), HumanMessage("b"), HumanMessage("c")]
    _, turns, bare = conversations(chat, (), KNOWS_ALL)
    assert [(m["role"], m["content"]) for m in turns[1:]] == [("user", ""), ("assistant", "a"), ("user", "b\n\nc")]
    assert [(m["role"], m["content"]) for m in bare] == [("user", "s"), ("assistant", "a"), ("user", "b\n\nc")]


def test_answers_in_a_row_become_one_with_all_their_calls():
    _, turns, _ = conversations([HumanMessage("a"), CALL, CALL], (), KNOWS_ALL)
    assert [len(message.get("tool_calls", ())) for message in turns] == [0, 2]


def test_text_blocks_are_joined_and_blocks_that_an_answer_repeats_are_left_out():
    blocks = ["a", {"type": "text", "text": "b"}, {"type": "tool_use", "name": "f", "id": "1", "input": {}}]
    assert first(AIMessage(blocks))[0]["content"] == "ab"


def test_what_is_no_text_is_refused_by_name():
    with pytest.raises(PagedInvalidRequestError, match="HumanMessage holds content of type 'image_url'"):
        first(HumanMessage([{"type": "image_url", "image_url": "x"}]))
    with pytest.raises(PagedInvalidRequestError, match="RemoveMessage cannot be part of a chat"):
        first(RemoveMessage(id="1"))


def test_a_template_knows_tools_when_it_names_them():
    assert knows_tools("{% if tools %}")
    assert not knows_tools("{% if tools_enabled or mytools %}")
