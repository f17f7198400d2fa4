"""JSON schemas that outputs are held to: of tool calls, and of structured answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import TypeAdapter

from paged_backend.integrations.langchain.closed_schemas import closed
from paged_backend.integrations.langchain.schema_references import moved

# Where tools and response formats have their schema.
_HOLDERS = ("schema", "parameters", "input_schema", "inputSchema")


def schema_of(source: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class, as pydantic gives it, of a TypedDict or a function, or in a dictionary."""
    if isinstance(source, Mapping):
        return _schema_in(source)
    if isinstance(source, type) and is_basemodel_subclass(source):
        # Classes of pydantic 1 call it otherwise.
        given: Any = source
        own: dict[str, Any] = given.model_json_schema() if hasattr(given, "model_json_schema") else given.schema()
        return own
    try:
        return convert_to_json_schema(source)
    except RecursionError:
        # LangChain does not get to the end of a TypedDict that holds itself.
        return TypeAdapter(source).json_schema()


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


def _schema_in(source: Mapping[str, Any]) -> dict[str, Any]:
    """A dictionary as it is, or the schema in it if it is a response format or a tool, of whichever provider."""
    source = source.get("json_schema", source)
    source = source.get("function", source.get("toolSpec", source))
    inner = next((source[key] for key in _HOLDERS if isinstance(source.get(key), Mapping)), None)
    if "name" not in source or inner is None:
        return dict(source)
    described = {"description": source["description"]} if "description" in source else {}
    return {"title": source["name"], **described, **inner.get("json", inner)}
