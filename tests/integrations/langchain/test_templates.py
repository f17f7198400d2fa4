"""Chat templates of every kind: what they refuse is put so that they take it, and what they show is what was said."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.tools import tool
from scripted_engine import CHAT_TEMPLATE, ScriptedService

from paged_backend.integrations.langchain import ChatPaged

SHOWN = "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
ALL = "{% for m in messages %}"
TURNS = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turns') }}{% endif %}" + SHOWN
HAS_SYSTEM = "{% if messages[0].role == 'system' %}"
# As Gemma 2's, Gemma 3's, early Mistral's and Qwen's.
TEMPLATES = {
    "no system": HAS_SYSTEM + "{{ raise_exception('no system role') }}{% endif %}" + ALL + TURNS,
    "system first": HAS_SYSTEM + "{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}" + ALL + TURNS,
    "any order": ALL + SHOWN,
    "no system, silently": "{% for m in messages if m.role != 'system' %}" + SHOWN,
    "tools": "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception() }}{% endfor %}" + CHAT_TEMPLATE,
}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


CALLS = AIMessage("", tool_calls=[{"name": "add", "args": {"a": n, "b": 1}, "id": str(n)} for n in (1, 2)])
RESULTS = [ToolMessage("#2", tool_call_id="1"), ToolMessage("#3", tool_call_id="2")]
HISTORIES: dict[str, list[BaseMessage]] = {
    "parallel results": [HumanMessage("#1"), CALLS, *RESULTS],
    "results and a question": [HumanMessage("#1"), CALLS, *RESULTS, HumanMessage("#4")],
    "questions in a row": [HumanMessage("#1"), HumanMessage("#2"), AIMessage("#3"), HumanMessage("#4")],
    "answers in a row": [HumanMessage("#1"), AIMessage("#2"), AIMessage("#3"), HumanMessage("#4")],
    "a system message": [SystemMessage("#1"), HumanMessage("#2")],
    "system messages in a row": [SystemMessage("#1"), SystemMessage("#2"), HumanMessage("#3")],
    "a system message later": [HumanMessage("#1"), SystemMessage("#2"), HumanMessage("#3")],
    "only a system message": [SystemMessage("#1")],
    "an answer first": [AIMessage("#1"), HumanMessage("#2")],
    "an answer after the system message": [SystemMessage("#1"), AIMessage("#2"), HumanMessage("#3")],
    "an answer last": [HumanMessage("#1"), AIMessage("#2")],
}


@pytest.fixture
def said(service: ScriptedService) -> ScriptedService:
    service.writer = lambda *_: '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    return service


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_history_is_shown_whole_and_with_the_tools(said: ScriptedService, template: str, history: str) -> None:
    chat = ChatPaged.from_engine(said, chat_template=TEMPLATES[template], max_tokens=400)
    bound = chat.bind_tools([add])
    messages = HISTORIES[history]
    assert bound.invoke(messages).tool_calls[0]["args"] == {"a": 1, "b": 2}
    prompt = said.prompts[-1]
    places = [prompt.find(message.text) for message in messages if message.text]
    assert -1 not in places
    assert places == sorted(places)
    assert '"description": "Add two numbers."' in prompt
    assert chat.get_num_tokens_from_messages(messages, tools=[add]) == len(said.engine.tokenizer(prompt)["input_ids"])


def test_what_a_template_takes_is_left_as_it_is(said: ScriptedService) -> None:
    chat = ChatPaged.from_engine(said, chat_template=TEMPLATES["any order"], max_tokens=4)
    chat.invoke(HISTORIES["questions in a row"])
    assert said.prompts[-1] == "user: #1\nuser: #2\nassistant: #3\nuser: #4\nassistant: "
    chat = ChatPaged.from_engine(said, chat_template=TEMPLATES["no system"], max_tokens=4)
    chat.invoke(HISTORIES["questions in a row"])
    assert said.prompts[-1] == "user: #1\n\n#2\nassistant: #3\nuser: #4\nassistant: "


def test_a_refusal_that_nothing_helps_is_told_as_it_first_was(said: ScriptedService) -> None:
    template = "{{ raise_exception(messages | length ~ ' messages') }}"
    with pytest.raises(ModelInvalidRequestError, match="2 messages"):
        ChatPaged.from_engine(said, chat_template=template).invoke(HISTORIES["questions in a row"][:2])


# Counting


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("strategy", ["first", "last"])
def test_a_history_that_ends_in_an_answer_is_trimmed(said: ScriptedService, template: str, strategy: Any) -> None:
    chat = ChatPaged.from_engine(said, chat_template=TEMPLATES[template])
    history = [HumanMessage("question"), AIMessage("answer")] * 3
    # LangChain counts them in reverse order, which some templates need an empty message for.
    most = chat.get_num_tokens_from_messages(history[:2]) + 10
    assert trim_messages(history, max_tokens=most, token_counter=chat, strategy=strategy) == history[:2]
    assert trim_messages(history, max_tokens=1, token_counter=chat, strategy=strategy) == []
    assert trim_messages(history, max_tokens=999, token_counter=chat, strategy=strategy) == history


def test_no_messages_are_no_tokens(chat: ChatPaged) -> None:
    assert chat.get_num_tokens_from_messages([]) == 0
    assert chat.get_num_tokens_from_messages([], tools=[add]) == 0


# Variables and answers that go on

THINKS = "{% if thinks %}hm {% endif %}{% for m in messages %}" + SHOWN


def test_a_call_may_give_variables_of_the_template(said: ScriptedService) -> None:
    chat = ChatPaged.from_engine(said, chat_template=THINKS, chat_template_kwargs={"other": 1}, max_tokens=4)
    for model in (chat.bind(chat_template_kwargs={"thinks": True}), chat):
        model.invoke("x")
    list(chat.stream("x", chat_template_kwargs={"thinks": True}))
    assert [prompt.startswith("hm ") for prompt in said.prompts] == [True, False, True]
    number = chat.get_num_tokens_from_messages([HumanMessage("x")], chat_template_kwargs={"thinks": True})
    assert number == len(said.engine.tokenizer(said.prompts[-1])["input_ids"])


def test_a_call_may_give_a_template_and_ways_of_reading(said: ScriptedService) -> None:
    chat = ChatPaged.from_engine(said, max_tokens=400)
    chat.invoke("x", chat_template="{{ messages[0].content }}!")
    assert said.prompts[-1] == "x!"
    said.writer = lambda *_: '[r]Hm.[/r]{"name": "add", "parameters": {"a": 1, "b": 2}}'
    answer = chat.bind_tools([add]).invoke("x", tool_parser="json", reasoning_tags=("[r]", "[/r]"))
    assert answer.tool_calls[0]["args"] == {"a": 1, "b": 2}
    assert answer.additional_kwargs["reasoning_content"] == "Hm."


@pytest.mark.parametrize("name", ["tokenize", "tools", "conversation", "chat_template"])
def test_what_is_no_variable_is_refused_by_name(chat: ChatPaged, name: str) -> None:
    with pytest.raises(ModelInvalidRequestError, match=name):
        chat.invoke("x", chat_template_kwargs={name: True})


PREFILL = {"continue_final_message": True}


@pytest.mark.parametrize("how", ["constructor", "bind", "stream"])
def test_an_answer_goes_on_from_its_beginning(said: ScriptedService, how: str) -> None:
    said.writer = lambda *_: " John"
    options = {"chat_template_kwargs": PREFILL} if how == "constructor" else {}
    chat = ChatPaged.from_engine(said, chat_template=THINKS, max_tokens=40, **options)
    messages = [HumanMessage("Write a letter."), AIMessage("Dear")]
    if how == "stream":
        assert "".join(chunk.text for chunk in chat.stream(messages, chat_template_kwargs=PREFILL)) == " John"
    else:
        bound = chat.bind(chat_template_kwargs=PREFILL) if how == "bind" else chat
        assert bound.invoke(messages).content == " John"
    assert said.prompts[-1] == "user: Write a letter.\nassistant: Dear"


def test_reasoning_goes_on_from_its_beginning(said: ScriptedService) -> None:
    said.writer = lambda *_: " hm.</think>Yes."
    chat = ChatPaged.from_engine(said, chat_template=THINKS + "{# </think> #}", max_tokens=40)
    answer = chat.invoke([HumanMessage("x"), AIMessage("<think>Well,")], chat_template_kwargs=PREFILL)
    assert (answer.content, answer.additional_kwargs["reasoning_content"]) == ("Yes.", " hm.")


def test_only_an_answer_can_go_on(chat: ChatPaged) -> None:
    with pytest.raises(ModelInvalidRequestError, match="of the assistant, but the last one has the role 'user'"):
        chat.invoke("x", chat_template_kwargs=PREFILL)
