"""What one call of a chat model comes to, from its messages and arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizers import byte_tokenizer

from paged_backend.errors import RequestRefused
from paged_backend.integrations.chat.chat_request import ChatRequest, chat_request, tool_choice
from paged_backend.integrations.chat.tool_formats import FORMATS

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SETTINGS = {"chat_template": None, "chat_template_kwargs": {}, "tool_parser": None, "reasoning_tags": None}
TOKENIZER = byte_tokenizer("{% if tools %}{{ tools }}{% endif %}{{ messages[0].content }} <tool_call>")


def request(*messages: Any, tokenizer: Any = TOKENIZER, **kwargs: Any) -> ChatRequest:
    chat = SimpleNamespace(model="m", **SETTINGS)
    return chat_request(chat, tokenizer, messages or [{"role": "user", "content": "hi"}], kwargs)


@pytest.mark.parametrize("value", [None, False, "auto"])
def test_by_default_the_model_chooses(value: Any):
    assert tool_choice(value, [TOOL]) == "auto"


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        ("none", "none"),
        (True, "any"),
        ("required", "any"),
        ("f", "f"),
        ({"type": "any"}, "any"),
        ({"type": "function", "function": {"name": "f"}}, "f"),
        ({"type": "tool", "name": "f"}, "f"),
    ],
)
def test_a_choice_may_be_said_as_openai_and_others_say_it(value: Any, choice: str):
    assert tool_choice(value, [TOOL]) == choice


def test_a_choice_without_its_tool_is_refused_with_the_tools_there_are():
    with pytest.raises(RequestRefused, match=r"tool_choice='g' is neither a tool \(f\) nor auto"):
        tool_choice("g", [TOOL])
    with pytest.raises(RequestRefused, match="needs tools; bind some"):
        tool_choice("any", [])


def test_a_plain_call_is_its_prompt_and_no_more():
    plain = request()
    assert TOKENIZER.decode(plain.prompt) == "hi <tool_call>"
    assert (plain.sampling, plain.tools, plain.tool_names, plain.is_forced) == ({}, None, (), False)


def test_tools_that_must_not_be_called_are_not_shown():
    assert request(tools=[TOOL], tool_choice="none").prompt == request().prompt


def test_a_forced_call_is_held_to_its_schema_behind_an_open_mark():
    forced = request(tools=[TOOL], tool_choice="any")
    assert (forced.is_forced, forced.tools) == (True, FORMATS["json"])
    assert forced.sampling["json_schema"]["properties"]["name"] == {"const": "f"}
    assert TOKENIZER.decode(forced.prompt).endswith("<tool_call>\n")


def test_without_parallel_calls_there_is_one_at_most():
    assert request(tools=[TOOL], parallel_tool_calls=False).max_calls == 1
    assert request(tools=[TOOL]).max_calls is None


@pytest.mark.parametrize(("kind", "schema"), [("text", None), ("json_object", {"type": "object"})])
def test_a_response_format_holds_the_answer(kind: str, schema: Any):
    found = request(response_format={"type": kind}).sampling.get("json_schema")
    assert (found and found["type"]) == (schema and "object")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"response_format": {"type": "xml"}}, "response_format={'type': 'xml'} is unknown"),
        ({"tools": [TOOL], "tool_parser": "mine"}, "tool_parser='mine' is unknown; choose from hermes"),
        ({"tokenizer": byte_tokenizer(None)}, "model='m' has no chat template"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(arguments: dict[str, Any], why: str):
    with pytest.raises(RequestRefused, match=why):
        request(**arguments)


def test_a_role_that_is_no_word_is_refused():
    with pytest.raises(RequestRefused, match="is no role; use letters"):
        request({"role": "a b", "content": "hi"})


def test_an_answer_goes_on_only_where_the_last_message_is_the_assistants():
    with pytest.raises(RequestRefused, match="goes on with a message of the assistant, but the last one has the role"):
        request(chat_template_kwargs={"continue_final_message": True})


def test_what_a_tool_sets_for_templates_is_no_variable_of_a_call():
    with pytest.raises(RequestRefused, match="chat_template_kwargs holds 'tokenize', which is no variable"):
        request(chat_template_kwargs={"tokenize": False})
