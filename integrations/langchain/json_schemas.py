"""JSON schemas of structured answers, from all that LangChain takes for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import TypeAdapter

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


def _schema_in(source: Mapping[str, Any]) -> dict[str, Any]:
    """A dictionary as it is, or the schema in it if it is a response format or a tool, of whichever provider."""
    source = source.get("json_schema", source)
    source = source.get("function", source.get("toolSpec", source))
    inner = next((source[key] for key in _HOLDERS if isinstance(source.get(key), Mapping)), None)
    if "name" not in source or inner is None:
        return dict(source)
    described = {"description": source["description"]} if "description" in source else {}
    return {"title": source["name"], **described, **inner.get("json", inner)}
