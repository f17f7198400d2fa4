"""What closing a schema adds to it, and that it never takes away what the schema names."""

from __future__ import annotations

from typing import Any

import pytest

from paged_backend.integrations.chat.closed_schemas import closed

E = {"enum": ["p", "q"]}
SHUT = {"additionalProperties": False}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def needs(name: str, **properties: Any) -> dict[str, Any]:
    return {**of(**properties), "required": [name]}


# Each with what closing makes of it.
CLOSED = {
    "an object": (of(a=E), {**of(a=E), **SHUT}),
    "an object without properties": (of(), {**of(), **SHUT}),
    "objects in objects, lists and mappings": (
        of(a=of(b=E), c={"items": of(d=E)}, e={"additionalProperties": of(f=E)}, g={"prefixItems": [of(h=E)]}),
        {
            **of(
                a={**of(b=E), **SHUT},
                c={"items": {**of(d=E), **SHUT}},
                e={"additionalProperties": {**of(f=E), **SHUT}},
                g={"prefixItems": [{**of(h=E), **SHUT}]},
            ),
            **SHUT,
        },
    ),
    "choices": ({"anyOf": [of(a=E), {"type": "null"}]}, {"anyOf": [{**of(a=E), **SHUT}, {"type": "null"}]}),
    "definitions": (
        {"$ref": "#/$defs/A", "$defs": {"A": of(a={"$ref": "#/$defs/A"})}},
        {"$ref": "#/$defs/A", "$defs": {"A": {**of(a={"$ref": "#/$defs/A"}), **SHUT}}},
    ),
    "required names": (needs("z", a=E), {**needs("z", a=E, z=True), **SHUT}),
    "allOf": (
        {**of(y=E), "allOf": [needs("x", x=E)]},
        {**of(y=E, x=True), "allOf": [needs("x", x=E)], **SHUT},
    ),
    "allOf alone": (
        {"allOf": [of(x=of(a=E)), of(x=of(b=E), y=E)]},
        {"allOf": [of(x=of(a=E)), of(x=of(b=E), y=E)], "properties": {"x": True, "y": True}, **SHUT},
    ),
    "anyOf beside properties": (
        {**of(a=E, n=of(z=E)), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {
            **of(a=E, n={**of(z=E), **SHUT}, b=True),
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            **SHUT,
        },
    ),
    "a reference beside properties, to what is also alone elsewhere": (
        {
            **of(b={"$ref": "#/$defs/A", **of(more=E)}, c={"$ref": "#/$defs/A"}),
            "$defs": {"A": of(x={"$ref": "#/$defs/B"}), "B": of(y=E)},
        },
        {
            **of(b={"$ref": "#/$defs/A", **of(more=E, x=True), **SHUT}, c={"$ref": "#/$defs/A"}),
            "$defs": {"A": of(x={"$ref": "#/$defs/B"}), "B": of(y=E)},
            **SHUT,
        },
    ),
    "choices of which only one may hold": (
        {"oneOf": [needs("a", a=E), needs("b", b=E), {"type": "null"}]},
        {"oneOf": [{**needs("a", a=E), **SHUT}, {**needs("b", b=E), **SHUT}, {"type": "null"}]},
    ),
    "choices told apart by a value": (
        {"oneOf": [needs("t", t={"const": 1}, a=E), needs("t", t={"const": 2}, a=E)]},
        {"oneOf": [{**needs("t", t={"const": 1}, a=E), **SHUT}, {**needs("t", t={"const": 2}, a=E), **SHUT}]},
    ),
    "patterns": (
        {**of(a=of(b=E)), "patternProperties": {"^a": of(c=E)}},
        {**of(a=of(b=E)), "patternProperties": {"^a": of(c=E)}, **SHUT},
    ),
    "names that are keywords": (
        {"properties": {"properties": of(default=of(a=E)), "$ref": {"type": "string"}}},
        {"properties": {"properties": {**of(default={**of(a=E), **SHUT}), **SHUT}, "$ref": {"type": "string"}}, **SHUT},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CLOSED)
def test_objects_allow_what_their_descriptions_name(case: str) -> None:
    schema, expected = CLOSED[case]
    assert closed(schema) == expected


UNCHANGED = {
    "any object": {"type": "object"},
    "an object that says what else": {**of(a=E), "additionalProperties": True},
    "an object of at least so many": {**of(a=E), "minProperties": 3},
    "an object part of which says what else": {**of(a=E), "allOf": [{**of(b=E), "additionalProperties": E}]},
    "no object": {"type": "array", "items": E},
    "data": {"const": of(a=E), "default": of(a=E), "enum": [of(a=E)]},
    "itself": {"$ref": "#", "minLength": 1},
    "nothing": {},
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_what_cannot_be_closed_stays_as_it_is(case: str) -> None:
    assert closed(UNCHANGED[case]) == UNCHANGED[case]


def test_choices_that_overlap_stay_open() -> None:
    """Closed, the first would no longer allow what the second allows, and oneOf both together less than before."""
    schema = {"oneOf": [needs("a", a=E), needs("a", a=E, b=E)]}
    assert closed(schema)["oneOf"] == schema["oneOf"]


def test_the_schema_given_is_not_changed() -> None:
    schema = {**of(a=of(b=E)), "$defs": {"A": of(c=E)}}
    before = repr(schema)
    closed(schema)
    assert repr(schema) == before
