"""ToolFormat: how a model writes its tool calls, and what they are once read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

# Every place where a call may stand gives its name and arguments; "parameters" is Llama's word.
Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class ToolFormat:
    """begin, end: what stands around a call, or before all of them if there is no end. inner: further marks.

    starts_with_json: whether an output that begins as JSON may be a call too, for models often leave the mark out, or
    there is none. read: the calls in what stands between; ValueError if it is none.
    """

    begin: str | None
    end: str | None
    starts_with_json: bool
    read: Callable[[str], Calls]
    inner: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them, which are special tokens in many models."""
        return tuple(mark for mark in (self.begin, self.end, *self.inner) if mark is not None)

    def end_of_call(self, text: str, final: bool) -> int:
        """Where in ``text``, which follows ``begin``, the mark stands that ends the call; -1 if it does not yet.

        One within a JSON string is a part of the arguments. final: nothing more comes.
        """
        first = text.find(self.end) if self.end is not None else -1
        if first < 0 or self.end is None:
            return -1
        places = re.finditer(rf'"(?:[^"\\]|\\.)*"?|{re.escape(self.end)}', text, flags=re.DOTALL)
        place = next((found.start() for found in places if found[0] == self.end), -1)
        is_read = place == first or (place < 0 and not final) or self._reads(text[:place] if place >= 0 else text)
        # Quotation marks that go astray tell nothing.
        return place if is_read else first

    def _reads(self, text: str) -> bool:
        try:
            self.read(text)
        except (ValueError, RecursionError):
            return False
        return True


def read_answer_calls(text: str, tools: Collection[str]) -> Calls:
    """The calls in an answer that is JSON without a mark; ValueError unless each names a tool and has arguments.

    Other answers may have a key ``name`` of their own.
    """
    calls = read_json_calls(text, needs_arguments=True)
    for name, _ in calls:
        if name not in tools:
            raise ValueError(f"{name!r} is no tool")
    return calls


def read_json_calls(text: str, needs_arguments: bool = False) -> Calls:
    """One call, a list of them, or several with ";" or white space between; ``{"name": "f"}`` has empty arguments."""
    decoder, calls, place = json.JSONDecoder(strict=False), Calls(), 0
    text = _without_fence(text)
    while place < len(text):
        if text[place] in " \t\r\n;,":
            place += 1
            continue
        value, place = decoder.raw_decode(text, place)
        for entry in value if isinstance(value, list) else [value]:
            calls.append(_call(entry, needs_arguments))
    if not calls:
        raise ValueError("there is no call")
    return calls


def read_mistral_calls(text: str) -> Calls:
    """A JSON list, or, as newer models write it, ``name{...}`` or ``name[ARGS]{...}`` one after another."""
    if text.lstrip().startswith(("[", "{")):
        return read_json_calls(text)
    calls = Calls()
    decoder, place = json.JSONDecoder(strict=False), 0
    name = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(?=\{)")
    while text[place:].strip():
        found = name.match(text, place)
        if found is None:
            raise ValueError(f"{text[place:]!r} is no call")
        arguments, place = decoder.raw_decode(text, found.end())
        calls.append((found[1], arguments))
    return calls


def _call(value: Any, needs_arguments: bool) -> tuple[str, dict[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"a tool call needs a name: {value!r}")
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        if needs_arguments or not set(value) <= {"name", "type", "id", "arguments", "parameters"}:
            raise ValueError(f"a tool call needs arguments: {value!r}")
        arguments = {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments, strict=False)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a tool call must be an object: {value!r}")
    return value["name"], arguments


def _without_fence(text: str) -> str:
    found = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, flags=re.DOTALL)
    return found[1] if found else text


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", False, read_json_calls),
    "llama3": ToolFormat("<|python_tag|>", None, True, read_json_calls),
    "mistral": ToolFormat("[TOOL_CALLS]", None, True, read_mistral_calls, inner=("[ARGS]", "[CALL_ID]")),
    "json": ToolFormat(None, None, True, read_json_calls),
}


def format_of_template(template: str) -> ToolFormat:
    """The format that a chat template shows; Hermes' where it shows none, for which the model is told about it."""
    for name, mark in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("llama3", "<|python_tag|>")):
        if mark in template:
            return FORMATS[name]
    return FORMATS["llama3"] if re.search(r"""["']parameters["']""", template) else FORMATS["hermes"]
