"""The schema of an answer, from whatever form it is given in, and of calls of tools."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from paged_backend.integrations.langchain.json_schemas import call_schema, schema_of
from paged_backend.integrations.langchain.schema_references import references, target

INNER = {"type": "object", "properties": {"x": {"type": "integer"}}}


class Point(BaseModel):
    x: int


class Tree(TypedDict):
    children: list[Tree]


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **parameters}}


def test_a_pydantic_class_gives_its_own_schema():
    assert schema_of(Point) == Point.model_json_schema()


@pytest.mark.parametrize(
    "source",
    [
        {"name": "f", "schema": INNER},
        {"name": "f", "parameters": INNER},
        {"name": "f", "input_schema": INNER},
        {"type": "json_schema", "json_schema": {"name": "f", "schema": INNER}},
        {"type": "function", "function": {"name": "f", "parameters": INNER}},
        {"toolSpec": {"name": "f", "inputSchema": {"json": INNER}}},
    ],
)
def test_a_response_format_or_tool_of_any_provider_holds_its_schema(source: dict[str, Any]):
    assert schema_of(source) == {"title": "f", **INNER}


def test_a_plain_schema_stays_as_it_is():
    schema = {"title": "Point", **INNER}
    assert schema_of(schema) == schema


def test_a_typed_dict_that_holds_itself_has_a_schema():
    schema = schema_of(Tree)
    assert schema["$defs"]["Tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}


def test_a_call_names_its_tool_and_has_its_arguments():
    schema = call_schema([tool("f", parameters=INNER)])
    assert schema["properties"]["name"] == {"const": "f"}
    assert schema["properties"]["arguments"]["properties"] == {"x": {"type": "integer"}}
    assert (schema["required"], schema["additionalProperties"]) == (["name", "arguments"], False)


def test_a_tool_without_parameters_takes_no_arguments():
    arguments = call_schema([tool("f")])["properties"]["arguments"]
    assert (arguments["properties"], arguments["additionalProperties"]) == ({}, False)


def test_several_tools_or_an_answer_are_a_choice_of_one():
    choices = call_schema([tool("f", parameters=INNER), tool("g")], {"properties": {"y": {}}})["anyOf"]
    assert [choice["properties"]["name"] for choice in choices[:2]] == [{"const": "f"}, {"const": "g"}]
    assert list(choices[2]["properties"]) == ["y"]


def test_references_of_arguments_lead_to_where_their_definitions_then_stand():
    parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "string"}}}
    for tools in ([tool("f", parameters=parameters)], [tool("g"), tool("f", parameters=parameters)]):
        schema = call_schema(tools)
        (reference,) = references(schema)
        assert target(schema, reference) == {"type": "string"}
