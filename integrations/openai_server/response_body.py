"""The body of ``/v1/responses``, and the chat that it comes to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from paged_backend.integrations.openai_server.api_error import ApiError
from paged_backend.integrations.openai_server.bodies import MAX_TOOLS, MAX_TOP_LOGPROBS, Body, ChatBody, Count, Name

# Fields that mean the same for a chat.
_SAME = (
    *("model", "temperature", "top_p", "stream", "top_logprobs", "parallel_tool_calls"),
    *("priority", "deadline_s", "timeout_s", "queue_timeout_s", "client_id", "cache_salt"),
)


class Item(Body):
    """A part of the input. Clients send outputs back with fields of all kinds, which are passed over."""

    model_config = ConfigDict(extra="ignore")


class Text(Item):
    """Words of anybody."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Item):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Text]


class FunctionCallItem(Item):
    """A call of the assistant's."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Item):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Text]


class ReasoningItem(Item):
    """Thoughts of an earlier answer, which templates leave out."""

    type: Literal["reasoning"]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """A call of this function, and of no other."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    """How an answer is written; ``verbosity`` changes nothing here."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningSettings(Body):
    """``effort`` is a variable of the template; thoughts are told as they are, and not summarised."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseBody(Body):
    """Of ``/v1/responses``; nothing is kept, so that each holds the whole conversation."""

    model: str = Field(max_length=4096)
    input: (
        str | Annotated[list[InputMessage | FunctionCallItem | FunctionCallOutput | ReasoningItem], Field(min_length=1)]
    )
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # Options of the request.
    priority: Annotated[int, Field(ge=-(2**63) + 1, le=2**63 - 1)] | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    queue_timeout_s: Annotated[float, Field(gt=0)] | None = None
    client_id: Name | None = None
    cache_salt: Name | None = None

    # Of OpenAI's service: what nobody keeps can be neither stored nor gone on with.
    store: bool | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def chat_of(body: ResponseBody) -> ChatBody:
    """The same as a chat; raises ApiError for an input without a message."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _messages(body.input)
    if all(message["role"] == "system" for message in messages):
        raise ApiError(400, "input holds no message; give a text or a list of items with one", param="input")
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    wants_logprobs = "message.output_text.logprobs" in (body.include or ())
    fields |= {"messages": messages, "max_tokens": body.max_output_tokens, "logprobs": wants_logprobs}
    if not wants_logprobs:
        fields["top_logprobs"] = None
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    choice = body.tool_choice
    fields["tool_choice"] = (
        {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice
    )
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    form = body.text.format if body.text is not None else None
    if form is not None:
        fields["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.json_schema is None:
                raise ApiError(400, "text.format of type json_schema needs a schema", param="text")
            fields["response_format"]["json_schema"] = {"name": form.name, "schema": form.json_schema}
    return ChatBody(**fields)


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case InputMessage():
                messages.append({"role": item.role, "content": _words(item.content)})
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                # What the assistant said before its calls, and all of these, are one message.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _words(item.output)})
    return messages


def _words(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
