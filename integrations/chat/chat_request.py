"""ChatRequest: what one call of a chat model comes to, its prompt, what its output is held to, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jinja2 import TemplateError

from paged_backend.errors import RequestRefused
from paged_backend.integrations.chat.call_schema import call_schema
from paged_backend.integrations.chat.conversations import conversations, in_words, knows_tools
from paged_backend.integrations.chat.response_parser import ResponseParser, WholeParser
from paged_backend.integrations.chat.tool_formats import FORMATS, ToolFormat, format_of_template

# What ChatSettings say and a call may say otherwise.
# What stands around reasoning in templates: most models' way, and Mistral's.
REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
SETTINGS = ("chat_template", "chat_template_kwargs", "tool_parser", "reasoning_tags")
# Arguments of apply_chat_template that are settled here.
_NO_VARIABLES = frozenset(
    {"conversation", "tools", "chat_template", "tokenize", "return_dict", "sanitize_control_tokens", "return_tensors"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}
)


class ChatSettings(Protocol):
    """What is the same for all calls of a model, by whose name errors call it."""

    model: Any
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    tool_parser: Any
    reasoning_tags: Any


@dataclass
class ChatRequest:
    """prompt: token ids. sampling: fields of SamplingParams that the output needs. The rest is for ``parser``."""

    prompt: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    reasoning_tags: tuple[str, str] | None = None
    is_reasoning: bool = False
    tools: ToolFormat | WholeParser | None = None
    tool_names: tuple[str, ...] = ()
    max_calls: int | None = None
    is_forced: bool = False

    def parser(self) -> ResponseParser:
        return ResponseParser(
            self.reasoning_tags, self.is_reasoning, self.tools, self.tool_names, self.max_calls, self.is_forced
        )


def chat_request(
    chat: ChatSettings, tokenizer: Any, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
) -> ChatRequest:
    """Render the prompt and settle how the answer is constrained and read.

    messages: as ``conversations`` takes them. kwargs: those of SETTINGS that differ, and OpenAI's ``tools``,
    ``tool_choice``, ``parallel_tool_calls`` and ``response_format``. Raises RequestRefused for what the template or
    the model cannot take.
    """
    settings = {name: kwargs.get(name, getattr(chat, name)) for name in SETTINGS}
    variables = {**chat.chat_template_kwargs, **(kwargs.get("chat_template_kwargs") or {})}
    tools = list(kwargs.get("tools") or ())
    choice = tool_choice(kwargs.get("tool_choice"), tools)
    if choice == "none":
        tools = []
    template = _chat_template(chat, settings["chat_template"], tokenizer, with_tools=bool(tools))
    ids, ending = _render(chat, tokenizer, template, variables, messages, tools)
    request = ChatRequest(ids, reasoning_tags=_reasoning_tags(settings["reasoning_tags"], template))
    if request.reasoning_tags is not None:
        begin, end = request.reasoning_tags
        continues = bool(variables.get("continue_final_message"))
        request.is_reasoning = ending.rfind(begin) > ending.rfind(end) if continues else ending.endswith(begin)
    answer = _answer_schema(kwargs.get("response_format"))
    if tools:
        request.tools = _tool_format(settings["tool_parser"], template)
        request.tool_names = tuple(tool["function"]["name"] for tool in tools)
        request.max_calls = 1 if kwargs.get("parallel_tool_calls") is False else None
    forced = [tool for tool in tools if choice in ("any", tool["function"]["name"])]
    if forced:
        request.sampling["json_schema"], request.is_forced = call_schema(forced), True
    elif answer is not None:
        request.sampling["json_schema"] = call_schema(tools, answer)
    if request.sampling:
        # What is constrained from its first token on has no room for marks and reasoning; the prompt ends them.
        if tools:
            request.tools = FORMATS["json"]
        if request.is_reasoning and request.reasoning_tags is not None:
            request.prompt += _encode(tokenizer, f"\n{request.reasoning_tags[1]}\n\n")
        if forced and "<tool_call>" in template:
            request.prompt += _encode(tokenizer, "<tool_call>\n")
        request.reasoning_tags, request.is_reasoning = None, False
    marks = (*(request.reasoning_tags or ()), *_marks(request.tools, tokenizer))
    if marks:
        # Many models write them as special tokens.
        request.sampling["shown_special_tokens"] = marks
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
        raise RequestRefused(
            f"tool_choice={value!r} is neither a tool ({', '.join(names) or 'there are none'}) nor auto, any or none"
        )
    if not tools:
        raise RequestRefused(f"tool_choice={value!r} needs tools; bind some")
    return str(value)


def _chat_template(chat: ChatSettings, given: str | None, tokenizer: Any, *, with_tools: bool) -> str:
    """The template in use."""
    template = given or tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use" if with_tools else "default") or template.get("default")
    if not template:
        raise RequestRefused(
            f"model={chat.model!r} has no chat template; pass chat_template=...; plain texts need none"
        )
    return str(template)


def _render(
    chat: ChatSettings,
    tokenizer: Any,
    template: str,
    variables: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]],
) -> tuple[list[int], str]:
    """The prompt's ids, and how it ends."""
    from paged_backend import tokenizer_lock

    _check_messages(messages, variables)
    shown_tools = list(tools) if tools and knows_tools(template) else None
    continues = bool(variables.get("continue_final_message"))
    options = {"add_generation_prompt": not continues, **variables, "chat_template": template, "tools": shown_tools}
    refusal: Exception | None = None
    for conversation in conversations(messages, tools, template):
        try:
            with tokenizer_lock(tokenizer):
                if tools and not shown_tools and not _shows(tokenizer, conversation, tools, options):
                    continue
                ids: list[int] = tokenizer.apply_chat_template(
                    conversation, tokenize=True, return_dict=False, sanitize_control_tokens=True, **options
                )
                return ids, tokenizer.decode(ids if continues else ids[-16:]).rstrip()
        except (TemplateError, TypeError, ValueError) as error:
            refusal = refusal or error
    problem = refusal or "it leaves out what it is to say of tools"
    raise RequestRefused(f"the chat template of model={chat.model!r} refused: {problem}") from refusal


