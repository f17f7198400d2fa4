"""Tools and structured output: what reaches the prompt, what is read from the answer, what is forced."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, TypedDict

import pytest
from langchain_core.exceptions import ModelAPIError, ModelInvalidRequestError, OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from scripted_engine import CHAT_TEMPLATE, ScriptedService, scripted_service, write_sensibly

from paged_backend.integrations.langchain import ChatPaged

PLAIN_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return word


@pytest.fixture
def chat(service: ScriptedService) -> ChatPaged:
    return ChatPaged.from_engine(service, model="tiny", max_tokens=400)


def streamed(model: Any, prompt: Any = "go", **kwargs: Any) -> AIMessageChunk:
    chunks = list(model.stream(prompt, **kwargs))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


def both(model: Any, prompt: Any = "go") -> list[AIMessage]:
    """The answer of a call and of a stream."""
    return [model.invoke(prompt), streamed(model, prompt)]


def test_tools_reach_the_prompt_through_the_template(service: ScriptedService, chat: ChatPaged) -> None:
    chat.bind_tools([add]).invoke("go", max_tokens=1)
    assert '"name": "add"' in service.prompts[-1]
    assert "Add two numbers." in service.prompts[-1]


@pytest.mark.parametrize("has_system", [True, False])
def test_a_template_without_tools_gets_them_as_system_text(service: ScriptedService, has_system: bool) -> None:
    chat = ChatPaged.from_engine(service, chat_template=PLAIN_TEMPLATE, max_tokens=400)
    service.writer = lambda *_: '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    history = [*([SystemMessage("Be brief.")] if has_system else []), HumanMessage("go")]
    answer = chat.bind_tools([add]).invoke(history)
    assert service.prompts[-1].startswith("system: " + ("Be brief.\n\n" if has_system else "") + "You may call")
    assert '"name": "add"' in service.prompts[-1]
    assert answer.tool_calls[0]["args"] == {"a": 1, "b": 2}
    result = add.invoke(answer.tool_calls[0])
    chat.bind_tools([add]).invoke([*history, answer, result])
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in service.prompts[-1]
    assert "user: <tool_response>\n3\n</tool_response>" in service.prompts[-1]


FORMATS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "json": '```json\n{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}\n```',
}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_in_the_usual_formats(service: ScriptedService, name: str) -> None:
    service.writer = lambda *_: FORMATS[name]
    chat = ChatPaged.from_engine(service, tool_parser=name, max_tokens=400)
    for answer in both(chat.bind_tools([add])):
        assert answer.content == ""
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})]
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        assert re.fullmatch("[0-9a-f]{9}", answer.tool_calls[0]["id"])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if tools %}<tool_call>{% endif %}", FORMATS["hermes"]),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", FORMATS["mistral"]),
        ("{% if tools %}<|python_tag|>{% endif %}", FORMATS["llama3"]),
    ],
)
def test_the_format_is_told_by_the_template(service: ScriptedService, template: str, text: str) -> None:
    service.writer = lambda *_: text
    chat = ChatPaged.from_engine(service, chat_template=template + PLAIN_TEMPLATE, max_tokens=400)
    assert chat.bind_tools([add]).invoke("go").tool_calls[0]["name"] == "add"


def test_a_parser_of_ones_own_reads_calls(service: ScriptedService) -> None:
    def read(text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        words, _, call = text.partition("CALL ")
        return words, [("add", json.loads(call))] if call else []

    service.writer = lambda *_: 'Well. CALL {"a": 1, "b": 2}'
    chat = ChatPaged.from_engine(service, tool_parser=read, max_tokens=400)
    for answer in both(chat.bind_tools([add])):
        assert answer.content == "Well. "
        assert answer.tool_calls[0]["args"] == {"a": 1, "b": 2}


def test_an_unknown_parser_lists_the_known_ones(service: ScriptedService) -> None:
    chat = ChatPaged.from_engine(service, tool_parser="nonsense")
    with pytest.raises(ModelInvalidRequestError, match="hermes, llama3, mistral, json"):
        chat.bind_tools([add]).invoke("go")


def test_several_calls_and_the_words_before_them_come_in_order(service: ScriptedService, chat: ChatPaged) -> None:
    second = '<tool_call>{"name": "look_up", "arguments": {"word": "x"}}</tool_call>'
    service.writer = lambda *_: f"Let me see. {FORMATS['hermes']}\n{second}"
    for answer in both(chat.bind_tools([add, look_up])):
        assert answer.content == "Let me see. "
        assert [call["name"] for call in answer.tool_calls] == ["add", "look_up"]
    (only,) = chat.bind_tools([add, look_up], parallel_tool_calls=False).invoke("go").tool_calls
    assert only["name"] == "add"


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_words_and_calls_of_a_stream_are_blocks_of_their_own(service: ScriptedService, version: str) -> None:
    service.writer = lambda *_: f"Let me see. {FORMATS['hermes']}{FORMATS['hermes']}"
    chat = ChatPaged.from_engine(service, output_version=version, max_tokens=400)
    for answer in both(chat.bind_tools([add])):
        assert [block["type"] for block in answer.content_blocks] == ["text", "tool_call", "tool_call"]
        assert [call["args"] for call in answer.tool_calls] == [{"a": 1, "b": 2}] * 2


def test_a_streamed_name_comes_once_and_the_arguments_parse(service: ScriptedService, chat: ChatPaged) -> None:
    service.writer = lambda *_: FORMATS["hermes"]
    chunks = list(chat.bind_tools([add]).stream("go"))
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert [piece["name"] for piece in pieces if piece["name"]] == ["add"]
    assert json.loads("".join(piece["args"] for piece in pieces)) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1, "b":',
        '{"name": "add", "arguments": [1]}',
        '{"arguments": {}}',
        "nonsense",
    ],
)
def test_a_malformed_call_is_an_invalid_tool_call_and_no_exception(
    service: ScriptedService, chat: ChatPaged, body: str
) -> None:
    for written in (f"<tool_call>{body}</tool_call>", f"<tool_call>{body}"):
        service.writer = lambda *_, written=written: written
        for answer in both(chat.bind_tools([add])):
            assert answer.tool_calls == []
            assert [call["args"] for call in answer.invalid_tool_calls] == [written]
            # What was wrong is shown to the model again.
            chat.invoke([HumanMessage("go"), answer, HumanMessage("no")])
            assert f"assistant: {written}\n" in service.prompts[-1]


def test_text_that_looks_like_the_beginning_of_a_call_stays_text(service: ScriptedService, chat: ChatPaged) -> None:
    service.writer = lambda *_: "a < b and <tool"
    for answer in both(chat.bind_tools([add])):
        assert answer.content == "a < b and <tool"
        assert not answer.tool_calls


def test_without_tools_nothing_is_taken_for_a_call(service: ScriptedService, chat: ChatPaged) -> None:
    service.writer = lambda *_: FORMATS["hermes"]
    for model in (chat, chat.bind_tools([add], tool_choice="none")):
        for answer in both(model):
            assert answer.content == FORMATS["hermes"]
    assert "Add two numbers." not in service.prompts[-1]


MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<other>")


@pytest.fixture(scope="module")
def marking() -> Iterator[ScriptedService]:
    """Of a model that writes marks as special tokens, as most do that were trained to call tools."""
    service = scripted_service(lambda prompt, params: None, marks=MARKS)
    yield service
    service.close(graceful=False)
    service.engine.close()


SPECIAL = {
    "hermes": (f"Well. {FORMATS['hermes']}<other>", "Well. "),
    "mistral": ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', ""),
    "llama3": ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', ""),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_marks_that_are_special_tokens_reach_the_parser(marking: ScriptedService, name: str) -> None:
    text, content = SPECIAL[name]
    marking.writer = lambda *_: f"<think>Hm.</think>{text}"
    chat = ChatPaged.from_engine(marking, chat_template=THINKING, tool_parser=name, max_tokens=400)
    for answer in both(chat.bind_tools([add])):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})]
        assert answer.content == content
        assert answer.additional_kwargs["reasoning_content"] == "Hm."


def test_a_parser_of_ones_own_sees_the_marks_but_not_the_end(marking: ScriptedService) -> None:
    seen: list[str] = []
    marking.writer = lambda *_: f"Well.<other>{FORMATS['hermes']}"
    chat = ChatPaged.from_engine(marking, tool_parser=lambda text: (seen.append(text) or text, []), max_tokens=400)
    both(chat.bind_tools([add]))
    assert seen == [f"Well.<other>{FORMATS['hermes']}"] * 2


def test_without_tools_and_reasoning_no_special_token_is_shown(marking: ScriptedService) -> None:
    marking.writer = lambda *_: "<tool_call>Yes.</tool_call><other>"
    for answer in both(ChatPaged.from_engine(marking, max_tokens=400)):
        assert answer.content == "Yes."


@pytest.mark.parametrize("name", ["llama3", "mistral", "json", "hermes"])
def test_an_answer_in_json_with_a_name_is_content(service: ScriptedService, name: str) -> None:
    service.writer = lambda *_: '{"name": "Anna", "age": 30}'
    for answer in both(ChatPaged.from_engine(service, tool_parser=name, max_tokens=400).bind_tools([add])):
        assert answer.content == '{"name": "Anna", "age": 30}'
        assert not answer.tool_calls
        assert answer.response_metadata["finish_reason"] == "stop"


def test_a_forced_call_that_is_cut_short_is_an_invalid_one(service: ScriptedService, chat: ChatPaged) -> None:
    service.writer = lambda *_: '{"name": "look_up", "arguments": {"word": "wine"}}'
    for answer in both(chat.bind_tools([add, look_up], tool_choice="any").bind(max_tokens=40)):
        assert answer.tool_calls == []
        assert answer.content == ""
        (invalid,) = answer.invalid_tool_calls
        assert invalid["args"] == '<tool_call>{"name": "look_up", "arguments": {"word"'
        assert answer.response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_preview"},
        {"type": "computer_20241022", "name": "computer"},
        {"type": "custom", "name": "x"},
        {"google_search": {}},
        {"type": "function", "function": {"description": "nameless"}},
        {"name": "array", "parameters": {"type": "array", "items": {}}},
        5,
    ],
)
def test_what_only_a_provider_can_run_and_what_is_no_tool_is_refused_by_name(chat: ChatPaged, tool: Any) -> None:
    named = next(iter(tool.values())) if isinstance(tool, dict) else tool
    with pytest.raises(ModelInvalidRequestError, match=re.escape(str(named))):
        chat.bind_tools([tool])
    with pytest.raises(ModelInvalidRequestError):
        chat.get_num_tokens_from_messages([HumanMessage("x")], tools=[tool])
    with pytest.raises(ModelInvalidRequestError):
        chat.invoke("x", tools=[tool])


PARAMETERS = add.tool_call_schema.model_json_schema()


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "add", "parameters": PARAMETERS},
        {"name": "add", "input_schema": PARAMETERS},
        {"type": "custom", "name": "add", "input_schema": PARAMETERS},
        {"toolSpec": {"name": "add", "inputSchema": {"json": PARAMETERS}}},
        {**PARAMETERS, "title": "add"},
        {"title": "add", "allOf": [PARAMETERS]},
        add,
    ],
)
def test_a_tool_may_come_in_any_form(service: ScriptedService, chat: ChatPaged, tool: Any) -> None:
    service.writer = lambda *_: '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    for bound in (chat.bind_tools([tool], tool_choice="add"), chat.bind(tools=[tool], tool_choice="any")):
        assert bound.invoke("go").tool_calls[0]["args"] == {"a": 1, "b": 2}
        assert '"a": {"' in service.prompts[-1]


class Part(BaseModel):
    """A part."""

    size: int
    parts: list[Part]


def build(part: Part, count: int) -> str:
    """Build."""
    return "built"


@pytest.mark.parametrize("source", [Part, build, tool(build)])
def test_a_tool_whose_arguments_hold_themselves_is_shown_and_held_to_all_of_them(
    service: ScriptedService, chat: ChatPaged, source: Any
) -> None:
    bound = chat.bind_tools([source], tool_choice="any")
    part = {"size": 1, "parts": [{"size": 2, "parts": []}]}
    arguments = part if source is Part else {"part": part, "count": 1}
    name = "Part" if source is Part else "build"
    service.writer = lambda *_: json.dumps({"name": name, "arguments": arguments})
    assert bound.invoke("go").tool_calls[0]["args"] == arguments
    assert '"properties": {"' in service.prompts[-1]
    assert '"#/$defs/Part"' in service.prompts[-1]
    service.writer = lambda *_: json.dumps({"name": name, "arguments": arguments}).replace("[]", "[5]")
    with pytest.raises(ModelAPIError):
        bound.invoke("go")


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("choice", ["any", "required", True, "add", NAMED])
def test_a_forced_call_fits_the_schema_whatever_the_model_would_say(chat: ChatPaged, choice: Any) -> None:
    class Color(BaseModel):
        """Choose a colour."""

        name: str = Field(max_length=4)
        shade: int = Field(ge=0, le=9)

    # Random weights, drawn at random.
    bound = chat.bind_tools([Color if choice != "add" and choice != NAMED else add], tool_choice=choice)
    for answer in both(bound.bind(temperature=1.0, seed=3, max_tokens=3000)):
        (call,) = answer.tool_calls
        if call["name"] == "Color":
            Color(**call["args"])
        else:
            assert {type(value) for value in call["args"].values()} == {int}
        assert answer.content == ""


def test_a_choice_that_is_no_tool_is_refused_when_it_is_bound(chat: ChatPaged) -> None:
    with pytest.raises(ModelInvalidRequestError, match="subtract"):
        chat.bind_tools([add], tool_choice="subtract")
    with pytest.raises(ModelInvalidRequestError, match="needs tools"):
        chat.bind_tools([], tool_choice="any")


def test_tools_may_be_bound_with_scheduling_arguments(service: ScriptedService, chat: ChatPaged) -> None:
    service.writer = write_sensibly
    assert chat.bind_tools([add], priority=3, timeout=60).invoke("what is 1 + 2").tool_calls


class Answer(BaseModel):
    """An answer."""

    text: str = Field(max_length=5)
    right: bool


class AnswerDict(TypedDict):
    """An answer."""

    text: str
    right: bool


SCHEMAS = {"pydantic": Answer, "typeddict": AnswerDict, "json": Answer.model_json_schema()}


@pytest.mark.parametrize("include_raw", [False, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_structured_output_is_of_the_schema(
    service: ScriptedService, chat: ChatPaged, kind: str, method: Any, include_raw: bool
) -> None:
    def write(prompt: str, params: Any) -> str:
        return '{"text": "yes", "right": true}' if method == "json_mode" else write_sensibly(prompt, params)

    service.writer = write
    structured = chat.with_structured_output(SCHEMAS[kind], method=method, include_raw=include_raw)
    for result in (structured.invoke("say 'yes'"), asyncio.run(structured.ainvoke("say 'yes'"))):
        parsed = result["parsed"] if include_raw else result
        if include_raw:
            assert isinstance(result["raw"], AIMessage)
            assert result["parsing_error"] is None
        assert (
            (parsed == Answer(text="yes", right=True))
            if kind == "pydantic"
            else parsed
            == {
                "text": "yes",
                "right": True,
            }
        )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_of_random_weights_is_of_the_schema_too(chat: ChatPaged, method: Any) -> None:
    structured = chat.with_structured_output(Answer, method=method)
    for seed in range(3):
        assert isinstance(structured.invoke("x", temperature=1.0, seed=seed), Answer)


def test_json_mode_gives_an_object(service: ScriptedService, chat: ChatPaged) -> None:
    assert chat.with_structured_output(None, method="json_mode").invoke("x", max_tokens=2000) == {}


def test_an_answer_cut_short_is_a_parsing_error(service: ScriptedService, chat: ChatPaged) -> None:
    chat = ChatPaged.from_engine(service, max_tokens=5)
    result = chat.with_structured_output(Answer, include_raw=True).invoke("x")
    assert isinstance(result["parsing_error"], OutputParserException)
    assert result["raw"].response_metadata["finish_reason"] == "length"
    with pytest.raises(OutputParserException):
        chat.with_structured_output(Answer).invoke("x")


def test_an_unknown_method_and_a_schema_that_cannot_be_followed_are_refused(chat: ChatPaged) -> None:
    with pytest.raises(ModelInvalidRequestError, match="json_schema, function_calling, json_mode"):
        chat.with_structured_output(Answer, method="yaml")
    with pytest.raises(ModelInvalidRequestError, match="nonsense"):
        chat.bind(response_format={"type": "nonsense"}).invoke("x")
    schema = {"title": "t", "description": "d", "type": "object", "properties": {"a": {"type": "nonsense"}}}
    with pytest.raises(ModelInvalidRequestError, match="nonsense"):
        chat.with_structured_output(schema).invoke("x")


def test_definitions_of_several_tools_do_not_mix(chat: ChatPaged) -> None:
    def tool_of(name: str, item: dict[str, Any]) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {"item": {"$ref": "#/$defs/Item"}},
            "required": ["item"],
            "$defs": {"Item": item},
        }
        return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}

    tools = [tool_of("one", {"enum": ["x"]}), tool_of("two", {"type": "boolean"})]
    for seed in range(4):
        (call,) = chat.bind_tools(tools, tool_choice="any").invoke("x", temperature=1.0, seed=seed).tool_calls
        assert call["args"]["item"] in (["x"] if call["name"] == "one" else [True, False])


def test_an_agents_answer_format_leaves_room_for_calls(service: ScriptedService, chat: ChatPaged) -> None:
    """With tools and a response format the model calls or answers, each in its form."""
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": Answer.model_json_schema()}}
    bound = chat.bind_tools([add], response_format=response_format)
    service.writer = lambda *_: '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    assert [answer.tool_calls[0]["name"] for answer in both(bound)] == ["add", "add"]
    service.writer = lambda *_: '{"text": "yes", "right": true}'
    for answer in both(bound):
        assert json.loads(answer.content) == {"text": "yes", "right": True}
        assert not answer.tool_calls


THINKING = CHAT_TEMPLATE + "{% if false %}<think></think>{% endif %}"
OPEN_THINKING = THINKING + "<think>\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [(THINKING, "<think>\nHm.\n</think>\n\nYes."), (OPEN_THINKING, "Hm.\n</think>\n\nYes.")],
)
def test_reasoning_is_split_from_the_answer(service: ScriptedService, template: str, text: str) -> None:
    service.writer = lambda *_: text
    chat = ChatPaged.from_engine(service, chat_template=template, max_tokens=100)
    for answer in both(chat):
        assert answer.content == "Yes."
        assert answer.additional_kwargs["reasoning_content"].strip() == "Hm."
        assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]
        assert answer.usage_metadata["output_token_details"]["reasoning"] >= 3


def test_reasoning_before_a_call_and_a_forced_call_after_an_open_tag(service: ScriptedService) -> None:
    chat = ChatPaged.from_engine(service, chat_template=OPEN_THINKING, max_tokens=200)
    service.writer = lambda *_: f"Hm.</think>\n{FORMATS['hermes']}"
    for answer in both(chat.bind_tools([add])):
        assert answer.tool_calls
        assert answer.content == ""
    service.writer = write_sensibly
    (call,) = chat.bind_tools([add], tool_choice="any").invoke("go 7").tool_calls
    assert call["args"] == {"a": 7, "b": 7}
    assert "<think>\n</think>\n\n" in service.prompts[-1]


def test_tags_of_ones_own_or_none(service: ScriptedService) -> None:
    service.writer = lambda *_: "[r]Hm.[/r]Yes."
    own = ChatPaged.from_engine(service, reasoning_tags=("[r]", "[/r]"), max_tokens=100)
    assert [answer.content for answer in both(own)] == ["Yes.", "Yes."]
    off = ChatPaged.from_engine(service, chat_template=THINKING, reasoning_tags=None, max_tokens=100)
    assert [answer.content for answer in both(off)] == ["[r]Hm.[/r]Yes."] * 2
