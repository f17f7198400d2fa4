"""References within a schema are found, followed and moved; data that looks like one is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from paged_backend.integrations.chat.schema_references import moved, references, refers_to_itself, target


def test_references_are_found_at_any_depth():
    schema = {"properties": {"a": {"$ref": "#/$defs/A"}}, "anyOf": [{"items": {"$ref": "#"}}]}
    assert references(schema) == ["#/$defs/A", "#"]


def test_data_is_no_reference():
    assert references({"const": {"$ref": "#/a"}, "enum": [{"$ref": "#/b"}], "default": {"$ref": "#/c"}}) == []


def test_a_property_may_be_called_as_a_keyword_of_data():
    assert references({"properties": {"default": {"$ref": "#/$defs/A"}}}) == ["#/$defs/A"]


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("#", {"a/b": {"c~d": 1}, "list": [5, 6], "e f": 2}),
        ("#/a~1b/c~0d", 1),
        ("#/list/1", 6),
        ("#/e%20f", 2),
        ("#/none", None),
        ("#/list/9", None),
        ("#/list/x", None),
        ("#/a~1b/c~0d/deeper", None),
    ],
)
def test_a_reference_leads_to_what_stands_there(reference: str, found: Any):
    assert target({"a/b": {"c~d": 1}, "list": [5, 6], "e f": 2}, reference) == found


def test_a_circle_of_references_is_told_from_a_shared_definition():
    node = {"properties": {"next": {"$ref": "#/$defs/Node"}}}
    assert refers_to_itself({"$ref": "#/$defs/Node", "$defs": {"Node": node}})
    leaf = {"$ref": "#/$defs/Leaf"}
    assert not refers_to_itself({"properties": {"a": leaf, "b": leaf}, "$defs": {"Leaf": {"type": "string"}}})


def test_a_reference_to_the_whole_is_a_circle():
    assert refers_to_itself({"properties": {"child": {"$ref": "#"}}})


def test_a_schema_that_moves_takes_its_references_along():
    schema = {"$id": "x", "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#"}, "c": {"$ref": "other.json"}}}
    properties = moved(schema, "#/anyOf/1")["properties"]
    assert [value["$ref"] for value in properties.values()] == ["#/anyOf/1/$defs/A", "#/anyOf/1", "other.json"]
    assert "$id" not in moved(schema, "#/anyOf/1")
    assert schema["$id"] == "x"
