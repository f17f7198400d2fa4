"""The schema of calls of tools."""

from __future__ import annotations

from typing import Any

from paged_backend.integrations.chat.call_schema import call_schema
from paged_backend.integrations.chat.schema_references import references, target

INNER = {"type": "object", "properties": {"x": {"type": "integer"}}}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **parameters}}


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
