"""Conversations as the dictionaries that chat templates read, told in words where a template does not know a part."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]], template: str
) -> Iterator[list[dict[str, Any]]]:
    """A conversation for ``template``, told in words about tools, calls and results where it does not know them.

    messages: each with a ``role`` and a text as ``content``, and where it has them ``name``, ``reasoning_content``,
    ``tool_call_id`` and ``tool_calls`` in OpenAI's form, but for their arguments, which are an object and not its text.
    After it what it may be where the template refuses it: one in which the user and the assistant take turns, and that
    without system messages.
    """
    knows_calls = bool(re.search(r"\btool_calls\b", template))
    knows_results = bool(re.search(r"""["']tool["']""", template))
    rendered = [_known(message, knows_calls, knows_results) for message in messages]
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


def tool_response(content: str) -> dict[str, Any]:
    """The result of a tool as the user's words."""
    return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}


def _known(message: Mapping[str, Any], knows_calls: bool, knows_results: bool) -> dict[str, Any]:
    if message["role"] == "tool" and not knows_results:
        return tool_response(message["content"])
    if not message.get("tool_calls") or knows_calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    for call in message["tool_calls"]:
        # Of all that a call has, these are what a model writes.
        text = json.dumps({name: call["function"][name] for name in ("name", "arguments")})
        texts.append(f"<tool_call>\n{text}\n</tool_call>")
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(texts)}
