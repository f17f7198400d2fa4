"""Conversations told in words where a template does not know what they hold."""

from __future__ import annotations

from typing import Any

import pytest

from paged_backend.integrations.chat.conversations import conversations, knows_tools

KNOWS_ALL = "{% for t in tools %}{% endfor %}{{ m.tool_calls }}{% if m.role == 'tool' %}{% endif %}"
TOOL = {"type": "function", "function": {"name": "f"}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}


def says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def first(*messages: Any, template: str = KNOWS_ALL, tools: Any = ()) -> list[dict[str, Any]]:
    return next(conversations(messages, tools, template))


def test_a_template_that_knows_calls_gets_them_as_they_are():
    assert first(CALL) == [CALL]


def test_a_template_that_does_not_gets_calls_and_results_in_words():
    result = {"role": "tool", "content": "7", "tool_call_id": "1"}
    call, told = first({**CALL, "content": "so"}, result, template="{{ messages }}")
    assert call == says("assistant", 'so\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>')
    assert told == says("user", "<tool_response>\n7\n</tool_response>")


def test_what_was_given_stays_as_it_is():
    given = says("system", "s")
    assert first(given, template="{{ messages }}", tools=[TOOL])[0] != given
    assert given == says("system", "s")


@pytest.mark.parametrize("system", [[], [says("system", "be brief")]])
def test_a_template_without_tools_gets_them_in_the_system_message(system: Any):
    shown = first(*system, says("user", "hi"), template="{{ messages }}", tools=[TOOL])
    assert [message["role"] for message in shown] == ["system", "user"]
    assert '"name": "f"' in shown[0]["content"]


def test_a_template_that_refuses_may_have_turns_and_then_no_system_message():
    chat = [says("system", "s"), says("assistant", "a"), says("user", "b"), says("user", "c")]
    _, turns, bare = conversations(chat, (), KNOWS_ALL)
    assert [(m["role"], m["content"]) for m in turns[1:]] == [("user", ""), ("assistant", "a"), ("user", "b\n\nc")]
    assert [(m["role"], m["content"]) for m in bare] == [("user", "s"), ("assistant", "a"), ("user", "b\n\nc")]


def test_answers_in_a_row_become_one_with_all_their_calls():
    _, turns, _ = conversations([says("user", "a"), CALL, CALL], (), KNOWS_ALL)
    assert [len(message.get("tool_calls", ())) for message in turns] == [0, 2]


def test_a_template_knows_tools_when_it_names_them():
    assert knows_tools("{% if tools %}")
    assert not knows_tools("{% if tools_enabled or mytools %}")