def _check_messages(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
    if not messages:
        raise RequestRefused("there are no messages; give at least one")
    for message in messages:
        # Templates write roles between control tokens.
        if not re.fullmatch(r"\w+", message["role"]):
            raise RequestRefused(f"role={message['role']!r:.200} is no role; use letters, digits and underscores")
    for name in variables.keys() & _NO_VARIABLES:
        raise RequestRefused(f"chat_template_kwargs holds {name!r}, which is no variable of a template")
    if variables.get("continue_final_message") and messages[-1]["role"] != "assistant":
        raise RequestRefused(
            "continue_final_message goes on with a message of the assistant, but the last one has the role "
            f"{messages[-1]['role']!r}; end the messages with the beginning of the answer"
        )


def _shows(
    tokenizer: Any, conversation: list[dict[str, Any]], tools: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> bool:
    """Whether the template leaves in what the conversation says of the tools; some drop the system message."""
    text: str = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    return all(in_words(tool) in text for tool in tools)


def _encode(tokenizer: Any, text: str) -> list[int]:
    from paged_backend import tokenizer_lock

    with tokenizer_lock(tokenizer):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _reasoning_tags(tags: tuple[str, str] | str | None, template: str) -> tuple[str, str] | None:
    if tags is None or isinstance(tags, tuple):
        return tags
    return next((pair for pair in REASONING_TAGS if pair[1] in template), None)


def _tool_format(parser: Any, template: str) -> ToolFormat | WholeParser:
    if parser is None:
        return format_of_template(template) if knows_tools(template) else FORMATS["hermes"]
    if isinstance(parser, (str, bytes)):
        if parser not in FORMATS:
            raise RequestRefused(f"tool_parser={parser!r} is unknown; choose from {', '.join(FORMATS)}")
        return FORMATS[str(parser)]
    return parser


def _marks(tools: ToolFormat | WholeParser | None, tokenizer: Any) -> tuple[str, ...]:
    """What the output may hold for its reader; nobody knows what a parser of the user's looks for."""
    if tools is None:
        return ()
    return tools.marks if isinstance(tools, ToolFormat) else tuple(tokenizer.get_added_vocab())


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
    raise RequestRefused(
        f"response_format={response_format!r:.200} is unknown; give {{'type': 'json_schema', 'json_schema': "
        "{'name': ..., 'schema': ...}}, {'type': 'json_object'} or {'type': 'text'}"
    )
