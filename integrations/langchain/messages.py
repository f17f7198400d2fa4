"""LangChain's messages as the dictionaries that chat templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
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

from paged_backend.integrations.langchain.errors import PagedInvalidRequestError

# Blocks of an answer that its text or its tool_calls hold already, or that templates leave out.
_SKIPPED_OF_ANSWERS = frozenset(
    {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "thinking", "redacted_thinking"}
)

_INSTRUCTIONS = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def conversations(
    messages: Sequence[BaseMessage], tools: Sequence[dict[str, Any]], template: str
) -> Iterator[list[dict[str, Any]]]:
    """A conversation for ``template``, told in words about tools, calls and results where it does not know them.

    After it what it may be where the template refuses it: one in which the user and the assistant take turns, and that
    without system messages.
    """
    knows_calls = bool(re.search(r"\btool_calls\b", template))
    knows_results = bool(re.search(r"""["']tool["']""", template))
    rendered = [_message(message, knows_calls, knows_results) for message in messages]
    if tools and not knows_tools(template):
        text = _INSTRUCTIONS.format(tools="\n".join(map(in_words, tools)))
        if rendered and rendered[0]["role"] == "system":
            rendered[0]["content"] += f"\n\n{text}"
        else:
            rendered.insert(0, {"role": "system", "content": text})
    yield rendered
    yield _in_turns(rendered, keeps_system=True)
    yield _in_turns(rendered, keeps_system=False)


def in_words(tool: dict[str, Any]) -> str:
    """What a conversation says of a tool where the template does not know tools."""
    return json.dumps(tool)


def knows_tools(template: str) -> bool:
    """Whether a template says what tools there are."""
    return bool(re.search(r"\btools\b", template))


def _in_turns(conversation: list[dict[str, Any]], keeps_system: bool) -> list[dict[str, Any]]:
    """The same with what one side says at a time as one message, and with the user beginning.

    keeps_system: the first message may be the system's; the user says what the system says otherwise.
    """
    turns: list[dict[str, Any]] = []
    for message in conversation:
        role, last = message["role"], turns[-1]["role"] if turns else "system"
        if role == "system" and not (keeps_system and last == "system"):
            message = {**message, "role": "user"}
        elif role == "assistant" and last == "system":
            turns.append({"role": "user", "content": ""})
        if turns and turns[-1]["role"] == message["role"] != "tool":
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    return turns


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role as one."""
    joined = {**second, **first}
    for key in ("content", "reasoning_content"):
        texts = [message[key] for message in (first, second) if message.get(key)]
        if texts:
            joined[key] = "\n\n".join(texts)
    if "tool_calls" in joined:
        joined["tool_calls"] = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return joined


def _message(message: BaseMessage, knows_calls: bool, knows_results: bool) -> dict[str, Any]:
    content = _text(message)
    named = {"name": message.name} if message.name else {}
    if isinstance(message, SystemMessage):
        return {"role": "system", "content": content}
    if isinstance(message, HumanMessage):
        return {"role": "user", "content": content, **named}
    if isinstance(message, AIMessage):
        return _answer(message, content, knows_calls)
    if isinstance(message, ToolMessage) and knows_results:
        return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id, **named}
    if isinstance(message, (ToolMessage, FunctionMessage)):
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": content}
    raise PagedInvalidRequestError(f"a message of type {type(message).__name__} cannot be part of a chat")


def _answer(message: AIMessage, content: str, knows_calls: bool) -> dict[str, Any]:
    calls: list[tuple[Any, str, Any]] = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    if calls and not knows_calls:
        texts = [json.dumps({"name": name, "arguments": args}) for _, name, args in calls]
        content = "\n".join([*([content] if content else []), *(f"<tool_call>\n{t}\n</tool_call>" for t in texts)])
        calls = []
    # What was no proper call is shown as it was written, so that the model can see its mistake.
    content += "".join(call["args"] or "" for call in message.invalid_tool_calls)
    rendered: dict[str, Any] = {"role": "assistant", "content": content}
    reasoning = message.additional_kwargs.get("reasoning_content")
    if reasoning:
        rendered["reasoning_content"] = reasoning
    if calls:
        rendered["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": args}}
            for call_id, name, args in calls
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
