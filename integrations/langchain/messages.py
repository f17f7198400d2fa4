"""LangChain's messages as the dictionaries that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from paged_backend.integrations.chat.conversations import tool_response
from paged_backend.integrations.langchain.errors import PagedInvalidRequestError

# Blocks of an answer that its text or its tool_calls hold already, or that templates leave out.
_SKIPPED_OF_ANSWERS = frozenset(
    {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "thinking", "redacted_thinking"}
)


def template_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """What ``conversations`` takes; raises PagedInvalidRequestError for messages of other kinds than text."""
    return [_message(message) for message in messages]


def _message(message: BaseMessage) -> dict[str, Any]:
    content = _text(message)
    named = {"name": message.name} if message.name else {}
    if isinstance(message, SystemMessage):
        return {"role": "system", "content": content}
    if isinstance(message, HumanMessage):
        return {"role": "user", "content": content, **named}
    if isinstance(message, AIMessage):
        return _answer(message, content)
    if isinstance(message, ToolMessage):
        return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id, **named}
    if isinstance(message, FunctionMessage):
        return tool_response(content)
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": content}
    raise PagedInvalidRequestError(f"a message of type {type(message).__name__} cannot be part of a chat")


def _answer(message: AIMessage, content: str) -> dict[str, Any]:
    # What was no proper call is shown as it was written, so that the model can see its mistake.
    content += "".join(call["args"] or "" for call in message.invalid_tool_calls)
    rendered: dict[str, Any] = {"role": "assistant", "content": content}
    reasoning = message.additional_kwargs.get("reasoning_content")
    if reasoning:
        rendered["reasoning_content"] = reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    return rendered


def _text(message: BaseMessage) -> str:
    """The content as one text; blocks of other kinds than text are refused."""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for block in message.content:
        kind = "text" if isinstance(block, str) else block.get("type")
        if kind == "text":
            texts.append(block if isinstance(block, str) else str(block.get("text", "")))
        elif not (isinstance(message, AIMessage) and kind in _SKIPPED_OF_ANSWERS):
            raise PagedInvalidRequestError(
                f"a {type(message).__name__} holds content of type {kind!r}; this model reads text only, so give "
                "strings or blocks of type 'text'"
            )
    return "".join(texts)
