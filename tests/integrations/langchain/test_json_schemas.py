"""The schema of an answer, from whatever form it is given in."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from paged_backend.integrations.langchain.json_schemas import schema_of

INNER = {"type": "object", "properties": {"x": {"type": "integer"}}}


class Point(BaseModel):
    x: int


class Tree(TypedDict):
    children: list[Tree]


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
