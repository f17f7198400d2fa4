"""The JSON schema that a tool call is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.integrations.chat.closed_schemas import closed
from paged_backend.integrations.chat.schema_references import moved


def call_schema(tools: Sequence[Mapping[str, Any]], answer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Of one call of any of these tools (in OpenAI's form), or of an ``answer`` instead."""
    is_choice = len(tools) + (answer is not None) > 1
    places = [f"#/anyOf/{number}" if is_choice else "#" for number in range(len(tools) + 1)]
    choices = []
    for place, tool in zip(places, tools, strict=False):
        function = tool["function"]
        parameters = closed(function.get("parameters") or {"type": "object", "properties": {}})
        call = {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": moved(parameters, f"{place}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        choices.append(call)
    if answer is not None:
        choices.append(moved(closed(answer), places[-1]))
    return {"anyOf": choices} if is_choice else choices[0]
