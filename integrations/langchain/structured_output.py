"""What with_structured_output puts around a chat model."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from paged_backend.integrations.langchain.errors import PagedInvalidRequestError

if TYPE_CHECKING:
    from paged_backend.integrations.langchain.chat_models import ChatPaged

METHODS = ("json_schema", "function_calling", "json_mode")


def structured_output(
    model: ChatPaged, schema: Any, method: str, include_raw: bool, strict: bool | None, kwargs: Mapping[str, Any]
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


def _bound(
    model: ChatPaged, schema: Any, method: str, strict: bool | None, kwargs: Mapping[str, Any]
) -> tuple[Runnable[Any, Any], Any]:
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    shown = {"kwargs": {"method": method}, "schema": schema}
    if method == "function_calling":
        tool = convert_to_openai_tool(schema, strict=strict)
        name = tool["function"]["name"]
        tools_parser: Any = (
            PydanticToolsParser(tools=[schema], first_tool_only=True)
            if is_class
            else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        )
        bound = model.bind_tools([schema], tool_choice=name, strict=strict, ls_structured_output_format=shown, **kwargs)
        return bound, tools_parser
    parser: Any = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    response_format: dict[str, Any] = {"type": "json_object"}
    if method == "json_schema":
        converted = convert_to_json_schema(schema)
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": converted.get("title", "answer"), "schema": converted, "strict": strict},
        }
    return model.bind(response_format=response_format, ls_structured_output_format=shown, **kwargs), parser
