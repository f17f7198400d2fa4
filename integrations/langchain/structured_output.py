"""What with_structured_output puts around a chat model."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from paged_backend.integrations.langchain.answer_parsers import JsonAnswer, JsonCall, PydanticAnswer, PydanticCall
from paged_backend.integrations.langchain.errors import PagedInvalidRequestError
from paged_backend.integrations.langchain.json_schemas import schema_of
from paged_backend.integrations.langchain.tools import openai_tools

METHODS = ("json_schema", "function_calling", "json_mode")


def structured_output(
    model: BaseChatModel, schema: Any, method: str, include_raw: bool, strict: bool | None, kwargs: Mapping[str, Any]
) -> Runnable[Any, Any]:
    """The chain that ``ChatPaged.with_structured_output`` documents."""
    if method not in METHODS:
        raise PagedInvalidRequestError(f"method={method!r} is unknown; choose from {', '.join(METHODS)}")
    if schema is None and method != "json_mode":
        raise PagedInvalidRequestError(f"method={method!r} needs a schema")
    bound, parser = _bound(model, schema, method, strict, kwargs)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    # Not RunnableMap(raw=bound), whose own pool of threads would run a batch few at a time.
    raw = bound | RunnableMap(raw=RunnablePassthrough())
    return raw | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _shown(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema as LangChain can write it down, which takes a type for one text."""
    kinds = schema.get("type")
    if not isinstance(kinds, list):
        return schema
    rest = {key: value for key, value in schema.items() if key != "type"}
    return {**rest, "allOf": [*schema.get("allOf", ()), {"anyOf": [{"type": kind} for kind in kinds]}]}


def _bound(
    model: BaseChatModel, schema: Any, method: str, strict: bool | None, kwargs: Mapping[str, Any]
) -> tuple[Runnable[Any, Any], Any]:
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    own = None if schema is None else schema_of(schema)
    shown = {"kwargs": {"method": method}, "schema": schema if is_class or own is None else _shown(own)}
    if method == "function_calling":
        tools = openai_tools([schema], strict)
        name = tools[0]["function"]["name"]
        call_parser: Any = (
            PydanticCall(tools=[schema], first_tool_only=True)
            if is_class
            else JsonCall(key_name=name, first_tool_only=True)
        )
        return model.bind_tools(tools, tool_choice=name, ls_structured_output_format=shown, **kwargs), call_parser
    parser: Any = PydanticAnswer(pydantic_object=schema) if is_class else JsonAnswer()
    response_format: dict[str, Any] = {"type": "json_object"}
    if method == "json_schema":
        assert own is not None
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": own.get("title", "answer"), "schema": own, "strict": strict},
        }
    return model.bind(response_format=response_format, ls_structured_output_format=shown, **kwargs), parser
