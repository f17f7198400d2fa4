"""ChatRequest: what one call of a chat model comes to, its prompt, what its output is held to, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from langchain_core.messages import BaseMessage

from paged_backend.integrations.langchain.errors import PagedInvalidRequestError
from paged_backend.integrations.langchain.json_schemas import call_schema, closed
from paged_backend.integrations.langchain.messages import knows_tools, template_messages
from paged_backend.integrations.langchain.response_parser import ResponseParser, WholeParser
from paged_backend.integrations.langchain.tool_formats import FORMATS, ToolFormat, format_of_template

if TYPE_CHECKING:
    from paged_backend.integrations.langchain.chat_models import ChatPaged


@dataclass
class ChatRequest:
    """``sampling`` holds the constraint, for ``_submit``."""

    prompt: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    reasoning_tags: tuple[str, str] | None = None
    is_reasoning: bool = False
    tools: ToolFormat | WholeParser | None = None
    max_calls: int | None = None

    def parser(self) -> ResponseParser:
        return ResponseParser(self.reasoning_tags, self.is_reasoning, self.tools, self.max_calls)


def chat_request(
    model: ChatPaged, tokenizer: Any, messages: Sequence[BaseMessage], kwargs: Mapping[str, Any]
) -> ChatRequest:
    """Render the prompt and settle how the answer is constrained and read.

    Raises PagedInvalidRequestError for what the template or the model cannot take.
    """
    tools = list(kwargs.get("tools") or ())
    choice = tool_choice(kwargs.get("tool_choice"), tools)
    if choice == "none":
        tools = []
    template = chat_template(model, tokenizer, with_tools=bool(tools))
    ids, ending = _render(model, tokenizer, template, messages, tools)
    request = ChatRequest(ids, reasoning_tags=_reasoning_tags(model, template))
    request.is_reasoning = request.reasoning_tags is not None and ending.endswith(request.reasoning_tags[0])
    answer = _answer_schema(kwargs.get("response_format"))
    if tools:
        request.tools = _tool_format(model, template)
        request.max_calls = 1 if kwargs.get("parallel_tool_calls") is False else None
    forced = [tool for tool in tools if choice in ("any", tool["function"]["name"])]
    if forced or (answer is not None and not tools):
        request.sampling["json_schema"] = call_schema(forced) if forced else closed(answer)
    elif answer is not None:
        request.sampling["json_schema"] = call_schema(tools, answer)
    if request.sampling:
        # What is constrained from its first token on has no room for marks and reasoning; the prompt ends them.
        if tools:
            request.tools = FORMATS["json"]
        if request.is_reasoning and request.reasoning_tags is not None:
            request.prompt += _encode(tokenizer, f"\n{request.reasoning_tags[1]}\n\n")
        if forced and template and "<tool_call>" in template:
            request.prompt += _encode(tokenizer, "<tool_call>\n")
        request.reasoning_tags, request.is_reasoning = None, False
    return request


def tool_choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """ "auto", "none", "any" or a tool's name, from the ways in which OpenAI and others say it."""
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(value, Mapping):
        value = value.get("function", value).get("name", value.get("type"))
    if value in (None, False, "auto"):
        return "auto"
    if value == "none":
        return "none"
    if value in (True, "any", "required"):
        value = "any"
    elif value not in names:
        raise PagedInvalidRequestError(
            f"tool_choice={value!r} is neither a tool ({', '.join(names) or 'there are none'}) nor auto, any or none"
        )
    if not tools:
        raise PagedInvalidRequestError(f"tool_choice={value!r} needs tools; bind some")
    return str(value)


def chat_template(model: ChatPaged, tokenizer: Any, *, with_tools: bool) -> str:
    """The template in use."""
    template = model.chat_template or tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use" if with_tools else "default") or template.get("default")
    if not template:
        raise PagedInvalidRequestError(
            f"model={model.model!r} has no chat template; pass chat_template=..., or use PagedLLM for plain texts"
        )
    return str(template)


def _render(
    model: ChatPaged, tokenizer: Any, template: str, messages: Sequence[BaseMessage], tools: Sequence[dict[str, Any]]
) -> tuple[list[int], str]:
    """The prompt's ids, and how it ends."""
    from paged_backend import tokenizer_lock

    if not messages:
        raise PagedInvalidRequestError("there are no messages; give at least one")
    conversation = template_messages(messages, tools, template)
    for message in conversation:
        # Templates write roles between control tokens.
        if not re.fullmatch(r"\w+", message["role"]):
            raise PagedInvalidRequestError(f"role={message['role']!r} is no role; use letters, digits and underscores")
    try:
        with tokenizer_lock(tokenizer):
            ids: list[int] = tokenizer.apply_chat_template(
                conversation,
                tools=list(tools) if tools and knows_tools(template) else None,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
                **model.chat_template_kwargs,
            )
            return ids, tokenizer.decode(ids[-16:]).rstrip()
    except (TemplateError, TypeError) as error:
        raise PagedInvalidRequestError(f"the chat template of model={model.model!r} refused: {error}") from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    from paged_backend import tokenizer_lock

    with tokenizer_lock(tokenizer):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _reasoning_tags(model: ChatPaged, template: str) -> tuple[str, str] | None:
    if model.reasoning_tags != "auto":
        return model.reasoning_tags
    return ("<think>", "</think>") if "</think>" in template else None


def _tool_format(model: ChatPaged, template: str) -> ToolFormat | WholeParser:
    parser = model.tool_parser
    if parser is None:
        return format_of_template(template) if knows_tools(template) else FORMATS["hermes"]
    if isinstance(parser, (str, bytes)):
        if parser not in FORMATS:
            raise PagedInvalidRequestError(f"tool_parser={parser!r} is unknown; choose from {', '.join(FORMATS)}")
        return FORMATS[str(parser)]
    return parser


def _answer_schema(response_format: Any) -> Mapping[str, Any] | None:
    """The schema that the answer must have, from OpenAI's ``response_format``."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        schema = response_format.get("json_schema", {}).get("schema")
        if isinstance(schema, Mapping):
            return schema
    raise PagedInvalidRequestError(
        f"response_format={response_format!r:.200} is unknown; give {{'type': 'json_schema', 'json_schema': "
        "{'name': ..., 'schema': ...}}, {'type': 'json_object'} or {'type': 'text'}"
    )
