"""Structured output: which schemas it follows, and that nothing that was cut short passes as whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
from langchain_core.exceptions import ModelAPIError, ModelInvalidRequestError, OutputParserException
from pydantic import BaseModel, Field, RootModel
from scripted_engine import ScriptedService
from typing_extensions import TypedDict

from paged_backend.integrations.langchain import ChatPaged

METHODS = ("json_schema", "function_calling", "json_mode")


class Wine(BaseModel):
    """A wine."""

    colour: str
    sweet: bool = False


class WineDict(TypedDict):
    """A wine."""

    colour: str
    sweet: bool


SCHEMAS = {"pydantic": Wine, "typeddict": WineDict, "json": Wine.model_json_schema()}


@pytest.fixture
def chat(service: ScriptedService) -> ChatPaged:
    return ChatPaged.from_engine(service, model="tiny", max_tokens=300)


def is_red(prompt: str, params: Any) -> str:
    answer = {"colour": "red", "sweet": True}
    is_call = "name" in params.json_schema.get("properties", ())
    return json.dumps({"name": "Wine" if "Wine" in prompt else "WineDict", "arguments": answer} if is_call else answer)


# Structured output that was cut short


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", SCHEMAS)
def test_an_answer_cut_by_its_length_is_an_error_that_says_so(
    service: ScriptedService, chat: ChatPaged, kind: str, method: Any
) -> None:
    service.writer = lambda prompt, params: is_red(f"{kind == 'typeddict' or 'Wine '}", params)
    whole = chat.with_structured_output(SCHEMAS[kind], method=method)
    expected = whole.invoke("x")
    assert dict(expected) == {"colour": "red", "sweet": True}
    length = chat.with_structured_output(SCHEMAS[kind], method=method, include_raw=True).invoke("x")["raw"]
    num_tokens = length.usage_metadata["output_tokens"]
    # All but the end-of-sequence token: nothing is missing.
    assert whole.invoke("x", max_tokens=num_tokens - 1) == expected
    for max_tokens in (1, 14, num_tokens - 2):
        with pytest.raises(OutputParserException, match="length"):
            whole.invoke("x", max_tokens=max_tokens)
    raw = chat.with_structured_output(SCHEMAS[kind], method=method, include_raw=True)
    for result in (raw.invoke("x", max_tokens=14), asyncio.run(raw.ainvoke("x", max_tokens=14))):
        assert isinstance(result["parsing_error"], OutputParserException)
        assert result["parsed"] is None
        assert result["raw"].tool_calls == []
        assert result["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_that_is_cut_ends_with_the_error(service: ScriptedService, chat: ChatPaged, method: Any) -> None:
    service.writer = lambda prompt, params: is_red("Wine", params)
    structured = chat.with_structured_output(SCHEMAS["json"], method=method)
    assert list(structured.stream("x"))[-1] == {"colour": "red", "sweet": True}
    pieces = []
    with pytest.raises(OutputParserException, match="length"):
        pieces.extend(structured.stream("x", max_tokens=20))
    # A call comes when it is whole, an answer piece by piece.
    assert pieces[-1:] == ([] if method == "function_calling" else [{"colour": "red"}])


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_cut_by_a_stop_text_is_an_error_too(service: ScriptedService, chat: ChatPaged, method: Any) -> None:
    service.writer = lambda prompt, params: is_red("Wine", params)
    with pytest.raises(OutputParserException, match="stop"):
        chat.with_structured_output(SCHEMAS["json"], method=method).invoke("x", stop=["sweet"])


def test_a_number_that_reached_the_length_may_lack_digits(service: ScriptedService, chat: ChatPaged) -> None:
    structured = chat.with_structured_output({"title": "Year", "type": "integer"})
    service.writer = lambda *_: "1789"
    assert structured.invoke("x") == 1789
    with pytest.raises(OutputParserException, match="length"):
        structured.invoke("x", max_tokens=4)


# Schemas that are followed


class Node(BaseModel):
    """A tree."""

    value: Literal[1]
    children: list[Node] = Field(max_length=1)


class Holder(BaseModel):
    """Two trees."""

    first: Node
    other: Holder | None


class NodeDict(TypedDict):
    """A tree."""

    value: Literal[1]
    children: list[NodeDict]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Literal[9]


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: Literal[0, 1]


class Pet(BaseModel):
    """A pet."""

    animal: Cat | Dog = Field(discriminator="kind")


E = {"enum": ["p", "q"]}
A, B = ({"type": "object", "properties": {name: E}, "required": [name]} for name in "ab")
FOLLOWED: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "enum": ({"enum": ["red", "blue"]}, lambda value: value in ("red", "blue")),
    "const": ({"const": {"a": [1, None]}}, lambda value: value == {"a": [1, None]}),
    "array": ({"type": "array", "items": E, "minItems": 2, "maxItems": 2}, lambda value: len(value) == 2),
    "string": ({"type": "string", "maxLength": 3}, lambda value: isinstance(value, str)),
    "boolean": ({"type": "boolean"}, lambda value: isinstance(value, bool)),
    "null": ({"type": "null"}, lambda value: value is None),
    "several types": ({**A, "type": ["object", "null"]}, lambda value: value is None or set(value) == {"a"}),
    "oneOf several types": (
        {"oneOf": [{"type": ["integer", "null"], "maximum": 9}, A]},
        lambda value: value is None or value in range(-(10**9), 10) or set(value) == {"a"},
    ),
    "anyOf": ({"anyOf": [A, {"enum": [7]}]}, lambda value: value == 7 or set(value) == {"a"}),
    "oneOf": ({"oneOf": [A, B]}, lambda value: set(value) in ({"a"}, {"b"})),
    "allOf": ({"allOf": [A, B]}, lambda value: set(value) == {"a", "b"}),
    "allOf and properties": ({**A, "allOf": [B]}, lambda value: set(value) == {"a", "b"}),
    "anyOf and properties": ({**A, "anyOf": [B, {"required": ["a"]}]}, lambda value: {"a"} <= set(value) <= {"a", "b"}),
    "$ref": ({"$ref": "#/$defs/x~1y", "$defs": {"x/y": A}}, lambda value: set(value) == {"a"}),
    "$ref and properties": (
        {**A, "$ref": "#/definitions/B", "definitions": {"B": B}},
        lambda value: set(value) == {"a", "b"},
    ),
    "$ref to a property": (
        {"type": "object", "properties": {"a": E, "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]},
        lambda value: set(value.values()) <= {"p", "q"},
    ),
}


@pytest.mark.parametrize("keyword", FOLLOWED)
def test_a_schema_is_followed_as_it_is_given(chat: ChatPaged, keyword: str) -> None:
    schema, holds = FOLLOWED[keyword]
    for titled in (schema, {"title": "Answer", "description": "An answer.", **schema}):
        bound = chat.with_structured_output(titled)
        assert bound.first.kwargs["response_format"]["json_schema"]["schema"] == titled
        # Random weights, so that nothing but the schema makes it come out right.
        assert holds(bound.invoke("x", temperature=1.0, seed=3))


OBJECTS = ("anyOf and properties", "oneOf", "allOf", "allOf and properties", "$ref", "$ref and properties")


@pytest.mark.parametrize("keyword", [*OBJECTS, "$ref to a property"])
@pytest.mark.parametrize("is_only", [True, False])
def test_a_forced_call_follows_the_same_schemas(chat: ChatPaged, keyword: str, is_only: bool) -> None:
    schema, holds = FOLLOWED[keyword]
    # A name that a JSON pointer would have to escape.
    function = {"name": "repo/~make", "description": "d", "parameters": {"$id": "https://example.org/x", **schema}}
    other = {"title": "other", "description": "d", **A}
    tools = (
        [{"type": "function", "function": function}] if is_only else [other, {"type": "function", "function": function}]
    )
    seeds = range(1 if is_only else 4)
    calls = [
        chat.bind_tools(tools, tool_choice="any").invoke("x", temperature=1.0, seed=seed).tool_calls[0]
        for seed in seeds
    ]
    made = [call["args"] for call in calls if call["name"] == "repo/~make"]
    assert made
    assert all(map(holds, made))


def test_function_calling_follows_choices_of_objects(chat: ChatPaged) -> None:
    for keyword in OBJECTS:
        schema, holds = FOLLOWED[keyword]
        titled = {"title": "T", "description": "d", **schema}
        assert holds(
            chat.with_structured_output(titled, method="function_calling").invoke("x", temperature=1.0, seed=1)
        )


@pytest.mark.parametrize("keyword", ["enum", "array", "boolean"])
def test_function_calling_refuses_what_are_no_arguments(chat: ChatPaged, keyword: str) -> None:
    schema = {"title": "T", "description": "d", **FOLLOWED[keyword][0]}
    with pytest.raises(ModelInvalidRequestError, match=r"must be an object.*method='json_schema'"):
        chat.with_structured_output(schema, method="function_calling")


TREE = {"value": 1, "children": [{"value": 1, "children": []}]}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (Node, TREE),
        (Holder, {"first": TREE, "other": {"first": TREE, "other": None}}),
        (NodeDict, TREE),
        (Pet, {"animal": {"kind": "dog", "tricks": 1}}),
    ],
)
def test_classes_that_hold_themselves_or_one_of_several_are_followed_all_the_way(
    service: ScriptedService, chat: ChatPaged, schema: Any, answer: Any, method: Any
) -> None:
    name = schema.__name__
    structured = chat.with_structured_output(schema, method=method)

    def written(value: Any) -> str:
        return json.dumps(value if method == "json_schema" else {"name": name, "arguments": value})

    service.writer = lambda *_: written(answer)
    parsed = structured.invoke("x")
    assert (parsed if isinstance(parsed, dict) else parsed.model_dump()) == answer
    # A constraint that held for the outermost level only would let this pass.
    wrong = json.loads(json.dumps(answer).replace("[]", "[5]").replace('"tricks": 1', '"tricks": 7'))
    service.writer = lambda *_: written(wrong)
    with pytest.raises(ModelAPIError):
        structured.invoke("x")


def test_pydantics_own_schema_is_sent(chat: ChatPaged) -> None:
    for schema in (Node, Holder, Pet, RootModel[list[int]]):
        sent = chat.with_structured_output(schema).first.kwargs["response_format"]["json_schema"]["schema"]
        assert sent == schema.model_json_schema()


def test_an_answer_that_is_no_object_is_one_of_its_class(service: ScriptedService, chat: ChatPaged) -> None:
    service.writer = lambda *_: "[1, 2]"
    assert chat.with_structured_output(RootModel[list[int]]).invoke("x").root == [1, 2]


@pytest.mark.parametrize(
    "form",
    [
        {"name": "P", "schema": A, "strict": True},
        {"type": "json_schema", "json_schema": {"name": "P", "schema": A}},
        {"type": "function", "function": {"name": "P", "parameters": A}},
        {"name": "P", "description": "d", "input_schema": A},
        {"toolSpec": {"name": "P", "inputSchema": {"json": A}}},
    ],
)
def test_a_schema_in_the_form_of_a_provider_is_found(chat: ChatPaged, form: dict[str, Any]) -> None:
    assert set(chat.with_structured_output(form).invoke("x")) == {"a"}
