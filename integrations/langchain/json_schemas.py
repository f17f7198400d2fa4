"""JSON schemas that outputs are held to: of tool calls, and of structured answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_OF_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")


def closed(schema: Any) -> Any:
    """A copy whose objects allow no properties beyond those they name, unless they say otherwise.

    JSON Schema allows any, which a model would be free to make up.
    """
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {
        key: {name: closed(inner) for name, inner in value.items()} if key in _OF_SCHEMAS else _inner(key, value)
        for key, value in schema.items()
    }
    if copy.get("type") == "object" and "properties" in copy:
        copy.setdefault("additionalProperties", False)
    return copy


def _inner(key: str, value: Any) -> Any:
    # Values that are data and not schemas.
    return value if key in ("const", "default", "enum", "examples", "required") else closed(value)


def call_schema(tools: Sequence[Mapping[str, Any]], answer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Of one call of any of these tools (in OpenAI's form), or of an ``answer`` instead."""
    definitions: dict[str, Any] = {}
    choices = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        call = {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": _with_hoisted(closed(parameters), function["name"], definitions),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        choices.append(call)
    if answer is not None:
        choices.append(_with_hoisted(closed(answer), "answer", definitions))
    schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
    return {**schema, "$defs": definitions} if definitions else schema


def _with_hoisted(schema: dict[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions moved to those of the whole, under names of their own."""
    text = json.dumps(schema)
    for key in _DEFINITIONS:
        text = text.replace(f'"#/{key}/', f'"#/$defs/{prefix}__')
    moved: dict[str, Any] = json.loads(text)
    for key in _DEFINITIONS:
        definitions |= {f"{prefix}__{name}": definition for name, definition in moved.pop(key, {}).items()}
    return moved
