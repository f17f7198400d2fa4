"""Tools in OpenAI's form, from all that LangChain takes for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from paged_backend.integrations.chat.schema_references import refers_to_itself, target
from paged_backend.integrations.langchain.errors import PagedInvalidRequestError
from paged_backend.integrations.langchain.json_schemas import schema_of

_NOT_OF_PARAMETERS = ("name", "title", "description", "strict")
_TYPES_OF_SCHEMAS = ("object", "array", "string", "number", "integer", "boolean", "null")


def openai_tools(tools: Sequence[Any] | None, strict: bool | None = None) -> list[dict[str, Any]]:
    """``{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`` for each.

    Raises PagedInvalidRequestError for what is no tool, or one that only its provider's service can run.
    """
    return [_openai_tool(tool, strict) for tool in tools or ()]


def _openai_tool(tool: Any, strict: bool | None) -> dict[str, Any]:
    try:
        converted = convert_to_openai_tool(_known_form(tool) if isinstance(tool, Mapping) else tool, strict=strict)
        own = _own_parameters(tool)
    except RecursionError:
        converted, own = {"function": {"name": tool.__name__}}, schema_of(tool)
    except (ValueError, TypeError, LookupError) as error:
        raise PagedInvalidRequestError(f"{tool!r:.200} cannot be a tool: {error}") from error
    function = converted.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PagedInvalidRequestError(f"{tool!r:.200} cannot be a tool: it needs a name")
    if own is not None and refers_to_itself(own):
        # LangChain writes out what is referred to, and nothing where that would have no end.
        function = {**function, "parameters": _without_reference(own)}
    parameters = function.get("parameters") or {}
    if parameters.get("type", "object") != "object" or not {"enum", "const"}.isdisjoint(parameters):
        raise PagedInvalidRequestError(
            f"the arguments of tool {function['name']!r} must be an object, got {parameters!r:.200}; give it "
            "properties, or take with_structured_output(method='json_schema') for an answer of another type"
        )
    return {"type": "function", "function": dict(function)}


def _known_form(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A dictionary in a form of which LangChain keeps everything."""
    kind = tool.get("type", "function")
    # A schema may allow several types.
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind not in ("function", *_TYPES_OF_SCHEMAS) and "input_schema" not in tool:
        raise ValueError(
            f"what is of type {kind!r} is run by the service of its provider, and there is none here; give a function, "
            "a BaseTool, a pydantic class or {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
        )
    name = tool.get("name", tool.get("title"))
    if name is not None and tool.keys().isdisjoint(("parameters", "input_schema", "toolSpec", "function")):
        parameters = {key: value for key, value in tool.items() if key not in _NOT_OF_PARAMETERS}
        described = {key: tool[key] for key in ("description", "strict") if key in tool}
        return {"name": name, **described, "parameters": parameters}
    return dict(tool) if "function" in tool else {key: value for key, value in tool.items() if key != "type"}


def _own_parameters(tool: Any) -> dict[str, Any] | None:
    """The schema that pydantic gives for the arguments, where LangChain asks it for one."""
    if isinstance(tool, BaseTool):
        return schema_of(tool.tool_call_schema)
    if isinstance(tool, type):
        return schema_of(tool) if is_basemodel_subclass(tool) else None
    if isinstance(tool, Mapping):
        return None
    model = create_schema_from_function(
        tool.__name__,
        tool,
        filter_args=(),
        parse_docstring=True,
        error_on_invalid_docstring=False,
        include_injected=False,
    )
    return schema_of(model)


def _without_reference(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that shows its properties, which many templates list."""
    root = {**target(schema, schema["$ref"]), **schema} if "$ref" in schema else schema
    return {key: value for key, value in root.items() if key not in ("$ref", "title", "description")}
